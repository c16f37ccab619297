// z: row after row from left to right, frame after frame: the order of flattening.
#include "violin/curves/walk.h"

namespace violin::curves {

void walk_z(const Lattice& lattice, Walk& walk) {
  const auto& [frame, row, column] = lattice;
  for (std::int64_t t = 0; t < frame.cells; ++t) {
    for (std::int64_t r = 0; r < row.cells; ++r) {
      walk.line(t * frame.stride + r * row.stride, column.stride, column.cells);
    }
  }
}

}  // namespace violin::curves
