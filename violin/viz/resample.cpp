#include "violin/viz/resample.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace violin::viz {
namespace {

// The source pixels that one target pixel is made of.
struct Taps {
  std::int64_t first = 0;
  std::vector<float> weights;
};

std::vector<Taps> make_taps(std::int64_t source, std::int64_t target) {
  const double ratio = static_cast<double>(source) / static_cast<double>(target);
  const double radius = std::max(ratio, 1.0);
  std::vector<Taps> all(static_cast<std::size_t>(target));
  for (std::int64_t i = 0; i < target; ++i) {
    const double center = (static_cast<double>(i) + 0.5) * ratio;
    Taps& taps = all[static_cast<std::size_t>(i)];
    taps.first = std::max<std::int64_t>(0, static_cast<std::int64_t>(std::floor(center - radius)));
    const auto last = std::min<std::int64_t>(source - 1, static_cast<std::int64_t>(std::ceil(center + radius)));
    double total = 0;
    for (std::int64_t j = taps.first; j <= last; ++j) {
      const double weight = std::max(0.0, 1 - std::abs((static_cast<double>(j) + 0.5 - center) / radius));
      taps.weights.push_back(static_cast<float>(weight));
      total += weight;
    }
    for (float& weight : taps.weights) weight = static_cast<float>(weight / total);
  }
  return all;
}

}  // namespace

Image resize(const Image& image, std::int64_t width, std::int64_t height) {
  if (image.width == width && image.height == height) return image;
  const std::vector<Taps> columns = make_taps(image.width, width);
  const std::vector<Taps> rows = make_taps(image.height, height);

  std::vector<float> wide(static_cast<std::size_t>(image.height * width * 3));  // [source height, width, 3]
  float* out = wide.data();
  for (std::int64_t y = 0; y < image.height; ++y) {
    for (const Taps& taps : columns) {
      const std::uint8_t* in = image.at(taps.first, y);
      float sums[3] = {};
      for (const float weight : taps.weights) {
        for (float& sum : sums) sum += weight * static_cast<float>(*in++);
      }
      out = std::copy_n(sums, 3, out);
    }
  }

  Image result(width, height);
  std::vector<float> line(static_cast<std::size_t>(width * 3));
  for (std::int64_t y = 0; y < height; ++y) {
    const Taps& taps = rows[static_cast<std::size_t>(y)];
    std::fill(line.begin(), line.end(), 0.0F);
    const float* in = wide.data() + taps.first * width * 3;
    for (const float weight : taps.weights) {
      for (float& value : line) value += weight * *in++;
    }
    std::transform(line.begin(), line.end(), result.at(0, y),
                   [](float value) { return static_cast<std::uint8_t>(std::clamp(value + 0.5F, 0.0F, 255.0F)); });
  }
  return result;
}

Image crop_to_fit(const Image& image, std::int64_t width, std::int64_t height) {
  const double ratio = static_cast<double>(width) / static_cast<double>(height);
  const double have = static_cast<double>(image.width) / static_cast<double>(image.height);
  std::int64_t w = image.width;
  std::int64_t h = image.height;
  if (have > ratio) {
    w = std::clamp<std::int64_t>(std::llround(static_cast<double>(h) * ratio), 1, image.width);
  } else {
    h = std::clamp<std::int64_t>(std::llround(static_cast<double>(w) / ratio), 1, image.height);
  }
  Image part(w, h);
  for (std::int64_t y = 0; y < h; ++y) {
    std::copy_n(image.at((image.width - w) / 2, y + (image.height - h) / 2), w * 3, part.at(0, y));
  }
  return resize(part, width, height);
}

Image enlarge(const Image& image, std::int64_t width, std::int64_t height) {
  Image result(width, height);
  for (std::int64_t y = 0; y < height; ++y) {
    for (std::int64_t x = 0; x < width; ++x) {
      std::copy_n(image.at(x * image.width / width, y * image.height / height), 3, result.at(x, y));
    }
  }
  return result;
}

}  // namespace violin::viz
