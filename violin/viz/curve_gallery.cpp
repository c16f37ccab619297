#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "violin/viz/font.h"
#include "violin/viz/grid_plot.h"
#include "violin/viz/pictures.h"
#include "violin/viz/resample.h"

namespace violin::viz {
namespace {

using curves::Curve;
using curves::Grid;

constexpr double kMargin = 32;
constexpr double kGapX = 28;
constexpr double kGapY = 26;
constexpr double kTitleHeight = 26;  // of a panel
constexpr double kHeaderHeight = 62;
constexpr double kFooterHeight = 44;
constexpr double kMaxWidth = 1160;  // between the margins, unless a single panel is wider
constexpr std::int64_t kMaxColumns = 4;
constexpr double kMinPanelWidth = 200;
constexpr double kNameSize = 15;
constexpr double kSummarySize = 11.5;

// Pale and nearly grey, so that the path on top of it is what one sees first.
Image faded(Image image) {
  for (std::size_t i = 0; i < image.pixels.size(); i += 3) {
    std::uint8_t* pixel = &image.pixels[i];
    const double grey = 0.30 * pixel[0] + 0.59 * pixel[1] + 0.11 * pixel[2];
    for (int c = 0; c < 3; ++c) {
      pixel[c] = static_cast<std::uint8_t>(std::lround(255 - 0.62 * (255 - (0.35 * grey + 0.65 * pixel[c]))));
    }
  }
  return image;
}

std::string summary(const Curve& curve, const Grid& grid) {
  if (curve.kind == curves::Kind::kManhattan) return "a distance, no path";
  if (curve.per_frame && grid.is_3d()) return "repeated in each frame";
  const curves::Locality locality = curves::locality(*curves::ranks(curve, grid), grid);
  if (locality.jumps == 0) return locality.diagonal_steps == 0 ? "unit steps only" : "no jumps";
  char text[64];
  std::snprintf(text, sizeof text, "%lld jump%s, mean %.1f", static_cast<long long>(locality.jumps),
                locality.jumps == 1 ? "" : "s", locality.mean_jump);
  return text;
}

class Gallery {
 public:
  Gallery(std::span<const Curve> curves, const Grid& grid, const Image* photo)
      : curves_(curves), grid_(grid), plot_(grid, cell_size(grid), kMaxWidth) {
    if (photo != nullptr) {
      const auto pixels = static_cast<std::int64_t>(std::ceil(plot_.cell() * 2));
      photo_ = std::make_shared<Image>(faded(crop_to_fit(*photo, grid.width * pixels, grid.height * pixels)));
    }
  }

  Scene draw() {
    double panel_width = std::max(plot_.width(), kMinPanelWidth);
    for (const Curve& curve : curves_) {
      const double titles = text_room(curve.name(), kNameSize) + text_room(summary(curve, grid_), kSummarySize);
      panel_width = std::max(panel_width, titles + 12);
    }
    const auto count = static_cast<std::int64_t>(curves_.size());
    const auto fitting = static_cast<std::int64_t>((kMaxWidth + kGapX) / (panel_width + kGapX));
    const std::int64_t columns =
        std::clamp<std::int64_t>(std::min(fitting, kMaxColumns), 1, std::max<std::int64_t>(count, 1));
    const std::int64_t lines = (count + columns - 1) / columns;
    const double panel_height = kTitleHeight + plot_.height();
    const auto across = static_cast<double>(columns);
    const auto down = static_cast<double>(lines);

    const double content = std::max(across * panel_width + (across - 1) * kGapX, 420.0);
    scene_.width = content + 2 * kMargin;
    scene_.height = kMargin + kHeaderHeight + down * panel_height + (down - 1) * kGapY + kFooterHeight + kMargin - 10;
    scene_.title = "Space-filling curves over " + grid_title(grid_) + " patches";
    header();
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t line = i / columns;
      const std::int64_t column = i % columns;
      const Point corner = {kMargin + static_cast<double>(column) * (panel_width + kGapX),
                            kMargin + kHeaderHeight + static_cast<double>(line) * (panel_height + kGapY)};
      panel(curves_[static_cast<std::size_t>(i)], corner, panel_width);
    }
    footer();
    return std::move(scene_);
  }

 private:
  static double cell_size(const Grid& grid) {
    const auto side = static_cast<double>(std::max(grid.height, grid.width));
    const double panel = grid.is_3d() ? 136 : grid.width >= 3 * grid.height ? 560 : 268;
    return std::floor(std::clamp(panel / side, 4.0, grid.is_3d() ? 20.0 : 40.0));  // whole units keep the rules sharp
  }

  void add(Shape shape) { scene_.shapes.push_back(std::move(shape)); }

  void header() {
    add(Text{.baseline = {kMargin, kMargin + 16}, .text = scene_.title, .size = 21, .bold = true});
    add(Text{.baseline = {kMargin, kMargin + 38},
             .text = "Patches that are close along the line are close in the sequence.",
             .size = 13,
             .color = kSoftInk});
  }

  void footer() {
    const double y = scene_.height - kMargin - 2;
    add(Dot{.center = {kMargin + 5, y}, .radius = 5, .fill = position_color(0)});
    add(Text{.baseline = {kMargin + 16, y + 4}, .text = "first patch", .size = 12, .color = kSoftInk});
    add(Picture{.box = {kMargin + 92, y - 4, 180, 8}, .image = color_ramp(position_color)});
    add(Dot{
        .center = {kMargin + 289, y}, .radius = 4, .fill = kPaper, .stroke = position_color(1), .stroke_width = 2.5});
    add(Text{.baseline = {kMargin + 300, y + 4}, .text = "last patch", .size = 12, .color = kSoftInk});
  }

  void panel(const Curve& curve, Point corner, double width) {
    add(Text{.baseline = {corner.x, corner.y + 13}, .text = curve.name(), .size = kNameSize, .bold = true});
    add(Text{.baseline = {corner.x + width, corner.y + 13},
             .text = summary(curve, grid_),
             .size = kSummarySize,
             .color = kSoftInk,
             .anchor = Anchor::kEnd});
    plot_.move_to({corner.x, corner.y + kTitleHeight});
    if (curve.kind == curves::Kind::kManhattan) {
      distances();
    } else {
      ground();
      for (const std::vector<std::int32_t>& path : paths_of(curve, grid_)) draw_path(path);
    }
  }

  // Patches or an empty grid for the path to lie on.
  void ground() {
    for (std::int64_t t = 0; t < plot_.frames(); ++t) {
      const Box frame = plot_.frame_box(t);
      if (photo_ != nullptr) {
        add(Picture{.box = frame, .image = photo_});
      } else {
        add(Rectangle{.box = frame, .fill = kPanel});
      }
      // A line of one unit between whole units covers whole pixels.
      if (plot_.cell() >= 6) {
        const Color rule = photo_ != nullptr ? kPaper.with_alpha(0.55) : kRule;
        for (std::int64_t c = 1; c < grid_.width; ++c) {
          const double x = frame.x + static_cast<double>(c) * plot_.cell() + 0.5;
          add(Polyline{.points = {{x, frame.y}, {x, frame.y + frame.height}}, .colors = {rule}, .width = 1});
        }
        for (std::int64_t r = 1; r < grid_.height; ++r) {
          const double y = frame.y + static_cast<double>(r) * plot_.cell() + 0.5;
          add(Polyline{.points = {{frame.x, y}, {frame.x + frame.width, y}}, .colors = {rule}, .width = 1});
        }
      }
      add(Rectangle{
          .box = {frame.x + 0.5, frame.y + 0.5, frame.width, frame.height}, .stroke = kRule, .stroke_width = 1});
    }
  }

  bool touching(std::int32_t a, std::int32_t b) const {
    const std::int64_t rows = std::abs(a / grid_.width % grid_.height - b / grid_.width % grid_.height);
    const std::int64_t columns = std::abs(a % grid_.width - b % grid_.width);
    return plot_.frame_of(a) == plot_.frame_of(b) && rows <= 1 && columns <= 1;
  }

  void draw_path(const std::vector<std::int32_t>& path) {
    const double pen = std::clamp(plot_.cell() * 0.26, 1.2, 7.0);
    const auto last = static_cast<double>(std::max<std::size_t>(path.size() - 1, 1));
    // Neighbouring ones of 64 colours look the same, and runs of one colour keep files small.
    const auto color_at = [&](double k) { return position_color(std::round(k / last * 63) / 63); };

    // Jumps lie below, runs of touching cells above; a run starts where the last one was left.
    std::vector<Polyline> runs;
    for (std::size_t k = 0; k + 1 < path.size(); ++k) {
      const Point from = plot_.center(path[k]);
      const Point to = plot_.center(path[k + 1]);
      const Color color = color_at(static_cast<double>(k) + 0.5);
      if (!touching(path[k], path[k + 1])) {
        const bool same_frame = plot_.frame_of(path[k]) == plot_.frame_of(path[k + 1]);
        add(Polyline{.points = {from, to},
                     .colors = {color.with_alpha(same_frame ? 0.6 : 0.3)},
                     .width = std::max(pen * 0.34, 0.8)});
        continue;
      }
      if (k == 0 || runs.empty() || !touching(path[k - 1], path[k])) {
        runs.push_back({.points = {from}, .colors = {}, .width = pen});
      }
      runs.back().points.push_back(to);
      runs.back().colors.push_back(color);
    }
    // A cell that is reached and left by jumps has no line of its own.
    for (std::size_t k = 0; k < path.size(); ++k) {
      const bool from_neighbour = k > 0 && touching(path[k - 1], path[k]);
      const bool to_neighbour = k + 1 < path.size() && touching(path[k], path[k + 1]);
      if (!from_neighbour && !to_neighbour) {
        add(Dot{.center = plot_.center(path[k]), .radius = pen * 0.6, .fill = color_at(static_cast<double>(k))});
      }
    }
    if (photo_ != nullptr) {
      for (const Polyline& run : runs) {
        add(Polyline{.points = run.points, .colors = {kPaper.with_alpha(0.7)}, .width = pen + 2.5});
      }
    }
    for (Polyline& run : runs) add(std::move(run));

    const double radius = std::clamp(plot_.cell() * 0.3, 2.2, 9.0);
    add(Dot{.center = plot_.center(path.front()),
            .radius = radius,
            .fill = color_at(0),
            .stroke = kPaper,
            .stroke_width = 1.2});
    if (path.size() > 1) {
      add(Dot{.center = plot_.center(path.back()),
              .radius = radius * 0.85,
              .fill = kPaper,
              .stroke = color_at(last),
              .stroke_width = radius * 0.45});
    }
  }

  // Manhattan: how far every cell is from the middle one.
  void distances() {
    const Curve manhattan = {.kind = curves::Kind::kManhattan};
    const curves::Coordinates all = curves::coordinates({&manhattan, 1}, grid_);
    const std::int64_t middle =
        ((plot_.frames() / 2) * grid_.height + grid_.height / 2) * grid_.width + grid_.width / 2;
    std::vector<std::int64_t> distance(static_cast<std::size_t>(all.tokens));
    for (std::int64_t a = 0; a < all.axes; ++a) {
      const std::int32_t* axis = all.values.data() + a * all.tokens;
      for (std::int64_t i = 0; i < all.tokens; ++i)
        distance[static_cast<std::size_t>(i)] += std::abs(axis[i] - axis[middle]);
    }
    const auto farthest =
        static_cast<double>(std::max<std::int64_t>(1, *std::max_element(distance.begin(), distance.end())));
    for (std::int64_t t = 0; t < plot_.frames(); ++t) {
      Image map(grid_.width, grid_.height);
      for (std::int64_t i = 0; i < grid_.width * grid_.height; ++i) {
        const auto cell = static_cast<std::size_t>(t * grid_.width * grid_.height + i);
        const Color color = mix(position_color(static_cast<double>(distance[cell]) / farthest), kPanel, 0.15);
        set_pixel(map, i % grid_.width, i / grid_.width, color);
      }
      add(Picture{.box = plot_.frame_box(t), .image = std::make_shared<Image>(std::move(map)), .smooth = false});
    }
  }

  std::span<const Curve> curves_;
  Grid grid_;
  GridPlot plot_;
  std::shared_ptr<const Image> photo_;
  Scene scene_;
};

}  // namespace

Scene curve_gallery(std::span<const Curve> curves, const Grid& grid, const Image* photo) {
  check_drawable(grid);
  return Gallery(curves, grid, photo).draw();
}

}  // namespace violin::viz
