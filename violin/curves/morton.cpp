// morton, published as "peano": cells sorted by the number that interleaves the bits of their coordinates, the column
// in the lowest bit, then the row, then the frame.
//
// A cube with a power of two as its side is visited octant by octant in that very order, so descending into it yields
// the cells sorted. Octants that lie outside of the grid are never entered: the cost is proportional to the number of
// cells on any grid, long strips included, and the depth is the number of bits of the longest side.
#include <algorithm>
#include <bit>

#include "violin/curves/walk.h"

namespace violin::curves {
namespace {

void descend(const Lattice& lattice, Walk& walk, std::int64_t t0, std::int64_t r0, std::int64_t c0, std::int64_t side) {
  const auto& [frame, row, column] = lattice;
  if (side == 1) {
    walk.visit(t0 * frame.stride + r0 * row.stride + c0 * column.stride);
    return;
  }
  const std::int64_t half = side / 2;
  const std::int64_t t_end = std::min(t0 + side, frame.cells);
  const std::int64_t r_end = std::min(r0 + side, row.cells);
  const std::int64_t c_end = std::min(c0 + side, column.cells);
  for (std::int64_t t = t0; t < t_end; t += half) {
    for (std::int64_t r = r0; r < r_end; r += half) {
      for (std::int64_t c = c0; c < c_end; c += half) descend(lattice, walk, t, r, c, half);
    }
  }
}

}  // namespace

void walk_morton(const Lattice& lattice, Walk& walk) {
  const std::int64_t longest = std::max({lattice.frame.cells, lattice.row.cells, lattice.column.cells});
  const std::uint64_t side = std::bit_ceil(static_cast<std::uint64_t>(longest));
  descend(lattice, walk, 0, 0, 0, static_cast<std::int64_t>(side));
}

}  // namespace violin::curves
