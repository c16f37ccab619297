// Colours and the two colour maps of all pictures.
#pragma once

#include <cstdint>

namespace violin::viz {

struct Color {
  std::uint8_t red = 0;
  std::uint8_t green = 0;
  std::uint8_t blue = 0;
  double alpha = 1;

  constexpr Color with_alpha(double a) const { return {red, green, blue, a}; }
  friend bool operator==(const Color&, const Color&) = default;
};

// rgb(0xRRGGBB)
constexpr Color rgb(std::uint32_t hex) {
  return {static_cast<std::uint8_t>(hex >> 16), static_cast<std::uint8_t>(hex >> 8), static_cast<std::uint8_t>(hex)};
}

// Between two colours, evenly to the eye (interpolated in OKLab).
Color mix(Color from, Color to, double share);

// Where along a curve, 0 to 1: indigo over rose to amber, getting lighter all the way, readable on a light ground.
Color position_color(double position);

// A mask value, 0 to 1: almost black over purple and orange to pale yellow.
Color mask_color(double value);

// A lightness (0 black, 1 white) at a hue in turns; saturated as far as the screen allows within a soft limit.
Color hue_color(double hue, double lightness);

// What pictures are painted with beside the maps.
inline constexpr Color kPaper = rgb(0xffffff);
inline constexpr Color kPanel = rgb(0xf5f4f1);
inline constexpr Color kRule = rgb(0xe3e0da);
inline constexpr Color kInk = rgb(0x24212b);
inline constexpr Color kSoftInk = rgb(0x77727f);

}  // namespace violin::viz
