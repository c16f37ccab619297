#include <algorithm>
#include <cmath>
#include <string>

#include "violin/error.h"
#include "violin/viz/font.h"
#include "violin/viz/grid_plot.h"
#include "violin/viz/pictures.h"
#include "violin/viz/resample.h"

namespace violin::viz {
namespace {

using curves::Curve;
using curves::Grid;

constexpr double kMargin = 32;
constexpr double kWidth = 1078;  // of the strips, at most
constexpr double kMinLabelWidth = 84;
constexpr double kLabelSize = 13;
constexpr double kRowGap = 14;
constexpr double kLineGap = 2;
constexpr double kOriginalSide = 150;

// How the patches of one curve are broken into lines of equal length.
struct Strip {
  std::int64_t lines = 1;
  std::int64_t per_line = 1;
  double patch = 1;
};

// Patches of 11 units are still recognisable; a long sequence gets smaller ones rather than more than a dozen lines.
Strip lay_out(std::int64_t patches) {
  constexpr double kReadable = 11;
  constexpr std::int64_t kMaxLines = 12;
  constexpr double kSmallest = 2;
  const auto lines_at = [&](double patch) {
    const auto per_line = std::max<std::int64_t>(1, static_cast<std::int64_t>(kWidth / patch));
    return (patches + per_line - 1) / per_line;
  };
  Strip strip;
  strip.lines =
      std::max(std::min(lines_at(kReadable), kMaxLines), lines_at(kSmallest) > kMaxLines ? lines_at(kSmallest) : 1);
  strip.per_line = (patches + strip.lines - 1) / strip.lines;
  strip.patch = std::clamp(kWidth / static_cast<double>(strip.per_line), kSmallest, 28.0);
  return strip;
}

// Every patch recognisable by its colour: hue runs with the column, lightness with the row.
Image coded(const Grid& grid) {
  Image image(grid.width, grid.height);
  for (std::int64_t r = 0; r < grid.height; ++r) {
    for (std::int64_t c = 0; c < grid.width; ++c) {
      const double down = (static_cast<double>(r) + 0.5) / static_cast<double>(grid.height);
      const double across = (static_cast<double>(c) + 0.5) / static_cast<double>(grid.width);
      set_pixel(image, c, r, hue_color(0.05 + 0.8 * across, 0.88 - 0.58 * down));
    }
  }
  return image;
}

void copy_patch(const Image& from, std::int64_t cell, const Grid& grid, std::int64_t side, Image& to,
                std::int64_t place) {
  const std::int64_t row = cell / grid.width % grid.height;
  const std::int64_t column = cell % grid.width;
  for (std::int64_t y = 0; y < side; ++y) {
    std::copy_n(from.at(column * side, row * side + y), side * 3, to.at(place * side, y));
  }
}

}  // namespace

Scene flattened(std::span<const Curve> curves, const Grid& grid, const Image* photo) {
  check_drawable(grid);
  const Curve z = {.kind = curves::Kind::kZ};
  std::vector<Curve> rows = {z};
  for (const Curve& curve : curves) {
    if (curve.kind == curves::Kind::kManhattan) {
      throw Error("manhattan is a distance and puts patches in no sequence: leave it out to flatten");
    }
    if (curve != z) rows.push_back(curve);
  }

  double label_width = kMinLabelWidth;
  for (const Curve& curve : rows) label_width = std::max(label_width, text_room(curve.name(), kLabelSize) + 14);

  const Strip strip = lay_out(grid.cells());
  // Pixels of a patch; one is enough for a flat colour.
  const std::int64_t side =
      photo == nullptr ? 1 : std::max<std::int64_t>(4, static_cast<std::int64_t>(std::ceil(strip.patch * 2)));
  const auto original = std::make_shared<Image>(
      photo != nullptr ? crop_to_fit(*photo, grid.width * side, grid.height * side) : coded(grid));
  const double cell = kOriginalSide / static_cast<double>(std::max(grid.height, grid.width));
  const double original_height = cell * static_cast<double>(grid.height);
  const double original_width = cell * static_cast<double>(grid.width);
  const double header = std::max(original_height, 50.0) + 30;
  const double row_height = std::max(static_cast<double>(strip.lines) * (strip.patch + kLineGap) - kLineGap, 16.0);

  Scene scene;
  scene.title = "An image of " + grid_title(grid) + " patches as a sequence";
  const double strip_width = static_cast<double>(strip.per_line) * strip.patch;
  scene.width = std::max(label_width + strip_width, label_width + original_width + 500) + 2 * kMargin;
  scene.height = 2 * kMargin + header + static_cast<double>(rows.size()) * (row_height + kRowGap) - kRowGap;

  const auto add = [&scene](Shape shape) { scene.shapes.push_back(std::move(shape)); };
  const double left = kMargin + label_width;
  add(Picture{.box = {left, kMargin, original_width, original_height}, .image = original, .smooth = photo != nullptr});
  for (std::int64_t c = 1; c < grid.width && cell >= 6; ++c) {
    const double x = left + static_cast<double>(c) * cell;
    add(Polyline{
        .points = {{x, kMargin}, {x, kMargin + original_height}}, .colors = {kPaper.with_alpha(0.6)}, .width = 1});
  }
  for (std::int64_t r = 1; r < grid.height && cell >= 6; ++r) {
    const double y = kMargin + static_cast<double>(r) * cell;
    add(Polyline{.points = {{left, y}, {left + original_width, y}}, .colors = {kPaper.with_alpha(0.6)}, .width = 1});
  }
  const double text_x = left + original_width + 26;
  add(Text{.baseline = {text_x, kMargin + 18}, .text = scene.title, .size = 21, .bold = true});
  add(Text{.baseline = {text_x, kMargin + 41},
           .text = "Each strip holds the same patches in the sequence of a curve, " + std::to_string(strip.per_line) +
                   " to a line.",
           .size = 13,
           .color = kSoftInk});

  double y = kMargin + header;
  for (const Curve& curve : rows) {
    add(Text{.baseline = {kMargin, y + row_height / 2 + 4}, .text = curve.name(), .size = kLabelSize, .bold = true});
    double line_y = y;
    std::vector<std::int32_t> sequence;
    for (const std::vector<std::int32_t>& path : paths_of(curve, grid)) {
      sequence.insert(sequence.end(), path.begin(), path.end());
    }
    for (std::size_t first = 0; first < sequence.size(); first += static_cast<std::size_t>(strip.per_line)) {
      const auto count = std::min<std::int64_t>(strip.per_line, static_cast<std::int64_t>(sequence.size() - first));
      Image line(count * side, side);
      for (std::int64_t i = 0; i < count; ++i) {
        copy_patch(*original, sequence[first + static_cast<std::size_t>(i)], grid, side, line, i);
      }
      add(Picture{.box = {left, line_y, static_cast<double>(count) * strip.patch, strip.patch},
                  .image = std::make_shared<Image>(std::move(line)),
                  .smooth = photo != nullptr});
      line_y += strip.patch + kLineGap;
    }
    y += row_height + kRowGap;
  }
  return scene;
}

}  // namespace violin::viz
