// Scenes as pixels. Every shape is a distance to its edge, and a pixel is covered by as much of it as that distance
// says (half covered at 0, from none to all over one pixel): smooth edges with one evaluation per pixel and no
// oversampling. A line is blended once as a whole, so that transparent lines do not darken where their segments meet.

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>

#include "violin/error.h"
#include "violin/viz/font.h"
#include "violin/viz/resample.h"
#include "violin/viz/scene.h"

namespace violin::viz {
namespace {

// Pixels from first to below last, inside of the canvas.
struct Span {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

Span pixels_between(double low, double high, std::int64_t limit) {
  const double end = static_cast<double>(limit);
  return {static_cast<std::int64_t>(std::clamp(std::floor(low), 0.0, end)),
          static_cast<std::int64_t>(std::clamp(std::ceil(high), 0.0, end))};
}

double distance_to_segment(Point p, Point a, Point b) {
  const double dx = b.x - a.x;
  const double dy = b.y - a.y;
  const double length2 = dx * dx + dy * dy;
  const double along = length2 > 0 ? std::clamp(((p.x - a.x) * dx + (p.y - a.y) * dy) / length2, 0.0, 1.0) : 0.0;
  return std::hypot(p.x - a.x - along * dx, p.y - a.y - along * dy);
}

// Negative inside.
double distance_to_box(Point p, Box box, double radius) {
  const double half_width = box.width / 2;
  const double half_height = box.height / 2;
  const double r = std::min({radius, half_width, half_height});
  const double x = std::abs(p.x - box.x - half_width) - half_width + r;
  const double y = std::abs(p.y - box.y - half_height) - half_height + r;
  return std::hypot(std::max(x, 0.0), std::max(y, 0.0)) + std::min(std::max(x, y), 0.0) - r;
}

class Canvas {
 public:
  Canvas(std::int64_t width, std::int64_t height, double scale, Color background)
      : image_(width, height), scale_(scale) {
    for (std::int64_t i = 0; i < width * height; ++i) {
      image_.pixels[static_cast<std::size_t>(i * 3)] = background.red;
      image_.pixels[static_cast<std::size_t>(i * 3 + 1)] = background.green;
      image_.pixels[static_cast<std::size_t>(i * 3 + 2)] = background.blue;
    }
  }

  Image take() { return std::move(image_); }

  void draw(const Rectangle& shape) {
    const Box box = {shape.box.x * scale_, shape.box.y * scale_, shape.box.width * scale_, shape.box.height * scale_};
    const double radius = shape.radius * scale_;
    outlined(box, shape.fill, shape.stroke, shape.stroke_width * scale_,
             [&](Point p) { return distance_to_box(p, box, radius); });
  }

  void draw(const Dot& shape) {
    const Point center = {shape.center.x * scale_, shape.center.y * scale_};
    const double radius = shape.radius * scale_;
    outlined({center.x - radius, center.y - radius, 2 * radius, 2 * radius}, shape.fill, shape.stroke,
             shape.stroke_width * scale_, [&](Point p) { return std::hypot(p.x - center.x, p.y - center.y) - radius; });
  }

  void draw(const Polyline& shape) {
    if (shape.points.size() < 2 || shape.colors.empty()) return;
    std::vector<Point> points = shape.points;
    for (Point& point : points) point = {point.x * scale_, point.y * scale_};
    stroke({&points, 1}, shape.width * scale_, shape.colors);
  }

  // The outer letters' ink, not the middle of their strokes, meets the anchor.
  void draw(const Text& shape) {
    const double pen = shape.size * (shape.bold ? kBoldPen : kPen);
    const double width = text_width(shape.text, shape.size) + pen;
    const double shift = shape.anchor == Anchor::kStart ? 0 : shape.anchor == Anchor::kMiddle ? width / 2 : width;
    std::vector<std::vector<Point>> strokes = text_strokes(shape.text, shape.size);
    for (std::vector<Point>& line : strokes) {
      for (Point& point : line) {
        point = {(point.x + shape.baseline.x - shift + pen / 2) * scale_, (point.y + shape.baseline.y) * scale_};
      }
    }
    stroke(strokes, pen * scale_, {&shape.color, 1});
  }

  // On whole pixels: a heat map whose edges are blurred looks worse than one that is moved by half a pixel.
  void draw(const Picture& shape) {
    const auto whole = [this](double value) { return std::llround(value * scale_); };
    const std::int64_t left = whole(shape.box.x);
    const std::int64_t top = whole(shape.box.y);
    const std::int64_t width = std::max<std::int64_t>(1, whole(shape.box.x + shape.box.width) - left);
    const std::int64_t height = std::max<std::int64_t>(1, whole(shape.box.y + shape.box.height) - top);
    const Image fitted = shape.smooth ? resize(*shape.image, width, height) : enlarge(*shape.image, width, height);
    const Span columns = pixels_between(static_cast<double>(left), static_cast<double>(left + width), image_.width);
    const Span rows = pixels_between(static_cast<double>(top), static_cast<double>(top + height), image_.height);
    for (std::int64_t y = rows.first; y < rows.last && columns.first < columns.last; ++y) {
      std::copy_n(fitted.at(columns.first - left, y - top), (columns.last - columns.first) * 3,
                  image_.at(columns.first, y));
    }
  }

 private:
  void blend(std::int64_t x, std::int64_t y, Color color, double coverage) {
    constexpr double kLevels = 16;  // smooth to the eye, and a fifth less for PNG to store than 256
    const double share = std::round(std::clamp(coverage, 0.0, 1.0) * kLevels) / kLevels * color.alpha;
    if (share <= 0) return;
    std::uint8_t* pixel = image_.at(x, y);
    const std::uint8_t paint[3] = {color.red, color.green, color.blue};
    for (int c = 0; c < 3; ++c) {
      pixel[c] = static_cast<std::uint8_t>(std::lround(pixel[c] + (paint[c] - pixel[c]) * share));
    }
  }

  template <typename Distance>
  void outlined(Box box, Color fill, Color edge, double edge_width, const Distance& distance) {
    const double margin = edge_width / 2 + 1;
    const Span columns = pixels_between(box.x - margin, box.x + box.width + margin, image_.width);
    const Span rows = pixels_between(box.y - margin, box.y + box.height + margin, image_.height);
    for (std::int64_t y = rows.first; y < rows.last; ++y) {
      for (std::int64_t x = columns.first; x < columns.last; ++x) {
        const double d = distance(Point{static_cast<double>(x) + 0.5, static_cast<double>(y) + 0.5});
        blend(x, y, fill, 0.5 - d);
        if (edge_width > 0) blend(x, y, edge, line_coverage(std::abs(d), edge_width));
      }
    }
  }

  // A line thinner than a pixel is a paler one of a pixel.
  static double line_coverage(double distance, double width) {
    return std::clamp(std::max(width, 1.0) / 2 + 0.5 - distance, 0.0, 1.0) * std::min(width, 1.0);
  }

  // Every pixel takes the colour of the segment that covers most of it. `colors` has one entry, or one per segment of
  // one line.
  void stroke(std::span<const std::vector<Point>> lines, double width, std::span<const Color> colors) {
    const double margin = width / 2 + 1;
    std::optional<Point> low;
    Point high;
    for (const std::vector<Point>& line : lines) {
      for (const Point& p : line) {
        if (!low) low = high = p;
        low = {std::min(low->x, p.x), std::min(low->y, p.y)};
        high = {std::max(high.x, p.x), std::max(high.y, p.y)};
      }
    }
    if (!low) return;
    const Span columns = pixels_between(low->x - margin, high.x + margin, image_.width);
    const Span rows = pixels_between(low->y - margin, high.y + margin, image_.height);
    if (columns.first >= columns.last || rows.first >= rows.last) return;

    const std::int64_t stride = columns.last - columns.first;
    covered_.assign(static_cast<std::size_t>(stride * (rows.last - rows.first)), {});
    for (const std::vector<Point>& line : lines) {
      for (std::size_t i = 0; i + 1 < line.size(); ++i) {
        const Point a = line[i];
        const Point b = line[i + 1];
        const Color* color = &colors[colors.size() == 1 ? 0 : i];
        const Span xs = pixels_between(std::min(a.x, b.x) - margin, std::max(a.x, b.x) + margin, image_.width);
        const Span ys = pixels_between(std::min(a.y, b.y) - margin, std::max(a.y, b.y) + margin, image_.height);
        for (std::int64_t y = ys.first; y < ys.last; ++y) {
          Covered* covered = covered_.data() + (y - rows.first) * stride + xs.first - columns.first;
          for (std::int64_t x = xs.first; x < xs.last; ++x, ++covered) {
            const Point p = {static_cast<double>(x) + 0.5, static_cast<double>(y) + 0.5};
            const double share = line_coverage(distance_to_segment(p, a, b), width);
            if (share > covered->share) *covered = {share, color};
          }
        }
      }
    }
    const Covered* covered = covered_.data();
    for (std::int64_t y = rows.first; y < rows.last; ++y) {
      for (std::int64_t x = columns.first; x < columns.last; ++x, ++covered) {
        if (covered->share > 0) blend(x, y, *covered->color, covered->share);
      }
    }
  }

  struct Covered {
    double share = 0;
    const Color* color = nullptr;
  };

  Image image_;
  double scale_;
  std::vector<Covered> covered_;
};

}  // namespace

Image to_image(const Scene& scene, double scale) {
  const double width = std::ceil(scene.width * scale);
  const double height = std::ceil(scene.height * scale);
  if (!(width >= 1 && height >= 1) || width * height > static_cast<double>(kMaxPixels)) {
    throw Error("a picture of " + std::to_string(std::llround(width)) + "x" + std::to_string(std::llround(height)) +
                " pixels is too large; ask for fewer panels or a smaller grid");
  }
  Canvas canvas(static_cast<std::int64_t>(width), static_cast<std::int64_t>(height), scale, scene.background);
  for (const Shape& shape : scene.shapes) std::visit([&](const auto& s) { canvas.draw(s); }, shape);
  return canvas.take();
}

}  // namespace violin::viz
