// Curves and masks in characters, for a terminal. Blocks are rectangles of text that can stand side by side.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "violin/curves/curves.h"

namespace violin::viz {

struct TextBlock {
  std::vector<std::string> lines;  // UTF-8, each `width` columns wide, escape codes not counted
  std::int64_t width = 0;
};

// The path of a curve in box-drawing characters, two columns and one line per cell, frames side by side: ● the first
// cell, ○ the last, ╱ ╲ diagonal steps, half lines where the curve jumps. A curve that mostly jumps is shown as a table
// of its ranks. Empty for manhattan. `color` adds 256-colour escape codes by position.
TextBlock path_block(const curves::Curve& curve, const curves::Grid& grid, bool color);

// A heat map of values from 0 to 1, two columns and one line per cell, the reference cell as []: coloured, or in four
// shades.
TextBlock heat_block(std::span<const double> values, const curves::Grid& grid, std::int64_t reference, bool color);

// Blocks under their titles, as many beside each other as fit into `max_width` columns.
std::string side_by_side(std::span<const TextBlock> blocks, std::span<const std::string> titles,
                         std::int64_t max_width);

// Columns that a text takes where every character is one column wide.
std::int64_t columns_of(std::string_view text);

// Columns aligned under a header: the first to the left, the others to the right.
std::string table(std::span<const std::vector<std::string>> rows);

}  // namespace violin::viz
