#include "violin/viz/decay_chart.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "violin/error.h"
#include "violin/viz/font.h"
#include "violin/viz/grid_plot.h"

namespace violin::viz {
namespace {

constexpr double kMargin = 32;
constexpr double kHeaderHeight = 62;
constexpr double kPanelTitleHeight = 20;
constexpr double kLabelWidth = 62;
constexpr double kGap = 22;
constexpr double kFooterHeight = 64;
constexpr double kNameSize = 13;
constexpr double kMaxWidth = 1040;
constexpr double kLongestReach = 1e6;  // a decay of exactly 1 reaches everywhere

constexpr Color kPositive = rgb(0x12806a);
constexpr Color kNegative = rgb(0xc2325a);

double reach(double log_gamma) {
  if (std::isnan(log_gamma)) return 0;
  return log_gamma < 0 ? std::min(-1 / log_gamma, kLongestReach) : kLongestReach;
}

// Equal factors of the reach are equal steps of colour.
double share(double length, double lowest, double highest) {
  if (highest <= lowest) return 1;
  return std::clamp(std::log(length / lowest) / std::log(highest / lowest), 0.0, 1.0);
}

Color alpha_color(double share_of_largest) {
  const double strength = std::clamp(std::abs(share_of_largest), 0.0, 1.0);
  return mix(kPanel, share_of_largest < 0 ? kNegative : kPositive, strength);
}

std::string short_number(double value) {
  char text[32];
  // Two digits are enough for thousands of steps, and no exponent.
  const double step = std::abs(value) < 1000 ? 0 : std::pow(10, std::floor(std::log10(std::abs(value))) - 1);
  if (step > 0) {
    std::snprintf(text, sizeof text, "%.0f", std::round(value / step) * step);
  } else {
    std::snprintf(text, sizeof text, "%.3g", value);
  }
  return text;
}

// gamma that reaches so far, with as many digits as tell it from 1.
std::string gamma_text(double length) {
  if (length >= kLongestReach) return "1";
  const int digits = std::clamp(static_cast<int>(std::ceil(std::log10(length))) + 1, 2, 9);
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, std::exp(-1 / length));
  return text;
}

}  // namespace

void share_scale(std::span<DecayChart* const> charts) {
  double lowest = kLongestReach, highest = 1, largest = 1e-12;
  for (const DecayChart* chart : charts) {
    for (const double value : chart->log_gamma) {
      lowest = std::min(lowest, std::max(reach(value), 0.1));
      highest = std::max(highest, reach(value));
    }
    for (const double value : chart->alpha) largest = std::max(largest, std::abs(value));
  }
  if (highest < lowest * 1.2) lowest = highest / 1.2;
  for (DecayChart* chart : charts) chart->shortest = lowest, chart->longest = highest, chart->largest_alpha = largest;
}

Scene decay_chart(const DecayChart& chart) {
  const std::size_t layers = chart.blocks.size(), curves = chart.curves.size();
  const auto heads = static_cast<std::size_t>(std::max<std::int64_t>(chart.heads, 0));
  const bool has_alpha = !chart.alpha.empty();
  if (layers == 0 || heads == 0 || (curves == 0 && !has_alpha) || layers > 1000 || heads > 1000 || curves > 100)
    throw Error("a picture of decays needs layers, heads and curves, at most 1000, 1000 and 100");
  if (chart.log_gamma.size() != layers * curves * heads || (has_alpha && chart.alpha.size() != layers * heads))
    throw Error("decays or alphas are not one per layer, head and curve");

  DecayChart scaled = chart;
  if (scaled.longest <= 0) {
    DecayChart* const alone = &scaled;
    share_scale({&alone, 1});
  }
  const double lowest = scaled.shortest, highest = scaled.longest, largest = scaled.largest_alpha;

  const std::size_t panels = curves + (has_alpha ? 1 : 0);
  double longest_name = 0;
  for (const std::string& name : chart.curves) longest_name = std::max(longest_name, text_room(name, kNameSize));
  const auto across = static_cast<double>(heads), down = static_cast<double>(layers);
  const double columns = std::min(static_cast<double>(panels), panels > 6 ? std::ceil(static_cast<double>(panels) / 2)
                                                                          : static_cast<double>(panels));
  const double lines = std::ceil(static_cast<double>(panels) / columns);
  const double room = (kMaxWidth - kLabelWidth - (columns - 1) * kGap) / columns;
  const double cell = std::clamp(std::min(room / across, 330 / down), 4.0, 22.0);
  const double width = across * cell, height = down * cell;
  const double pitch_x = std::max(width, longest_name) + kGap;
  const double pitch_y = height + kPanelTitleHeight + kGap;

  Scene scene;
  scene.title = chart.title;
  scene.width = std::max(2 * kMargin + kLabelWidth + columns * pitch_x - kGap, 740.0);
  scene.height = kMargin + kHeaderHeight + lines * pitch_y - kGap + kFooterHeight + kMargin - 8;
  const auto add = [&scene](Shape shape) { scene.shapes.push_back(std::move(shape)); };
  add(Text{.baseline = {kMargin, kMargin + 16}, .text = chart.title, .size = 21, .bold = true});
  add(Text{.baseline = {kMargin, kMargin + 38},
           .text = "Layers downwards, heads to the right. Colour: how many steps along the curve until 1/e is left.",
           .size = 13,
           .color = kSoftInk});

  const double left = kMargin + kLabelWidth;
  for (std::size_t panel = 0; panel < panels; ++panel) {
    const double column = std::fmod(static_cast<double>(panel), columns);
    const double line = std::floor(static_cast<double>(panel) / columns);
    const double x = left + column * pitch_x;
    const double y = kMargin + kHeaderHeight + line * pitch_y + kPanelTitleHeight;
    const bool of_alpha = panel == curves;
    add(Text{
        .baseline = {x, y - 7}, .text = of_alpha ? "alpha" : chart.curves[panel], .size = kNameSize, .bold = true});
    auto map = std::make_shared<Image>(chart.heads, static_cast<std::int64_t>(layers));
    for (std::size_t l = 0; l < layers; ++l) {
      for (std::size_t h = 0; h < heads; ++h) {
        const Color color =
            of_alpha ? alpha_color(chart.alpha[l * heads + h] / largest)
                     : mask_color(share(std::max(reach(chart.log_gamma[(l * curves + panel) * heads + h]), 0.1), lowest,
                                        highest));
        set_pixel(*map, static_cast<std::int64_t>(h), static_cast<std::int64_t>(l), color);
      }
    }
    add(Picture{.box = {x, y, width, height}, .image = std::move(map), .smooth = false});
    add(Rectangle{.box = {x, y, width, height}, .stroke = kRule, .stroke_width = 1});
    if (column > 0) continue;
    const std::size_t every = std::max<std::size_t>(1, static_cast<std::size_t>(std::ceil(14 / cell)));
    for (std::size_t l = 0; l < layers; l += every) {
      add(Text{.baseline = {x - 8, y + (static_cast<double>(l) + 0.5) * cell + 4},
               .text = std::to_string(chart.blocks[l]),
               .size = 12,
               .color = kSoftInk,
               .anchor = Anchor::kEnd});
    }
    add(Text{.baseline = {kMargin, y + 10}, .text = "layer", .size = 12, .color = kSoftInk});
  }

  const double bar_y = scene.height - kMargin - 34, bar_width = 240;
  double bar_x = left;
  const auto legend = [&](const std::string& name, const std::shared_ptr<const Image>& ramp,
                          const std::vector<std::pair<std::string, std::string>>& ticks) {
    add(Text{
        .baseline = {bar_x - 10, bar_y + 10}, .text = name, .size = 12, .color = kSoftInk, .anchor = Anchor::kEnd});
    add(Picture{.box = {bar_x, bar_y, bar_width, 10}, .image = ramp});
    for (std::size_t i = 0; i < ticks.size(); ++i) {
      const double x = bar_x + bar_width * static_cast<double>(i) / static_cast<double>(ticks.size() - 1);
      add(Text{.baseline = {x, bar_y + 25},
               .text = ticks[i].first,
               .size = 12,
               .color = kSoftInk,
               .anchor = Anchor::kMiddle});
      add(Text{.baseline = {x, bar_y + 40},
               .text = ticks[i].second,
               .size = 12,
               .color = kSoftInk,
               .anchor = Anchor::kMiddle});
    }
    bar_x += bar_width + 90;
  };
  if (curves > 0) {
    std::vector<std::pair<std::string, std::string>> ticks;
    for (const double part : {0.0, 0.5, 1.0}) {
      const double length = lowest * std::pow(highest / lowest, part);
      ticks.emplace_back("γ " + gamma_text(length),
                         length >= kLongestReach ? "no decay" : short_number(length) + " steps");
    }
    legend("decay", color_ramp(mask_color), ticks);
  }
  if (has_alpha) {
    legend("alpha", color_ramp([](double position) { return alpha_color(2 * position - 1); }),
           {{short_number(-largest), ""}, {"0", ""}, {short_number(largest), ""}});
  }
  return scene;
}

}  // namespace violin::viz
