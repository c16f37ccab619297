// From a curve and a grid to ranks: which walk over which lattice.
#include <string>

#include "violin/curves/curves.h"
#include "violin/curves/rank_cache.h"
#include "violin/curves/walk.h"
#include "violin/error.h"

namespace violin::curves {
namespace {

// One grid of kMaxCells cells.
constexpr std::size_t kCacheBytes = sizeof(std::int32_t) * static_cast<std::size_t>(kMaxCells);

void check_curve(const Curve& curve, const Grid& grid) {
  if (curve.kind == Kind::kManhattan) {
    throw Error("curve " + curve.name() + " has an axis per dimension and no ranks; use its coordinates");
  }
  if (curve.kind == Kind::kRandom && curve.transposed) {
    throw Error("curve " + curve.name() + ": random has no transpose; use another seed");
  }
  if (curve.kind == Kind::kZigzag && grid.is_3d() && !curve.per_frame) {
    throw Error("curve " + curve.name() + " has no three-dimensional form for grid " + grid.to_string() +
                "; use frame:" + curve.name() + " to repeat it in every frame");
  }
}

Ranks walk_over(const Curve& curve, const Grid& grid) {
  Ranks ranks(static_cast<std::size_t>(grid.cells()));
  Lattice lattice(grid);
  if (curve.transposed) lattice.transpose(grid.is_3d());
  Walk walk(ranks);
  switch (curve.kind) {
    case Kind::kZ:
      walk_z(lattice, walk);
      break;
    case Kind::kSnake:
      walk_snake(lattice, walk);
      break;
    case Kind::kHilbert:
      walk_hilbert(lattice, walk);
      break;
    case Kind::kMorton:
      walk_morton(lattice, walk);
      break;
    case Kind::kZigzag:
      walk_zigzag(lattice, walk);
      break;
    case Kind::kRandom:
      walk_random(grid.cells(), curve.seed, walk);
      break;
    case Kind::kManhattan:
      break;  // refused by check_curve
  }
  return ranks;
}

Ranks repeated(const Ranks& frame, std::int64_t frames) {
  Ranks ranks;
  ranks.reserve(frame.size() * static_cast<std::size_t>(frames));
  for (std::int64_t t = 0; t < frames; ++t) ranks.insert(ranks.end(), frame.begin(), frame.end());
  return ranks;
}

}  // namespace

std::shared_ptr<const Ranks> ranks(const Curve& curve, const Grid& grid) {
  check_grid(grid);
  check_curve(curve, grid);
  // Never destroyed, so that threads still running at exit may ask.
  static RankCache& cache = *new RankCache(kCacheBytes);
  if (!curve.per_frame) return cache.get(curve, grid, [&] { return walk_over(curve, grid); });
  const Grid plane = {0, grid.height, grid.width};
  Curve in_plane = curve;
  in_plane.per_frame = false;
  if (!grid.is_3d()) return ranks(in_plane, plane);
  return cache.get(curve, grid, [&] { return repeated(*ranks(in_plane, plane), grid.frames); });
}

std::vector<std::int32_t> order(std::span<const std::int32_t> ranks) {
  std::vector<std::int32_t> cells(ranks.size(), -1);
  for (std::size_t cell = 0; cell < ranks.size(); ++cell) {
    const auto rank = static_cast<std::size_t>(ranks[cell]);  // a negative one becomes huge
    if (rank >= cells.size() || cells[rank] != -1) {
      throw Error("ranks are not a permutation: " + std::to_string(ranks[cell]) + " of cell " + std::to_string(cell) +
                  (rank >= cells.size() ? " is out of range" : " is taken already"));
    }
    cells[rank] = static_cast<std::int32_t>(cell);
  }
  return cells;
}

}  // namespace violin::curves
