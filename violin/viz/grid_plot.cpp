#include "violin/viz/grid_plot.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "violin/error.h"

namespace violin::viz {

using curves::Curve;
using curves::Grid;

void check_drawable(const Grid& grid) {
  constexpr std::int64_t kMaxDrawnCells = 65536;
  if (grid.cells() > kMaxDrawnCells) {
    throw Error("a grid of " + grid.to_string() + " is too large to draw (at most " + std::to_string(kMaxDrawnCells) +
                " cells)");
  }
}

GridPlot::GridPlot(const Grid& grid, double cell, double max_width)
    : grid_(grid), cell_(cell), gap_(std::max(8.0, cell)) {
  const double frame = static_cast<double>(grid.width) * cell;
  per_line_ =
      std::clamp<std::int64_t>(static_cast<std::int64_t>((max_width + gap_) / (frame + gap_) + 1e-6), 1, frames());
  // Equally full lines: 8 frames where 5 fit stand as 4 and 4.
  const std::int64_t lines = (frames() + per_line_ - 1) / per_line_;
  per_line_ = (frames() + lines - 1) / lines;
}

double GridPlot::width() const {
  const auto columns = static_cast<double>(per_line_);
  return columns * static_cast<double>(grid_.width) * cell_ + (columns - 1) * gap_;
}

double GridPlot::height() const {
  const std::int64_t rows = (frames() + per_line_ - 1) / per_line_;
  const auto lines = static_cast<double>(rows);
  return lines * static_cast<double>(grid_.height) * cell_ + (lines - 1) * gap_;
}

Box GridPlot::frame_box(std::int64_t frame) const {
  const double width = static_cast<double>(grid_.width) * cell_;
  const double height = static_cast<double>(grid_.height) * cell_;
  const std::int64_t line = frame / per_line_;
  const std::int64_t column = frame % per_line_;
  return {origin_.x + static_cast<double>(column) * (width + gap_),
          origin_.y + static_cast<double>(line) * (height + gap_), width, height};
}

Box GridPlot::cell_box(std::int64_t cell) const {
  const Box frame = frame_box(frame_of(cell));
  const std::int64_t row = cell / grid_.width % grid_.height;
  const std::int64_t column = cell % grid_.width;
  return {frame.x + static_cast<double>(column) * cell_, frame.y + static_cast<double>(row) * cell_, cell_, cell_};
}

Point GridPlot::center(std::int64_t cell) const {
  const Box box = cell_box(cell);
  return {box.x + cell_ / 2, box.y + cell_ / 2};
}

std::vector<std::vector<std::int32_t>> paths_of(const Curve& curve, const Grid& grid) {
  if (curve.kind == curves::Kind::kManhattan) return {};
  if (!curve.per_frame || !grid.is_3d()) return {curves::order(*curves::ranks(curve, grid))};
  Curve flat = curve;
  flat.per_frame = false;
  std::vector<std::int32_t> path = curves::order(*curves::ranks(flat, {0, grid.height, grid.width}));
  std::vector<std::vector<std::int32_t>> paths;
  for (std::int64_t t = 0; t < grid.frames; ++t) {
    paths.push_back(path);
    for (std::int32_t& cell : path) cell += static_cast<std::int32_t>(grid.height * grid.width);
  }
  return paths;
}

std::shared_ptr<const Image> color_ramp(Color (*map)(double)) {
  constexpr int kSteps = 256;
  auto ramp = std::make_shared<Image>(kSteps, 1);
  for (int i = 0; i < kSteps; ++i) set_pixel(*ramp, i, 0, map(i / (kSteps - 1.0)));
  return ramp;
}

std::string grid_title(const Grid& grid) {
  std::string text = grid.is_3d() ? std::to_string(grid.frames) + "×" : "";
  return text + std::to_string(grid.height) + "×" + std::to_string(grid.width);
}

}  // namespace violin::viz
