// Resampling with antialiasing, the same bits as Pillow's (up to version 12): two passes over 8-bit values with 22-bit
// fixed-point weights, the horizontal one first and rounded to 8 bits in between. Rows that no output row needs are not
// touched.
#pragma once

#include <cstdint>
#include <string_view>

#include "violin/data/image.h"

namespace violin::data {

enum class Interpolation { kBilinear, kBicubic, kLanczos };
std::string_view interpolation_name(Interpolation interpolation);  // "bilinear", "bicubic", "lanczos"
Interpolation parse_interpolation(std::string_view name);

// Whole pixels of an image.
struct Box {
  std::int64_t x = 0;
  std::int64_t y = 0;
  std::int64_t width = 0;
  std::int64_t height = 0;
  friend bool operator==(const Box&, const Box&) = default;
};

// The box of the image, cut out first and then scaled, so that nothing outside it is seen.
Image resize(const Image& image, const Box& box, std::int64_t width, std::int64_t height,
             Interpolation interpolation = Interpolation::kBicubic);
Image resize(const Image& image, std::int64_t width, std::int64_t height,
             Interpolation interpolation = Interpolation::kBicubic);

// Part `view` of resize(image, width, height), computed without the rest.
Image resize_part(const Image& image, std::int64_t width, std::int64_t height, const Box& view,
                  Interpolation interpolation = Interpolation::kBicubic);

// A box that may reach beyond the image; what lies outside is `fill`.
Image crop(const Image& image, const Box& box, std::uint8_t fill = 0);

}  // namespace violin::data
