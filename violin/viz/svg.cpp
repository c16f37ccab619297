#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "violin/viz/html.h"
#include "violin/viz/resample.h"
#include "violin/viz/scene.h"

namespace violin::viz {
namespace {

// Two decimals are a fiftieth of a pixel on a dense screen; trailing zeros go.
std::string number(double value) {
  std::array<char, 48> buffer;
  const double rounded = std::round(value * 100) / 100;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), rounded == 0 ? 0.0 : rounded,
                                          std::chars_format::fixed);
  return error == std::errc() ? std::string(buffer.data(), end) : "0";
}

std::string hex(Color color) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "#";
  for (const std::uint8_t part : {color.red, color.green, color.blue}) {
    text += kDigits[part >> 4];
    text += kDigits[part & 15];
  }
  return text;
}

std::string attribute(std::string_view name, std::string_view value) {
  return " " + std::string(name) + "=\"" + std::string(value) + "\"";
}

std::string paint(std::string_view name, Color color) {
  if (color.alpha <= 0) return attribute(name, "none");
  std::string text = attribute(name, hex(color));
  if (color.alpha < 1) text += attribute(std::string(name) + "-opacity", number(color.alpha));
  return text;
}

std::string stroke(Color color, double width) {
  return color.alpha > 0 && width > 0 ? paint("stroke", color) + attribute("stroke-width", number(width)) : "";
}

// Control characters have no place in XML at all.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const std::string_view name = entity(c);
    if (!name.empty()) {
      out += name;
    } else {
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

std::string placed(Box box) {
  return attribute("x", number(box.x)) + attribute("y", number(box.y)) + attribute("width", number(box.width)) +
         attribute("height", number(box.height));
}

std::string element(const Rectangle& shape) {
  return "<rect" + placed(shape.box) + (shape.radius > 0 ? attribute("rx", number(shape.radius)) : "") +
         paint("fill", shape.fill) + stroke(shape.stroke, shape.stroke_width) + "/>\n";
}

std::string element(const Dot& shape) {
  return "<circle" + attribute("cx", number(shape.center.x)) + attribute("cy", number(shape.center.y)) +
         attribute("r", number(shape.radius)) + paint("fill", shape.fill) + stroke(shape.stroke, shape.stroke_width) +
         "/>\n";
}

std::string element(const Text& shape) {
  constexpr std::string_view kAnchors[] = {"start", "middle", "end"};
  return "<text" + attribute("x", number(shape.baseline.x)) + attribute("y", number(shape.baseline.y)) +
         attribute("font-size", number(shape.size)) + paint("fill", shape.color) +
         (shape.anchor == Anchor::kStart ? "" : attribute("text-anchor", kAnchors[static_cast<int>(shape.anchor)])) +
         (shape.bold ? attribute("font-weight", "600") : "") + ">" + escaped(shape.text) + "</text>\n";
}

// One element per run of equal colours.
std::string element(const Polyline& shape) {
  if (shape.points.size() < 2 || shape.colors.empty()) return "";
  const auto color_of = [&](std::size_t segment) { return shape.colors[shape.colors.size() == 1 ? 0 : segment]; };
  std::string out = "<g fill=\"none\" stroke-linecap=\"round\" stroke-linejoin=\"round\"" +
                    attribute("stroke-width", number(shape.width)) + ">";
  const std::size_t segments = shape.points.size() - 1;
  for (std::size_t first = 0, last = 0; first < segments; first = last) {
    while (last < segments && color_of(last) == color_of(first)) ++last;
    out += "<polyline" + paint("stroke", color_of(first)) + " points=\"";
    for (std::size_t i = first; i <= last; ++i) {
      out += (i == first ? "" : " ") + number(shape.points[i].x) + "," + number(shape.points[i].y);
    }
    out += "\"/>";
  }
  return out + "</g>\n";
}

// Not every viewer honours image-rendering, so blocks are also enlarged until their blurred edges are thin.
std::string image_element(const Picture& shape, const std::string& place) {
  constexpr std::int64_t kBlock = 8;
  const Image& image = *shape.image;
  const Bytes png = encode_png(shape.smooth ? image : enlarge(image, image.width * kBlock, image.height * kBlock));
  return "<image" + place + attribute("preserveAspectRatio", "none") +
         (shape.smooth ? "" : attribute("style", "image-rendering:pixelated")) +
         attribute("href", "data:image/png;base64," + base64(png)) + "/>\n";
}

std::string element(const Picture& shape) {
  return image_element(shape, placed(shape.box));
}

// Images that several pictures share are defined once, one unit wide and high, and stretched where they are used.
class SharedImages {
 public:
  explicit SharedImages(const Scene& scene) {
    for (const Shape& shape : scene.shapes) {
      if (const auto* picture = std::get_if<Picture>(&shape)) ++uses_[key(*picture)];
    }
    std::erase_if(uses_, [](const auto& entry) { return entry.second < 2; });
  }

  std::string element(const Picture& picture) {
    const auto shared = uses_.find(key(picture));
    if (shared == uses_.end()) return viz::element(picture);
    const auto [entry, first] = ids_.emplace(shared->first, "image" + std::to_string(ids_.size()));
    std::string out;
    if (first) {
      const std::string place = attribute("id", entry->second) + " width=\"1\" height=\"1\"";
      out = "<defs>" + image_element(picture, place) + "</defs>\n";
    }
    const Box& box = picture.box;
    return out + "<use" + attribute("href", "#" + entry->second) +
           attribute("transform", "translate(" + number(box.x) + " " + number(box.y) + ") scale(" + number(box.width) +
                                      " " + number(box.height) + ")") +
           "/>\n";
  }

 private:
  using Key = std::pair<const Image*, bool>;
  static Key key(const Picture& picture) { return {picture.image.get(), picture.smooth}; }

  std::map<Key, int> uses_;
  std::map<Key, std::string> ids_;
};

}  // namespace

std::string to_svg(const Scene& scene) {
  std::string out =
      "<svg xmlns=\"http://www.w3.org/2000/svg\"" + attribute("width", number(scene.width)) +
      attribute("height", number(scene.height)) +
      attribute("viewBox", "0 0 " + number(scene.width) + " " + number(scene.height)) +
      " role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif\">\n";
  out += "<title>" + escaped(scene.title) + "</title>\n";
  out += element(Rectangle{.box = {0, 0, scene.width, scene.height}, .fill = scene.background});
  SharedImages images(scene);
  for (const Shape& shape : scene.shapes) {
    const auto* picture = std::get_if<Picture>(&shape);
    out += picture != nullptr ? images.element(*picture) : std::visit([](const auto& s) { return element(s); }, shape);
  }
  return out + "</svg>\n";
}

}  // namespace violin::viz
