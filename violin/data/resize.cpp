#include "violin/data/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "violin/data/pixel_loops.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::data {
namespace {

double bilinear(double x) {
  x = std::abs(x);
  return x < 1 ? 1 - x : 0;
}

double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

double sinc(double x) {
  if (x == 0) return 1;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double lanczos(double x) {
  return -3 <= x && x < 3 ? sinc(x) * sinc(x / 3) : 0;
}

struct Filter {
  double (*value)(double);
  double support;
};

Filter filter_of(Interpolation interpolation) {
  switch (interpolation) {
    case Interpolation::kBilinear:
      return {bilinear, 1};
    case Interpolation::kBicubic:
      return {bicubic, 2};
    case Interpolation::kLanczos:
      return {lanczos, 3};
  }
  return {bicubic, 2};
}

// Weights of outputs begin … begin+count-1 of an axis that goes from `in` to `out` pixels.
struct Axis {
  std::vector<std::int32_t> first, count, weights;
  std::int64_t stride = 0;

  Axis(std::int64_t in, std::int64_t out, std::int64_t begin, std::int64_t outputs, const Filter& filter) {
    const double scale = static_cast<double>(in) / static_cast<double>(out);
    const double widened = std::max(scale, 1.0);
    const double support = filter.support * widened;
    stride = static_cast<std::int64_t>(std::ceil(support)) * 2 + 1;
    first.resize(static_cast<std::size_t>(outputs));
    count.resize(first.size());
    weights.resize(first.size() * static_cast<std::size_t>(stride));
    std::vector<double> exact(static_cast<std::size_t>(stride));
    for (std::int64_t i = 0; i < outputs; ++i) {
      const double centre = (static_cast<double>(begin + i) + 0.5) * scale;
      const double inverse = 1 / widened;
      const auto low = std::max<std::int64_t>(static_cast<std::int64_t>(std::floor(centre - support + 0.5)), 0);
      const auto high = std::min<std::int64_t>(static_cast<std::int64_t>(std::floor(centre + support + 0.5)), in);
      double sum = 0;
      for (std::int64_t x = low; x < high; ++x) {
        const double value = filter.value((static_cast<double>(x) - centre + 0.5) * inverse);
        exact[static_cast<std::size_t>(x - low)] = value;
        sum += value;
      }
      first[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(low);
      count[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(high - low);
      std::int32_t* row = weights.data() + i * stride;
      for (std::int64_t x = 0; x < high - low; ++x) {
        double value = exact[static_cast<std::size_t>(x)];
        if (sum != 0) value /= sum;
        value *= 1 << kWeightBits;
        row[x] = static_cast<std::int32_t>(value < 0 ? value - 0.5 : value + 0.5);
      }
    }
  }

  AxisWeights view() const { return {first.data(), count.data(), weights.data(), stride}; }
};

void check_target(std::int64_t width, std::int64_t height) {
  constexpr std::int64_t kLargest = 1 << 15;
  if (width < 1 || height < 1 || width > kLargest || height > kLargest) {
    throw Error("cannot resize to " + std::to_string(width) + "x" + std::to_string(height) + ": sides must be 1 to " +
                std::to_string(kLargest));
  }
}

// `view` of the box scaled to width x height.
Image resample(const Image& image, const Box& box, std::int64_t width, std::int64_t height, const Box& view,
               Interpolation interpolation) {
  check_target(width, height);
  const PixelLoops& loops = chosen_loops();
  const Filter filter = filter_of(interpolation);
  Image result(view.width, view.height);
  const std::int64_t row_bytes = view.width * 3;
  const bool scale_rows = box.height != height;

  // Input rows that are needed, relative to the box.
  std::int64_t first_row = view.y;
  std::int64_t rows = view.height;
  std::optional<Axis> down;
  if (scale_rows) {
    down.emplace(box.height, height, view.y, view.height, filter);
    first_row = down->first.front();
    rows = down->first.back() + down->count.back() - first_row;
  }

  const std::uint8_t* source = image.at(box.x, box.y + first_row);
  std::int64_t stride = image.width * 3;
  std::vector<std::uint8_t> narrowed;
  if (box.width != width) {
    const Axis across(box.width, width, view.x, view.width, filter);
    stride = row_bytes + 1;
    narrowed.resize(static_cast<std::size_t>(rows * stride));
    loops.horizontal(source, image.width * 3, box.width, rows, across.view(), view.width, narrowed.data(), stride);
    source = narrowed.data();
  } else {
    source += view.x * 3;
  }

  for (std::int64_t y = 0; y < view.height; ++y) {
    if (scale_rows) {
      loops.vertical(source + (down->first[static_cast<std::size_t>(y)] - first_row) * stride, stride, row_bytes,
                     down->weights.data() + y * down->stride, down->count[static_cast<std::size_t>(y)],
                     result.at(0, y));
    } else {
      std::memcpy(result.at(0, y), source + y * stride, static_cast<std::size_t>(row_bytes));
    }
  }
  return result;
}

bool inside(const Box& box, std::int64_t width, std::int64_t height) {
  return box.width >= 1 && box.height >= 1 && box.x >= 0 && box.y >= 0 && box.x + box.width <= width &&
         box.y + box.height <= height;
}

std::string described(const Box& box) {
  return std::to_string(box.width) + "x" + std::to_string(box.height) + " at " + std::to_string(box.x) + "," +
         std::to_string(box.y);
}

}  // namespace

std::string_view interpolation_name(Interpolation interpolation) {
  switch (interpolation) {
    case Interpolation::kBilinear:
      return "bilinear";
    case Interpolation::kBicubic:
      return "bicubic";
    case Interpolation::kLanczos:
      return "lanczos";
  }
  return "bicubic";
}

Interpolation parse_interpolation(std::string_view name) {
  for (const Interpolation candidate : {Interpolation::kBilinear, Interpolation::kBicubic, Interpolation::kLanczos}) {
    if (name == interpolation_name(candidate)) return candidate;
  }
  throw Error("unknown interpolation " + in_quotes(name) + ": choose bilinear, bicubic or lanczos");
}

Image resize(const Image& image, const Box& box, std::int64_t width, std::int64_t height, Interpolation interpolation) {
  if (!inside(box, image.width, image.height)) throw Error("box " + described(box) + " is not inside the image");
  return resample(image, box, width, height, {0, 0, width, height}, interpolation);
}

Image resize(const Image& image, std::int64_t width, std::int64_t height, Interpolation interpolation) {
  return resize(image, {0, 0, image.width, image.height}, width, height, interpolation);
}

Image resize_part(const Image& image, std::int64_t width, std::int64_t height, const Box& view,
                  Interpolation interpolation) {
  if (!inside(view, width, height)) throw Error("box " + described(view) + " is not inside the resized image");
  return resample(image, {0, 0, image.width, image.height}, width, height, view, interpolation);
}

Image crop(const Image& image, const Box& box, std::uint8_t fill) {
  Image result(box.width, box.height);
  if (fill != 0) std::fill(result.pixels.begin(), result.pixels.end(), fill);
  const std::int64_t left = std::max<std::int64_t>(box.x, 0);
  const std::int64_t right = std::min(box.x + box.width, image.width);
  const std::int64_t top = std::max<std::int64_t>(box.y, 0);
  const std::int64_t bottom = std::min(box.y + box.height, image.height);
  if (left >= right) return result;
  for (std::int64_t y = top; y < bottom; ++y) {
    std::memcpy(result.at(left - box.x, y - box.y), image.at(left, y), static_cast<std::size_t>((right - left) * 3));
  }
  return result;
}

}  // namespace violin::data
