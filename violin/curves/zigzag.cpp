// zigzag: one anti-diagonal r + c = 0, 1, 2, ... after another. Even ones run downwards (row increasing), odd ones
// upwards, so the first step is down. (The order that JPEG uses is the transpose of this one, zigzag_T.)
#include <algorithm>

#include "violin/curves/walk.h"

namespace violin::curves {

void walk_zigzag(const Lattice& lattice, Walk& walk) {
  const auto& [frame, row, column] = lattice;
  const std::int64_t down_left = row.stride - column.stride;
  for (std::int64_t d = 0; d < row.cells + column.cells - 1; ++d) {
    const std::int64_t top = std::max<std::int64_t>(0, d - (column.cells - 1));
    const std::int64_t bottom = std::min(d, row.cells - 1);
    const std::int64_t count = bottom - top + 1;
    if (d % 2 == 0) {
      walk.line(top * row.stride + (d - top) * column.stride, down_left, count);
    } else {
      walk.line(bottom * row.stride + (d - bottom) * column.stride, -down_left, count);
    }
  }
}

}  // namespace violin::curves
