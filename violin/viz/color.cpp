#include "violin/viz/color.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <span>

namespace violin::viz {
namespace {

// OKLab (Björn Ottosson, 2020): equal distances look equally large, so ramps through it have no bands or muddy middles.
struct Lab {
  double l, a, b;
};

double to_linear(std::uint8_t value) {
  const double s = value / 255.0;
  return s <= 0.04045 ? s / 12.92 : std::pow((s + 0.055) / 1.055, 2.4);
}

double to_srgb(double linear) {
  return linear <= 0.0031308 ? linear * 12.92 : 1.055 * std::pow(linear, 1 / 2.4) - 0.055;
}

Lab to_lab(Color color) {
  const double r = to_linear(color.red);
  const double g = to_linear(color.green);
  const double b = to_linear(color.blue);
  const double l = std::cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const double m = std::cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const double s = std::cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return {0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
          1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
          0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s};
}

std::array<double, 3> to_linear_rgb(Lab lab) {
  const auto cube = [](double x) { return x * x * x; };
  const double l = cube(lab.l + 0.3963377774 * lab.a + 0.2158037573 * lab.b);
  const double m = cube(lab.l - 0.1055613458 * lab.a - 0.0638541728 * lab.b);
  const double s = cube(lab.l - 0.0894841775 * lab.a - 1.2914855480 * lab.b);
  return {4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
          -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
          -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s};
}

bool fits_screen(Lab lab) {
  const std::array<double, 3> linear = to_linear_rgb(lab);
  return std::all_of(linear.begin(), linear.end(), [](double x) { return x > -1e-4 && x < 1 + 1e-4; });
}

Color to_color(Lab lab) {
  std::array<std::uint8_t, 3> out = {};
  const std::array<double, 3> linear = to_linear_rgb(lab);
  for (std::size_t i = 0; i < 3; ++i) {
    out[i] = static_cast<std::uint8_t>(std::lround(255 * std::clamp(to_srgb(std::max(linear[i], 0.0)), 0.0, 1.0)));
  }
  return {out[0], out[1], out[2]};
}

Color ramp(std::span<const Color> stops, double position) {
  const double at = std::clamp(position, 0.0, 1.0) * static_cast<double>(stops.size() - 1);
  const auto index = std::min(static_cast<std::size_t>(at), stops.size() - 2);
  return mix(stops[index], stops[index + 1], at - static_cast<double>(index));
}

}  // namespace

Color mix(Color from, Color to, double share) {
  const Lab a = to_lab(from);
  const Lab b = to_lab(to);
  const auto between = [share](double x, double y) { return x + (y - x) * share; };
  Color color = to_color({between(a.l, b.l), between(a.a, b.a), between(a.b, b.b)});
  color.alpha = between(from.alpha, to.alpha);
  return color;
}

Color position_color(double position) {
  static constexpr std::array kStops = {rgb(0x2b2a80), rgb(0x6f2da0), rgb(0xb93a8b), rgb(0xe5604f), rgb(0xf0a836)};
  return ramp(kStops, position);
}

Color mask_color(double value) {
  static constexpr std::array kStops = {rgb(0x130f24), rgb(0x43196b), rgb(0x932b6f),
                                        rgb(0xdd5a48), rgb(0xf7a540), rgb(0xfdf1c1)};
  return ramp(kStops, value);
}

Color hue_color(double hue, double lightness) {
  const double angle = 2 * std::numbers::pi * hue;
  const auto at = [&](double chroma) { return Lab{lightness, chroma * std::cos(angle), chroma * std::sin(angle)}; };
  double low = 0;
  double high = 0.15;
  if (fits_screen(at(high))) return to_color(at(high));
  for (int i = 0; i < 20; ++i) {
    const double middle = (low + high) / 2;
    (fits_screen(at(middle)) ? low : high) = middle;
  }
  return to_color(at(low));
}

}  // namespace violin::viz
