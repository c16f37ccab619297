// Pieces of HTML: escaped text, embedded pictures, line charts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "violin/viz/scene.h"

namespace violin::viz {

std::string escape_html(std::string_view text);
std::string base64(const Bytes& bytes);

// <img> elements that hold their picture.
std::string embedded(const Scene& scene, std::string_view description);
std::string embedded(const Image& image, std::string_view description, bool pixelated);

struct Series {
  std::string name;
  std::vector<double> x, y;
  int color = 0;  // index into the page's palette
  bool dashed = false;
};

struct LineChart {
  std::string title;
  std::string unit;  // of y: "%", or empty
  std::vector<Series> series;
  bool from_zero = false;
};

// An <svg> that takes its colours from the page, with round numbers on both axes and a legend below.
std::string line_chart(const LineChart& chart);

// Round numbers that cover [low, high], about `wanted` of them.
std::vector<double> ticks(double low, double high, int wanted);

}  // namespace violin::viz
