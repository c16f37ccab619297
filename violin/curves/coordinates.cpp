// Coordinates along curves for the decay mask: whole grids and the tokens that are visible of them.
#include <algorithm>
#include <string>

#include "violin/curves/curves.h"
#include "violin/error.h"

namespace violin::curves {
namespace {

std::int64_t axes_of(const Curve& curve, const Grid& grid) {
  if (curve.kind != Kind::kManhattan) return 1;
  return grid.is_3d() && !curve.per_frame ? 3 : 2;
}

// Row and column of every cell; on a volume the frame comes first, unless only positions within a frame count.
void put_manhattan(std::int64_t axes, const Grid& grid, std::span<std::int32_t> values) {
  const auto cells = static_cast<std::size_t>(grid.cells());
  for (std::size_t cell = 0; cell < cells; ++cell) {
    const auto number = static_cast<std::int64_t>(cell);
    std::size_t at = cell;
    const auto put = [&](std::int64_t value) {
      values[at] = static_cast<std::int32_t>(value);
      at += cells;
    };
    if (axes == 3) put(number / (grid.height * grid.width));
    put(number / grid.width % grid.height);
    put(number % grid.width);
  }
}

}  // namespace

Coordinates coordinates(std::span<const Curve> curves, const Grid& grid) {
  check_grid(grid);
  if (curves.empty()) throw Error("coordinates need at least one curve");
  Coordinates result;
  result.curves = static_cast<std::int64_t>(curves.size());
  result.tokens = grid.cells();
  for (const Curve& curve : curves) {
    if (curve.kind == Kind::kManhattan && curve.transposed)
      throw Error("manhattan has no transpose: both axes count alike");
    result.axes = std::max(result.axes, axes_of(curve, grid));
  }
  const auto per_curve = static_cast<std::size_t>(result.axes * result.tokens);
  result.values.resize(curves.size() * per_curve);
  std::span<std::int32_t> left = result.values;
  for (const Curve& curve : curves) {
    if (curve.kind == Kind::kManhattan) {
      put_manhattan(axes_of(curve, grid), grid, left.first(per_curve));
    } else {
      std::ranges::copy(*ranks(curve, grid), left.begin());
    }
    left = left.subspan(per_curve);
  }
  return result;
}

std::vector<std::int32_t> subset(const Coordinates& whole, std::span<const std::int32_t> visible,
                                 std::int64_t samples) {
  const auto tokens = static_cast<std::size_t>(whole.tokens);
  const auto lines = static_cast<std::size_t>(whole.curves * whole.axes);
  if (whole.values.size() != lines * tokens) {
    throw Error("coordinates hold " + std::to_string(whole.values.size()) + " values instead of " +
                std::to_string(lines * tokens));
  }
  if (samples < 1)
    throw Error("visible tokens: the number of samples must be at least 1, not " + std::to_string(samples));
  const auto rows = static_cast<std::size_t>(samples);
  if (visible.size() % rows != 0) {
    throw Error("visible tokens: " + std::to_string(visible.size()) + " cells cannot be split into " +
                std::to_string(samples) + " samples of equal length");
  }
  const std::size_t kept = visible.size() / rows;

  std::vector<std::int64_t> seen_in(tokens, -1);
  for (std::size_t i = 0; i < visible.size(); ++i) {
    const auto sample = static_cast<std::int64_t>(i / kept);
    const auto cell = static_cast<std::size_t>(visible[i]);  // a negative one becomes huge
    const bool outside = cell >= tokens;
    if (outside || seen_in[cell] == sample) {
      throw Error("visible tokens of sample " + std::to_string(sample) + ": cell " + std::to_string(visible[i]) +
                  (outside ? " is not one of the grid's " + std::to_string(tokens) : " is named twice"));
    }
    seen_in[cell] = sample;
  }

  std::vector<std::int32_t> result;
  result.reserve(visible.size() * lines);
  for (std::size_t sample = 0; sample < rows; ++sample) {
    const auto cells = visible.subspan(sample * kept, kept);
    for (std::size_t line = 0; line < lines; ++line) {
      const auto values = std::span(whole.values).subspan(line * tokens, tokens);
      for (const std::int32_t cell : cells) result.push_back(values[static_cast<std::size_t>(cell)]);
    }
  }
  return result;
}

}  // namespace violin::curves
