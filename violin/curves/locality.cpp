// How well a curve keeps together what is close in the grid.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "violin/curves/curves.h"
#include "violin/curves/random.h"
#include "violin/error.h"

namespace violin::curves {
namespace {

// Up to here all pairs of cells enter the correlation, above it this many drawn ones.
constexpr std::int64_t kAllPairsCells = 1024;
constexpr std::size_t kSampledPairs = 200'000;
constexpr std::uint64_t kSampleSeed = 1;

// |differences| along frames, rows and columns.
std::array<std::int64_t, 3> difference(const Grid& grid, std::int64_t a, std::int64_t b) {
  const std::int64_t plane = grid.height * grid.width;
  return {std::abs(a / plane - b / plane), std::abs(a % plane / grid.width - b % plane / grid.width),
          std::abs(a % grid.width - b % grid.width)};
}

std::uint64_t squared_distance(const Grid& grid, std::int64_t a, std::int64_t b) {
  const auto [t, r, c] = difference(grid, a, b);
  return static_cast<std::uint64_t>(t * t + r * r + c * c);
}

void measure_steps(std::span<const std::int32_t> visited, const Grid& grid, Locality& result) {
  std::int64_t longest = 0;
  double jumped = 0;
  for (std::size_t i = 1; i < visited.size(); ++i) {
    const auto [t, r, c] = difference(grid, visited[i - 1], visited[i]);
    const std::int64_t squared = t * t + r * r + c * c;
    longest = std::max(longest, squared);
    if (squared == 1) {
      ++result.unit_steps;
    } else if (std::max({t, r, c}) == 1) {
      ++result.diagonal_steps;
    } else {
      ++result.jumps;
      jumped += std::sqrt(static_cast<double>(squared));
    }
  }
  if (result.jumps > 0) result.mean_jump = jumped / static_cast<double>(result.jumps);
  result.max_step = std::sqrt(static_cast<double>(longest));
}

double mean_neighbour_distance(std::span<const std::int32_t> ranks, const Grid& grid) {
  const std::array<std::pair<std::int64_t, std::int64_t>, 3> side_and_stride = {
      {{grid.width, 1}, {grid.height, grid.width}, {grid.is_3d() ? grid.frames : 1, grid.height * grid.width}}};
  std::int64_t pairs = 0;
  std::int64_t sum = 0;
  for (const auto& [side, stride] : side_and_stride) {
    for (std::int64_t cell = 0; cell + stride < grid.cells(); ++cell) {
      if (cell / stride % side == side - 1) continue;  // the last along this axis
      const auto at = static_cast<std::size_t>(cell);
      sum += std::abs(std::int64_t{ranks[at]} - ranks[at + static_cast<std::size_t>(stride)]);
      ++pairs;
    }
  }
  return pairs == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(pairs);
}

// The indices of the values in increasing order of value. Digit by digit: distances are small numbers, and
// sorting by comparison would take most of the time of a summary.
std::vector<std::uint32_t> sorted_indices(const std::vector<std::uint64_t>& values) {
  constexpr int kDigitBits = 11;
  constexpr std::uint64_t kDigits = 1U << kDigitBits;
  std::vector<std::uint32_t> indices(values.size());
  std::iota(indices.begin(), indices.end(), 0U);
  std::vector<std::uint32_t> moved(values.size());
  const std::uint64_t largest = std::ranges::max(values);
  for (int shift = 0; shift < 64 && largest >> shift != 0; shift += kDigitBits) {
    const auto digit = [&](std::uint64_t value) { return static_cast<std::size_t>((value >> shift) % kDigits); };
    std::array<std::size_t, kDigits + 1> place = {};
    for (const std::uint64_t value : values) ++place[digit(value) + 1];
    std::partial_sum(place.begin(), place.end(), place.begin());
    for (const std::uint32_t index : indices) moved[place[digit(values[index])]++] = index;
    indices.swap(moved);
  }
  return indices;
}

// Replaces each value by its position among all, equal values by the mean of theirs; less the overall mean.
std::vector<double> centred_mid_ranks(const std::vector<std::uint64_t>& values) {
  const auto indices = sorted_indices(values);
  std::vector<double> positions(values.size());
  const double mean = static_cast<double>(values.size() - 1) / 2;
  for (std::size_t first = 0; first < indices.size();) {
    std::size_t end = first + 1;
    while (end < indices.size() && values[indices[end]] == values[indices[first]]) ++end;
    const double position = static_cast<double>(first + end - 1) / 2 - mean;
    for (; first < end; ++first) positions[indices[first]] = position;
  }
  return positions;
}

// Spearman's rho; 0 where it is undefined because one of the two does not vary.
double rank_correlation(const std::vector<std::uint64_t>& a, const std::vector<std::uint64_t>& b) {
  if (a.empty()) return 0;
  const auto x = centred_mid_ranks(a);
  const auto y = centred_mid_ranks(b);
  double xx = 0;
  double yy = 0;
  double xy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xx += x[i] * x[i];
    yy += y[i] * y[i];
    xy += x[i] * y[i];
  }
  return xx == 0 || yy == 0 ? 0 : xy / std::sqrt(xx * yy);
}

double distance_correlation(std::span<const std::int32_t> ranks, const Grid& grid) {
  std::vector<std::uint64_t> along;   // the curve
  std::vector<std::uint64_t> across;  // the grid; the square orders pairs as the distance does
  const auto add = [&](std::size_t i, std::size_t j) {
    along.push_back(static_cast<std::uint64_t>(std::abs(std::int64_t{ranks[i]} - ranks[j])));
    across.push_back(squared_distance(grid, static_cast<std::int64_t>(i), static_cast<std::int64_t>(j)));
  };
  const auto cells = static_cast<std::uint32_t>(grid.cells());
  if (cells <= kAllPairsCells) {
    for (std::size_t i = 0; i < cells; ++i) {
      for (std::size_t j = i + 1; j < cells; ++j) add(i, j);
    }
  } else {
    Random random(kSampleSeed);
    for (std::size_t pair = 0; pair < kSampledPairs; ++pair) {
      const std::uint32_t i = random.below(cells);
      const std::uint32_t j = random.below(cells - 1);
      add(i, j < i ? j : j + 1);
    }
  }
  return rank_correlation(along, across);
}

// Whether a volume's ranks are those of its first frame over and over.
bool repeats_over_frames(std::span<const std::int32_t> ranks, const Grid& grid) {
  if (!grid.is_3d() || grid.frames == 1) return false;
  const auto plane = static_cast<std::size_t>(grid.height * grid.width);
  return std::equal(ranks.begin() + static_cast<std::ptrdiff_t>(plane), ranks.end(), ranks.begin());
}

}  // namespace

Locality locality(std::span<const std::int32_t> ranks, const Grid& grid) {
  check_grid(grid);
  if (ranks.size() != static_cast<std::size_t>(grid.cells())) {
    throw Error("locality: " + std::to_string(ranks.size()) + " ranks do not fit grid " + grid.to_string());
  }
  Locality result;
  if (repeats_over_frames(ranks, grid)) {
    const Grid frame = {0, grid.height, grid.width};
    measure_steps(order(ranks.first(static_cast<std::size_t>(frame.cells()))), frame, result);
  } else {
    measure_steps(order(ranks), grid, result);
  }
  result.mean_neighbour_distance = mean_neighbour_distance(ranks, grid);
  result.distance_correlation = distance_correlation(ranks, grid);
  return result;
}

}  // namespace violin::curves
