// A picture as a list of shapes, painted in order, and its two backends: SVG text and pixels.
//
// Units are pixels of the picture at scale 1, x to the right and y down. Text stands on its baseline; in SVG it is real
// text in the reader's font, in pixels it is drawn with a stroke font of our own, so layouts leave room on both sides.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "violin/data/image.h"
#include "violin/viz/color.h"

namespace violin::viz {

struct Point {
  double x = 0;
  double y = 0;
};

struct Box {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

struct Rectangle {
  Box box;
  Color fill = {0, 0, 0, 0};
  Color stroke = {0, 0, 0, 0};  // centred on the edge
  double stroke_width = 0;
  double radius = 0;
};

// Round ends and joins. `colors` has one entry for the whole line or one per segment.
struct Polyline {
  std::vector<Point> points;
  std::vector<Color> colors;
  double width = 1;
};

struct Dot {
  Point center;
  double radius = 1;
  Color fill;
  Color stroke = {0, 0, 0, 0};
  double stroke_width = 0;
};

enum class Anchor { kStart, kMiddle, kEnd };

struct Text {
  Point baseline;
  std::string text;  // UTF-8
  double size = 12;
  Color color = kInk;
  Anchor anchor = Anchor::kStart;
  bool bold = false;
};

// An image stretched over a box: smoothly, or as blocks (heat maps, patches of a few pixels). Several may share one
// image, which SVG then holds once.
struct Picture {
  Box box;
  std::shared_ptr<const Image> image;
  bool smooth = true;
};

using Shape = std::variant<Rectangle, Polyline, Dot, Text, Picture>;

struct Scene {
  double width = 0;
  double height = 0;
  std::string title;  // for screen readers
  Color background = kPaper;
  std::vector<Shape> shapes;
};

inline void set_pixel(Image& image, std::int64_t x, std::int64_t y, Color color) {
  std::uint8_t* pixel = image.at(x, y);
  pixel[0] = color.red;
  pixel[1] = color.green;
  pixel[2] = color.blue;
}

std::string to_svg(const Scene& scene);

inline constexpr std::int64_t kMaxPixels = std::int64_t{64} << 20;

// `scale` pixels per unit. Throws violin::Error when the picture would have more than kMaxPixels.
Image to_image(const Scene& scene, double scale = 2);

}  // namespace violin::viz
