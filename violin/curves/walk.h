// What the curve families share: a lattice to walk over and a walk that numbers the cells as they are visited.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "violin/curves/curves.h"

namespace violin::curves {

// One side of a lattice: how many cells it has and how far apart in the rank array two of them are.
struct Axis {
  std::int64_t cells = 1;
  std::int64_t stride = 0;
};

// A grid seen through strides. A two-dimensional grid is a single frame. A transposed curve is the same walk over a
// lattice whose axes have changed places, so no family needs to know about transposition.
struct Lattice {
  Axis frame, row, column;

  explicit Lattice(const Grid& grid)
      : frame{grid.is_3d() ? grid.frames : 1, grid.height * grid.width},
        row{grid.height, grid.width},
        column{grid.width, 1} {}

  // H x W becomes W x H; T x H x W becomes W x H x T.
  void transpose(bool is_3d) { std::swap(is_3d ? frame : row, column); }

  std::int64_t cells() const { return frame.cells * row.cells * column.cells; }
};

class Walk {
 public:
  explicit Walk(std::span<std::int32_t> ranks) : ranks_(ranks) {}

  void visit(std::int64_t cell) { ranks_[static_cast<std::size_t>(cell)] = next_++; }

  // `count` cells, `step` apart.
  void line(std::int64_t first, std::int64_t step, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) visit(first + i * step);
  }

 private:
  std::span<std::int32_t> ranks_;
  std::int32_t next_ = 0;
};

void walk_z(const Lattice& lattice, Walk& walk);
void walk_snake(const Lattice& lattice, Walk& walk);
void walk_hilbert(const Lattice& lattice, Walk& walk);
void walk_morton(const Lattice& lattice, Walk& walk);
void walk_zigzag(const Lattice& lattice, Walk& walk);  // a single frame only
void walk_random(std::int64_t cells, std::uint64_t seed, Walk& walk);

}  // namespace violin::curves
