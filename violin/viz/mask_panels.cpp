#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "violin/number_text.h"
#include "violin/viz/font.h"
#include "violin/viz/grid_plot.h"
#include "violin/viz/pictures.h"

namespace violin::viz {
namespace {

using curves::Coordinates;
using curves::Grid;

constexpr double kMargin = 32;
constexpr double kHeaderHeight = 62;
constexpr double kColumnTitleHeight = 22;
constexpr double kNameSize = 13;
constexpr double kLabelWidth = 84;
constexpr double kGap = 12;
constexpr double kGroupGap = 30;
constexpr double kFooterHeight = 52;
constexpr double kMaxWidth = 1040;  // of the panels, unless their cells would get too small

std::string cell_label(const Grid& grid, std::int64_t cell) {
  const std::string frame = grid.is_3d() ? std::to_string(cell / (grid.height * grid.width)) + "," : "";
  return frame + std::to_string(cell / grid.width % grid.height) + "," + std::to_string(cell % grid.width);
}

// The bottom of the colour scale: 0, or, for masks that stay close to 1, as high as leaves them all inside.
double scale_bottom(double smallest) {
  double range = 1;
  // 1, 0.5, 0.2, 0.1, 0.05, ...
  for (int i = 0; i < 18; ++i) {
    const double next = range * (i % 3 == 1 ? 0.4 : 0.5);
    if (1 - smallest > next) break;
    range = next;
  }
  return 1 - range;
}

}  // namespace

std::vector<double> decay_field(const Coordinates& coordinates, std::int64_t curve, std::int64_t cell, double gamma) {
  const double log_gamma = std::log(gamma);
  std::vector<double> field(static_cast<std::size_t>(coordinates.tokens));
  for (std::int64_t i = 0; i < coordinates.tokens; ++i) {
    std::int64_t distance = 0;
    for (std::int64_t a = 0; a < coordinates.axes; ++a) {
      const std::int32_t* axis = coordinates.values.data() + (curve * coordinates.axes + a) * coordinates.tokens;
      distance += std::abs(axis[i] - axis[cell]);
    }
    field[static_cast<std::size_t>(i)] = std::exp(log_gamma * static_cast<double>(distance));
  }
  return field;
}

std::vector<double> mean_field(std::span<const std::vector<double>> fields) {
  std::vector<double> mean(fields.empty() ? 0 : fields.front().size());
  for (const std::vector<double>& field : fields) {
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += field[i] / static_cast<double>(fields.size());
  }
  return mean;
}

Scene mask_panels(const MaskSweep& sweep) {
  const Grid& grid = sweep.grid;
  check_drawable(grid);
  const Coordinates coordinates = curves::coordinates(sweep.curves, grid);
  const auto curve_count = static_cast<std::int64_t>(sweep.curves.size());
  const std::int64_t columns = curve_count + (curve_count > 1 ? 1 : 0);

  // fields[row][column], rows by gamma and then by cell
  std::vector<std::vector<std::vector<double>>> fields;
  double smallest = 1;
  for (const double gamma : sweep.gammas) {
    for (const std::int64_t cell : sweep.cells) {
      auto& row = fields.emplace_back();
      for (std::int64_t c = 0; c < curve_count; ++c) {
        row.push_back(decay_field(coordinates, c, cell, gamma));
        smallest = std::min(smallest, *std::min_element(row.back().begin(), row.back().end()));
      }
      if (columns > curve_count) row.push_back(mean_field(row));
    }
  }
  const double bottom = scale_bottom(smallest);

  const auto frames = static_cast<double>(grid.is_3d() ? grid.frames : 1);
  const auto across = static_cast<double>(columns);
  double longest_name = 0;
  for (const curves::Curve& curve : sweep.curves) {
    longest_name = std::max(longest_name, text_room(curve.name(), kNameSize));
  }
  const double room = std::max(longest_name, (kMaxWidth - (across - 1) * kGap) / across);
  const auto width = static_cast<double>(grid.width);
  // Two frames and the gap between them fit beside each other.
  const double wide = frames < 2 ? room / width : std::min((room - 8) / (2 * width), room / (2 * width + 1));
  const double tall = (grid.is_3d() ? 70 : 200) / static_cast<double>(grid.height);
  GridPlot plot(grid, std::clamp(std::min(wide, tall), 3.0, 30.0), room);
  const double column_width = std::max(plot.width(), longest_name);
  const double pitch_x = column_width + kGap;
  const double row_gap = grid.is_3d() ? 2 * kGap : kGap;  // frames of one mask may stand in several lines
  const double pitch_y = plot.height() + row_gap;
  const double group_height = static_cast<double>(sweep.cells.size()) * pitch_y - row_gap;

  Scene scene;
  scene.title = "Decay masks over " + grid_title(grid) + " patches";
  scene.width = std::max(2 * kMargin + kLabelWidth + across * pitch_x - kGap, 480.0);
  const auto groups = static_cast<double>(sweep.gammas.size());
  scene.height = kMargin + kHeaderHeight + kColumnTitleHeight + groups * (group_height + kGroupGap) - kGroupGap +
                 kFooterHeight + kMargin - 8;
  const auto add = [&scene](Shape shape) { scene.shapes.push_back(std::move(shape)); };

  add(Text{.baseline = {kMargin, kMargin + 16}, .text = scene.title, .size = 21, .bold = true});
  add(Text{.baseline = {kMargin, kMargin + 38},
           .text = "γ to the power of the distance along the curve from the marked patch.",
           .size = 13,
           .color = kSoftInk});
  const double left = kMargin + kLabelWidth;
  double y = kMargin + kHeaderHeight;
  for (std::int64_t c = 0; c < columns; ++c) {
    add(Text{.baseline = {left + static_cast<double>(c) * pitch_x + column_width / 2, y + 10},
             .text = c < curve_count ? sweep.curves[static_cast<std::size_t>(c)].name() : "mean",
             .size = kNameSize,
             .anchor = Anchor::kMiddle,
             .bold = true});
  }
  y += kColumnTitleHeight;

  for (std::size_t row = 0; row < fields.size(); ++row) {
    const std::int64_t reference = sweep.cells[row % sweep.cells.size()];
    const double middle = y + plot.height() / 2;
    add(Text{.baseline = {kMargin, middle - 3},
             .text = "γ = " + number_text(sweep.gammas[row / sweep.cells.size()]),
             .size = 13});
    add(Text{.baseline = {kMargin, middle + 14},
             .text = "at " + cell_label(grid, reference),
             .size = 12,
             .color = kSoftInk});
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::vector<double>& field = fields[row][static_cast<std::size_t>(c)];
      plot.move_to({left + static_cast<double>(c) * pitch_x + (column_width - plot.width()) / 2, y});
      for (std::int64_t t = 0; t < plot.frames(); ++t) {
        auto map = std::make_shared<Image>(grid.width, grid.height);
        for (std::int64_t i = 0; i < grid.width * grid.height; ++i) {
          const double value = field[static_cast<std::size_t>(t * grid.width * grid.height + i)];
          set_pixel(*map, i % grid.width, i / grid.width, mask_color((value - bottom) / (1 - bottom)));
        }
        add(Picture{.box = plot.frame_box(t), .image = std::move(map), .smooth = false});
      }
      add(Dot{.center = plot.center(reference), .radius = std::max(1.2, plot.cell() * 0.24), .fill = kInk});
    }
    y += pitch_y;
    if ((row + 1) % sweep.cells.size() == 0) y += kGroupGap - row_gap;
  }

  const double bar_y = scene.height - kMargin - 24;
  const double bar_width = 240;
  add(Picture{.box = {left, bar_y, bar_width, 10}, .image = color_ramp(mask_color)});
  for (const double part : {0.0, 0.5, 1.0}) {
    add(Text{.baseline = {left + part * bar_width, bar_y + 25},
             .text = number_text(bottom + part * (1 - bottom)),
             .size = 12,
             .color = kSoftInk,
             .anchor = Anchor::kMiddle});
  }
  add(Text{.baseline = {kMargin, bar_y + 10}, .text = "mask", .size = 12, .color = kSoftInk});
  return scene;
}

}  // namespace violin::viz
