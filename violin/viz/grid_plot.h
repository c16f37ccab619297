// Where the cells of a grid stand in a picture, and the paths of curves over them. Shared by the pictures of this
// folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "violin/curves/curves.h"
#include "violin/viz/scene.h"

namespace violin::viz {

// Throws violin::Error for grids that no picture could show.
void check_drawable(const curves::Grid& grid);

// A grid with square cells; the frames of a three-dimensional one stand side by side, in as many lines as `max_width`
// asks for.
class GridPlot {
 public:
  GridPlot(const curves::Grid& grid, double cell, double max_width);

  void move_to(Point origin) { origin_ = origin; }
  double cell() const { return cell_; }
  double width() const;
  double height() const;
  std::int64_t frames() const { return grid_.is_3d() ? grid_.frames : 1; }
  std::int64_t frame_of(std::int64_t cell) const { return cell / (grid_.height * grid_.width); }
  Box frame_box(std::int64_t frame) const;
  Box cell_box(std::int64_t cell) const;
  Point center(std::int64_t cell) const;

 private:
  curves::Grid grid_;
  double cell_;
  double gap_;
  std::int64_t per_line_;
  Point origin_;
};

// The cells that a curve visits, in sequence: one path, or one per frame for a curve that is repeated over the frames.
// Empty for manhattan, which is a distance and visits nothing.
std::vector<std::vector<std::int32_t>> paths_of(const curves::Curve& curve, const curves::Grid& grid);

// A colour map from left to right, for legends.
std::shared_ptr<const Image> color_ramp(Color (*map)(double));

// "14×10"
std::string grid_title(const curves::Grid& grid);

}  // namespace violin::viz
