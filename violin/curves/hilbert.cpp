// The generalised Hilbert curve: it halves blocks as Hilbert's does, but on grids with sides of any length.
//
// A block is walked from one of its corners to the corner at the other end of its first edge, u. It is cut into smaller
// blocks that are walked in the same manner, one after the other, each beginning beside the end of its predecessor:
//
//   - a long block is cut across u, and its two halves follow each other;
//   - any other block is walked as a detour: out along v at the near end of u, over along u in the far half of v, back
//     along v at the far end of u. In three dimensions the detour may be along v, along w, or along both.
//
// Parity decides whether that works. Unit steps alternate between the two colours of a chessboard, so a walk from end
// to end of u needs |u| even, or all sides odd. Cutting off an even number of cells keeps this true of every part.
//
// The recursion is as deep as the sides can be halved: a part is at most half of the side it was cut from plus 1.5
// cells, a block of one line ends it, and so 2^26 cells in any shape need less than a hundred frames.
#include <array>
#include <cstdint>

#include "violin/curves/walk.h"

namespace violin::curves {
namespace {

// One edge of a block: its length in cells, at least 1, and the step to the next cell, negative against the axis.
struct Edge {
  std::int64_t cells;
  std::int64_t step;

  std::int64_t beyond() const { return cells * step; }      // from the first cell to the one after the last
  std::int64_t last() const { return (cells - 1) * step; }  // from the first cell to the last
  Edge reversed() const { return {cells, -step}; }
  Edge first(std::int64_t count) const { return {count, step}; }
  Edge rest(std::int64_t count) const { return {cells - count, step}; }
};

// Half of the length, where an edge against its axis counts as negative and the quotient is rounded towards minus
// infinity: 3 / 2 = 1, but -3 / 2 = -2. The published curves are defined so.
std::int64_t floor_half(const Edge& edge) {
  return (edge.cells + (edge.step < 0 ? 1 : 0)) / 2;
}

// The part to cut off: the next even number, unless there are only two cells.
std::int64_t even_part(const Edge& edge, std::int64_t half) {
  return half % 2 != 0 && edge.cells > 2 ? half + 1 : half;
}

void walk_flat(std::int64_t at, Edge u, Edge v, Walk& walk) {
  if (v.cells == 1) return walk.line(at, u.step, u.cells);
  if (u.cells == 1) return walk.line(at, v.step, v.cells);
  if (2 * u.cells > 3 * v.cells) {
    const std::int64_t part = even_part(u, floor_half(u));
    walk_flat(at, u.first(part), v, walk);
    walk_flat(at + u.first(part).beyond(), u.rest(part), v, walk);
    return;
  }
  const std::int64_t part = even_part(v, floor_half(v));
  const std::int64_t near = floor_half(u);
  const Edge out = v.first(part);
  walk_flat(at, out, u.first(near), walk);
  walk_flat(at + out.beyond(), u, v.rest(part), walk);
  walk_flat(at + u.last() + out.last(), out.reversed(), u.rest(near).reversed(), walk);
}

// Blocks of three edges, u even or all of them odd. Nothing published binds the halves here: signs do not matter, and
// the part cut off is always even, so that no block with several cells is left with a first edge of one.
class Volume {
 public:
  explicit Volume(Walk& walk) : walk_(walk) {}

  void block(std::int64_t at, Edge u, Edge v, Edge w) {
    if (v.cells == 1 && w.cells == 1) return walk_.line(at, u.step, u.cells);
    if (2 * u.cells > 3 * v.cells && 2 * u.cells > 3 * w.cells) return halves(at, u, v, w);
    if (3 * v.cells > 4 * w.cells) return detour(at, u, v, w);
    if (3 * w.cells > 4 * v.cells) return detour(at, u, w, v);
    // Both detours at once need one more even edge.
    if (u.cells % 2 == 0 && w.cells % 2 == 0) return double_detour(at, u, v, w);
    if (u.cells % 2 == 0 && v.cells % 2 == 0) return double_detour(at, u, w, v);
    return v.cells >= w.cells ? detour(at, u, v, w) : detour(at, u, w, v);
  }

 private:
  static std::int64_t part_of(const Edge& edge) { return even_part(edge, edge.cells / 2); }

  void halves(std::int64_t at, Edge u, Edge v, Edge w) {
    const std::int64_t part = part_of(u);
    block(at, u.first(part), v, w);
    block(at + u.first(part).beyond(), u.rest(part), v, w);
  }

  // Out along v, over along u, back along v; w is left whole.
  void detour(std::int64_t at, Edge u, Edge v, Edge w) {
    const std::int64_t part = part_of(v);
    const std::int64_t near = part_of(u);
    const Edge out = v.first(part);
    block(at, out, w, u.first(near));
    block(at + out.beyond(), u, v.rest(part), w);
    block(at + u.last() + out.last(), out.reversed(), w, u.rest(near).reversed());
  }

  // The octants of Hilbert's cube as five blocks: out along v, across along w, over along u, and back the same way.
  void double_detour(std::int64_t at, Edge u, Edge v, Edge w) {
    const std::int64_t part = part_of(v);
    const std::int64_t near = part_of(u);
    const std::int64_t low = part_of(w);
    const Edge out = v.first(part);
    block(at, out, w.first(low), u.first(near));
    block(at + out.beyond(), w, u.first(near), v.rest(part));
    block(at + out.last() + w.last(), u, out.reversed(), w.rest(low).reversed());
    block(at + u.last() + out.beyond() + w.last(), w.reversed(), u.rest(near).reversed(), v.rest(part));
    block(at + u.last() + out.last(), out.reversed(), w.first(low), u.rest(near).reversed());
  }

  Walk& walk_;
};

Edge edge_of(const Axis& axis) {
  return {axis.cells, axis.stride};
}

// The first edge is the longer side, the column where they are equal.
void walk_plane(const Axis& row, const Axis& column, Walk& walk) {
  if (column.cells >= row.cells) {
    walk_flat(0, edge_of(column), edge_of(row), walk);
  } else {
    walk_flat(0, edge_of(row), edge_of(column), walk);
  }
}

}  // namespace

void walk_hilbert(const Lattice& lattice, Walk& walk) {
  const auto& [frame, row, column] = lattice;
  if (frame.cells == 1) return walk_plane(row, column, walk);
  if (row.cells == 1) return walk_plane(frame, column, walk);
  if (column.cells == 1) return walk_plane(frame, row, walk);

  // The first edge is the longest one that parity allows: any if all sides are odd, else one of the even ones.
  const std::array<Axis, 3> axes = {column, row, frame};
  const bool all_odd = lattice.cells() % 2 != 0;
  std::size_t u = 3;
  for (std::size_t i = 0; i < 3; ++i) {
    if ((all_odd || axes[i].cells % 2 == 0) && (u == 3 || axes[i].cells > axes[u].cells)) u = i;
  }
  const std::size_t v = u == 0 ? 1 : 0;
  const std::size_t w = 3 - u - v;
  Volume(walk).block(0, edge_of(axes[u]), edge_of(axes[v]), edge_of(axes[w]));
}

}  // namespace violin::curves
