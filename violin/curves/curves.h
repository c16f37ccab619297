// Space-filling curves on grids of image patches, in two and three dimensions. No dependency but the standard library.
//
// A curve visits every cell of a grid once. The *rank* of a cell is where it comes along the curve; two cells i, j are
// |rank[i] - rank[j]| apart, and a decay mask is gamma to that power. The *order* is the inverse: the cells in the
// sequence in which the curve visits them. Cells are numbered row-major: (r, c) of H x W is r*W + c, and (t, r, c) of
// T x H x W is (t*H + r)*W + c.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace violin::curves {

using Ranks = std::vector<std::int32_t>;

// H x W, or T x H x W when `frames` is not zero (so 1 x H x W is three-dimensional and H x W is not).
struct Grid {
  std::int64_t frames = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;

  bool is_3d() const { return frames != 0; }
  std::int64_t cells() const { return (is_3d() ? frames : 1) * height * width; }
  std::string to_string() const;  // "14x10", "8x14x10"
  friend bool operator==(const Grid&, const Grid&) = default;
};

// The largest grid accepted: ranks are int32, and nobody flattens an image into more patches than this.
inline constexpr std::int64_t kMaxCells = std::int64_t{1} << 26;

// "14x10" or "8x14x10"; throws violin::Error on anything else, on sides below 1 and on more than kMaxCells cells.
Grid parse_grid(std::string_view text);

// Throws violin::Error unless every side is at least 1 and the grid has at most kMaxCells cells.
void check_grid(const Grid& grid);

enum class Kind { kZ, kSnake, kHilbert, kMorton, kZigzag, kRandom, kManhattan };

// A curve to be laid over some grid. In three dimensions z, snake, morton, hilbert and random run through the whole
// volume; a curve with `per_frame` is two-dimensional and its ranks are the same in every frame (cells of one position
// at distance 0). On an H x W grid, a single frame, `per_frame` changes nothing.
struct Curve {
  Kind kind = Kind::kZ;
  bool transposed = false;  // the curve of the W x H (W x H x T) grid, axes put back; not of random and manhattan
  bool per_frame = false;
  std::uint64_t seed = 0;  // of kRandom only

  std::string name() const;  // canonical: "hilbert_T", "peano", "random:7", "frame:zigzag"
  friend bool operator==(const Curve&, const Curve&) = default;
};

// Names: z, snake, hilbert, peano (alias morton), zigzag, each with an optional "_T"; random (seed 0) or random:SEED;
// manhattan; "frame:" in front of any of them repeats its two-dimensional form over the frames of a T x H x W grid.
// An unknown name throws violin::Error and suggests the nearest known one.
Curve parse_curve(std::string_view name);

// Every plain name, each curve once (so without the alias), in the order in which help texts list them.
const std::vector<std::string>& curve_names();

// "violin" (the published eight, in the order that fixes parameter indices in checkpoints), "normal" (its four
// untransposed ones), "transposed" (its four transposed ones), or a comma-separated list of curve names, in which sets
// may appear as well ("violin,manhattan"). A curve that comes twice throws violin::Error.
std::vector<Curve> parse_curves(std::string_view set_or_list);
const std::vector<std::string>& curve_set_names();

// rank[cell] along a curve with one axis. Cached per (curve, grid), up to 256 MiB of what was used last; safe to call
// from any thread. Throws violin::Error for manhattan, which has an axis per dimension (use coordinates), and for
// zigzag on a volume, where only frame:zigzag exists.
//
// Ranks of a curve without `per_frame` are a permutation. Snake takes steps to edge neighbours only, and so does
// hilbert on every volume whose sides are at least 2; in the plane hilbert has one diagonal step where the longer side
// is odd and the shorter even and above 2. A volume with a side of 1 has the curve of the plane that the other two
// sides span.
std::shared_ptr<const Ranks> ranks(const Curve& curve, const Grid& grid);

// The inverse of a permutation of ranks: order[k] is the k-th cell that the curve visits. Throws violin::Error for
// ranks that are none, as those of a curve that repeats over frames.
std::vector<std::int32_t> order(std::span<const std::int32_t> ranks);

// What decay_mask takes: distances are sums over axes of |coordinate differences|. An ordinary curve has one axis, its
// rank; manhattan has one per dimension of the grid, (frame,) row, column, and frame:manhattan row and column only.
// Where curves of both sorts meet in one set, missing axes are zero.
struct Coordinates {
  std::int64_t curves = 0;
  std::int64_t axes = 0;
  std::int64_t tokens = 0;
  std::vector<std::int32_t> values;  // [curves, axes, tokens], row-major
};
Coordinates coordinates(std::span<const Curve> curves, const Grid& grid);

// Coordinates of the visible tokens only, per sample: `visible` holds `samples` rows of equally many cell numbers of
// the whole grid, and the result is [samples, curves, axes, visible tokens per sample]. Throws violin::Error for a cell
// outside of the grid, for one that is named twice in a sample, and for rows of unequal length.
std::vector<std::int32_t> subset(const Coordinates& whole, std::span<const std::int32_t> visible, std::int64_t samples);

// How well a curve keeps neighbours together. Ranks that repeat over the frames of a volume count their steps in one
// frame.
struct Locality {
  std::int64_t unit_steps = 0;         // consecutive cells that share an edge (in 3-D: a face)
  std::int64_t diagonal_steps = 0;     // consecutive cells that touch at a corner or, in 3-D, an edge
  std::int64_t jumps = 0;              // any step that is longer
  double mean_jump = 0;                // Euclidean length of the jumps; 0 without any
  double max_step = 0;                 // the longest step of all
  double mean_neighbour_distance = 0;  // mean |rank difference| over all pairs of edge neighbours
  double distance_correlation = 0;  // Spearman's rho of rank distance against Euclidean distance over pairs of cells:
                                    // all pairs on small grids, a fixed seeded sample on large ones
};
Locality locality(std::span<const std::int32_t> ranks, const Grid& grid);

}  // namespace violin::curves
