// A stroke font: every printable ASCII character and a few more as polylines, to be drawn with a round pen.
#pragma once

#include <string_view>
#include <vector>

#include "violin/viz/scene.h"

namespace violin::viz {

// Thickness of the pen relative to the size.
inline constexpr double kPen = 0.085;
inline constexpr double kBoldPen = 0.125;

// Strokes of `text` at `size` units per em, from x = 0 on the baseline y = 0, y down. Characters that the font does not
// have become a box.
std::vector<std::vector<Point>> text_strokes(std::string_view text, double size);

double text_width(std::string_view text, double size);

// Room for a text in either backend: readers' fonts are wider than ours, bold ones more so.
inline double text_room(std::string_view text, double size) {
  return 1.2 * text_width(text, size);
}

}  // namespace violin::viz
