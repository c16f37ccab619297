#include "violin/viz/html.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "violin/number_text.h"

namespace violin::viz {
std::string_view entity(char c) {
  switch (c) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    default:
      return "";
  }
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (const std::string_view name = entity(c); !name.empty()) {
      out += name;
    } else if (c == '\'') {
      out += "&#39;";
    } else if (static_cast<unsigned char>(c) >= 0x20 || c == '\n') {
      out += c;
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

Scene darkened(Scene scene) {
  const auto ground = [](Color color) {
    constexpr std::array<std::pair<Color, Color>, 5> kPairs = {{{kPaper, rgb(0x211e28)},
                                                                {kPanel, rgb(0x2c2836)},
                                                                {kRule, rgb(0x453f52)},
                                                                {kInk, rgb(0xece8f2)},
                                                                {kSoftInk, rgb(0xaaa4b6)}}};
    for (const auto& [light, dark] : kPairs)
      if (color.with_alpha(1) == light) return dark.with_alpha(color.alpha);
    return color;
  };
  const auto line = [&](Color color) {
    const Color on_ground = ground(color);
    return on_ground == color ? mix(color.with_alpha(1), kPaper, 0.3).with_alpha(color.alpha) : on_ground;
  };
  scene.background = ground(scene.background);
  for (Shape& shape : scene.shapes) {
    if (auto* box = std::get_if<Rectangle>(&shape)) {
      box->fill = ground(box->fill);
      box->stroke = ground(box->stroke);
    } else if (auto* path = std::get_if<Polyline>(&shape)) {
      for (Color& color : path->colors) color = line(color);
    } else if (auto* dot = std::get_if<Dot>(&shape)) {
      dot->fill = line(dot->fill);
      dot->stroke = line(dot->stroke);
    } else if (auto* text = std::get_if<Text>(&shape)) {
      text->color = ground(text->color);
    }
  }
  return scene;
}

bool Pictures::spend(std::size_t bytes) {
  if (bytes > left_) {
    ++left_out_;
    return false;
  }
  left_ -= bytes;
  return true;
}

std::string Pictures::background(const Image& image) {
  std::string data = base64(encode_png(image));
  const auto known = classes_.find(data);
  if (known != classes_.end()) return known->second;
  if (!spend(data.size() + 80)) return "";
  const std::string name = "i" + std::to_string(classes_.size());
  classes_.emplace(std::move(data), name);
  return name;
}

std::string Pictures::styles() const {
  std::string css;
  for (const auto& [data, name] : classes_)
    css += "." + name + "{background-image:url(data:image/png;base64," + data + ")}";
  return css;
}

std::string Pictures::scene(const Scene& scene, std::string_view description) {
  const auto source = [](const Scene& version) {
    const std::string svg = to_svg(version);
    return "data:image/svg+xml;base64," + base64(Bytes(svg.begin(), svg.end()));
  };
  const std::string light = source(scene), dark = source(darkened(scene));
  if (!spend(light.size() + dark.size()))
    return "<p class=\"soft\">A picture is left out here to keep this page small.</p>";
  return "<div class=\"scroll\"><picture><source media=\"(prefers-color-scheme:dark)\" srcset=\"" + dark +
         "\"><img class=\"scene\" alt=\"" + escape_html(description) + "\" width=\"" + number_text(scene.width) +
         "\" height=\"" + number_text(scene.height) + "\" src=\"" + light + "\"></picture></div>";
}

std::vector<double> ticks(double low, double high, int wanted, double smallest) {
  if (!(high > low)) return {low};
  const double raw = std::max((high - low) / std::max(wanted, 1), smallest),
               power = std::pow(10, std::floor(std::log10(raw)));
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
  constexpr double kWidth = 360, kHeight = 220, kLeft = 50, kRight = 12, kTop = 12, kBottom = 36;
  constexpr std::size_t kPoints = 400;
  double x0 = 1e300, x1 = -1e300, y0 = 1e300, y1 = -1e300;
  for (const Series& series : chart.series) {
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (!std::isfinite(series.y[i])) continue;
      x0 = std::min(x0, series.x[i]), x1 = std::max(x1, series.x[i]);
      y0 = std::min(y0, series.y[i]), y1 = std::max(y1, series.y[i]);
    }
  }
  std::string html = "<figure class=\"chart\"><figcaption>" + escape_html(chart.title) + "</figcaption>";
  if (x0 > x1) return html + "<p class=\"soft\">Nothing was logged.</p></figure>";
  if (chart.from_zero) y0 = std::min(y0, 0.0);
  if (x0 == x1) x0 -= 0.5, x1 += 0.5;
  if (y0 == y1) y0 -= std::max(0.5 * std::abs(y0), 1e-6), y1 += std::max(0.5 * std::abs(y1), 1e-6);
  const double margin = 0.04 * (y1 - y0);
  if (!chart.from_zero || y0 < 0) y0 -= margin;
  y1 += margin;
  const auto px = [&](double x) { return kLeft + (x - x0) / (x1 - x0) * (kWidth - kLeft - kRight); };
  const auto py = [&](double y) { return kHeight - kBottom - (y - y0) / (y1 - y0) * (kHeight - kTop - kBottom); };
  html += "<svg viewBox=\"0 0 " + number_text(kWidth) + " " + number_text(kHeight) + "\" role=\"img\" aria-label=\"" +
          escape_html(chart.title) + "\">";
  for (const double tick : ticks(y0, y1, 5)) {
    const std::string y = number_text(py(tick), "%.1f");
    html += "<line class=\"rule\" x1=\"" + number_text(kLeft) + "\" x2=\"" + number_text(kWidth - kRight) + "\" y1=\"" +
            y + "\" y2=\"" + y + "\"/><text class=\"tick\" text-anchor=\"end\" x=\"" + number_text(kLeft - 6) +
            "\" y=\"" + number_text(py(tick) + 4, "%.1f") + "\">" + number_text(tick) + chart.unit + "</text>";
  }
  for (const double tick : ticks(x0, x1, 6, 1)) {
    html += "<text class=\"tick\" text-anchor=\"middle\" x=\"" + number_text(px(tick), "%.1f") + "\" y=\"" +
            number_text(kHeight - 20) + "\">" + number_text(tick) + "</text>";
  }
  html += "<text class=\"tick\" text-anchor=\"end\" x=\"" + number_text(kWidth - kRight) + "\" y=\"" +
          number_text(kHeight - 5) + "\">" + escape_html(chart.x_label) + "</text>";
  for (const Series& series : chart.series) {
    const std::size_t stride = std::max<std::size_t>(1, (series.x.size() + kPoints - 1) / kPoints);
    std::string points;
    std::size_t count = 0;
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      const bool last = i + 1 == series.x.size();
      if (!std::isfinite(series.y[i]) || (i % stride != 0 && !last)) continue;
      points += number_text(px(series.x[i]), "%.1f") + "," + number_text(py(series.y[i]), "%.1f") + " ";
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
    if (series.name.empty()) continue;
    html +=
        "<span class=\"entry\"><span class=\"key c" + std::to_string(series.color % 8) +
        (series.dashed ? " dashed" : "") + "\"></span>" + escape_html(series.name) +
        (series.y.empty() || !chart.last_values ? ""
                                                : " <b>" + number_text(series.y.back(), "%.4g") + chart.unit + "</b>") +
        "</span> ";
  }
  return html + "</p></figure>";
}

}  // namespace violin::viz
