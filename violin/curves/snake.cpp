// snake: row after row, every other one from right to left, so that each step goes to an edge neighbour. Through a
// volume it climbs every other frame from the bottom row to the top one, and the direction along a row still changes
// with each row.
#include "violin/curves/walk.h"

namespace violin::curves {

void walk_snake(const Lattice& lattice, Walk& walk) {
  const auto& [frame, row, column] = lattice;
  const std::int64_t right_end = (column.cells - 1) * column.stride;
  bool leftwards = false;
  for (std::int64_t t = 0; t < frame.cells; ++t) {
    for (std::int64_t i = 0; i < row.cells; ++i) {
      const std::int64_t r = t % 2 == 0 ? i : row.cells - 1 - i;
      const std::int64_t left_end = t * frame.stride + r * row.stride;
      if (leftwards) {
        walk.line(left_end + right_end, -column.stride, column.cells);
      } else {
        walk.line(left_end, column.stride, column.cells);
      }
      leftwards = !leftwards;
    }
  }
}

}  // namespace violin::curves
