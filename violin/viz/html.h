// Pieces of HTML: escaped text, embedded pictures, line charts.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "violin/viz/scene.h"

namespace violin::viz {

// For text and for attributes in quotes of either kind.
// What stands for one of & < > " in markup; empty for other characters.
std::string_view entity(char c);
std::string escape_html(std::string_view text);
std::string base64(const Bytes& bytes);

// The scene on a dark ground: paper, panels, rules and ink change places, lines get lighter, pixels stay.
Scene darkened(Scene scene);

// The pictures of a page, each held once, within a budget: what exceeds it is left out, so a page has a size that is
// known beforehand.
class Pictures {
 public:
  explicit Pictures(std::size_t budget) : left_(budget) {}

  // The name of a style class with the image as background, or nothing when the budget is spent.
  std::string background(const Image& image);
  // A <picture> with a light and a dark version, or a sentence when the budget is spent.
  std::string scene(const Scene& scene, std::string_view description);

  // The rules of the classes, for the head of the page.
  std::string styles() const;
  std::size_t left_out() const { return left_out_; }

 private:
  bool spend(std::size_t bytes);

  std::size_t left_;
  std::size_t left_out_ = 0;
  std::map<std::string, std::string> classes_;  // of the data
};

struct Series {
  std::string name;  // empty: not in the legend
  std::vector<double> x, y;
  int color = 0;  // index into the page's palette
  bool dashed = false;
};

struct LineChart {
  std::string title;
  std::string unit;     // of y: "%", or empty
  std::string x_label;  // below the right end
  std::vector<Series> series;
  bool from_zero = false;
  bool last_values = true;  // in the legend
};

// An <svg> that takes its colours from the page, with round numbers on both axes (x: whole ones) and a legend below.
// Long series are thinned to a few hundred points.
std::string line_chart(const LineChart& chart);

// Round numbers inside [low, high], about `wanted` of them, at least `smallest` apart.
std::vector<double> ticks(double low, double high, int wanted, double smallest = 0);

}  // namespace violin::viz
