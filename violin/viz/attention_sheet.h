// Images beside where a model looked in them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "violin/viz/scene.h"

namespace violin::viz {

struct HeatMap {
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::vector<float> values;  // [height, width], 0 to 1
};

// The map, smoothly stretched, over the image: dark where nothing is seen.
Image overlay(const Image& image, const HeatMap& map);

struct AttentionEntry {
  Image image;  // as the model saw it
  HeatMap map;
  std::string name;
  std::string caption;
};

// Pairs of image and overlay, several to a row.
Scene attention_sheet(std::span<const AttentionEntry> entries);
// As many pairs as to_image takes at this scale.
std::size_t attention_sheet_limit(double scale);

}  // namespace violin::viz
