#include "violin/viz/html.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace violin::viz {
namespace {

std::string number(double value, const char* format = "%.6g") {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        if (static_cast<unsigned char>(c) >= 0x20 || c == '\n') out += c;
    }
  }
  return out;
}

std::string base64(const Bytes& bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t count = std::min<std::size_t>(3, bytes.size() - i);
    std::uint32_t group = 0;
    for (std::size_t j = 0; j < 3; ++j) group = group << 8 | (j < count ? bytes[i + j] : 0U);
    for (std::size_t j = 0; j < 4; ++j) text += j <= count ? kDigits[group >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

std::string embedded(const Scene& scene, std::string_view description) {
  const std::string svg = to_svg(scene);
  return "<img class=\"scene\" alt=\"" + escape_html(description) + "\" width=\"" + number(scene.width) +
         "\" src=\"data:image/svg+xml;base64," + base64(Bytes(svg.begin(), svg.end())) + "\">";
}

std::string embedded(const Image& image, std::string_view description, bool pixelated) {
  return "<img" + std::string(pixelated ? " class=\"pixels\"" : "") + " alt=\"" + escape_html(description) +
         "\" src=\"data:image/png;base64," + base64(encode_png(image)) + "\">";
}

std::vector<double> ticks(double low, double high, int wanted) {
  if (!(high > low)) return {low};
  const double raw = (high - low) / std::max(wanted, 1), power = std::pow(10, std::floor(std::log10(raw)));
  double step = power;
  for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
    step = factor * power;
    if (step >= raw * 0.999) break;
  }
  std::vector<double> result;
  for (double tick = std::ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step)
    result.push_back(std::abs(tick) < step * 1e-9 ? 0 : tick);
  return result;
}

std::string line_chart(const LineChart& chart) {
  constexpr double kWidth = 460, kHeight = 230, kLeft = 52, kRight = 12, kTop = 10, kBottom = 26;
  double x0 = 1e300, x1 = -1e300, y0 = 1e300, y1 = -1e300;
  for (const Series& series : chart.series) {
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (!std::isfinite(series.y[i])) continue;
      x0 = std::min(x0, series.x[i]), x1 = std::max(x1, series.x[i]);
      y0 = std::min(y0, series.y[i]), y1 = std::max(y1, series.y[i]);
    }
  }
  std::string html = "<figure class=\"chart\"><figcaption>" + escape_html(chart.title) + "</figcaption>";
  if (x0 > x1) return html + "<p class=\"soft\">nothing was logged</p></figure>";
  if (chart.from_zero) y0 = std::min(y0, 0.0);
  if (x0 == x1) x0 -= 0.5, x1 += 0.5;
  if (y0 == y1) y0 -= std::max(0.5 * std::abs(y0), 1e-6), y1 += std::max(0.5 * std::abs(y1), 1e-6);
  const double margin = 0.04 * (y1 - y0);
  if (!chart.from_zero || y0 < 0) y0 -= margin;
  y1 += margin;
  const auto px = [&](double x) { return kLeft + (x - x0) / (x1 - x0) * (kWidth - kLeft - kRight); };
  const auto py = [&](double y) { return kHeight - kBottom - (y - y0) / (y1 - y0) * (kHeight - kTop - kBottom); };
  html += "<svg viewBox=\"0 0 " + number(kWidth) + " " + number(kHeight) + "\" role=\"img\" aria-label=\"" +
          escape_html(chart.title) + "\">";
  for (const double tick : ticks(y0, y1, 5)) {
    const std::string y = number(py(tick), "%.1f");
    html += "<line class=\"rule\" x1=\"" + number(kLeft) + "\" x2=\"" + number(kWidth - kRight) + "\" y1=\"" + y +
            "\" y2=\"" + y + "\"/><text class=\"tick\" text-anchor=\"end\" x=\"" + number(kLeft - 6) + "\" y=\"" +
            number(py(tick) + 4, "%.1f") + "\">" + number(tick) + chart.unit + "</text>";
  }
  for (const double tick : ticks(x0, x1, 6)) {
    html += "<text class=\"tick\" text-anchor=\"middle\" x=\"" + number(px(tick), "%.1f") + "\" y=\"" +
            number(kHeight - 8) + "\">" + number(tick) + "</text>";
  }
  for (const Series& series : chart.series) {
    std::string points;
    std::size_t count = 0;
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (!std::isfinite(series.y[i])) continue;
      points += number(px(series.x[i]), "%.1f") + "," + number(py(series.y[i]), "%.1f") + " ";
      ++count;
    }
    const std::string style =
        " class=\"line c" + std::to_string(series.color % 8) + (series.dashed ? " dashed" : "") + "\"";
    if (count == 1) {
      const std::size_t comma = points.find(',');
      html += "<circle r=\"3\" cx=\"" + points.substr(0, comma) + "\" cy=\"" +
              points.substr(comma + 1, points.size() - comma - 2) + "\"" + style + "/>";
    } else if (count > 1) {
      html += "<polyline points=\"" + points + "\"" + style + "/>";
    }
  }
  html += "</svg><p class=\"legend\">";
  for (const Series& series : chart.series) {
    html += "<span class=\"key c" + std::to_string(series.color % 8) + (series.dashed ? " dashed" : "") + "\"></span>" +
            escape_html(series.name) +
            (series.y.empty() ? "" : " <b>" + number(series.y.back(), "%.4g") + chart.unit + "</b>") + " ";
  }
  return html + "</p></figure>";
}

}  // namespace violin::viz
