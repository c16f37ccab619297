// One decoder per format, used by image.cpp only. Each throws violin::Error without the file's name; the caller adds
// it.
#pragma once

#include <cstdint>
#include <span>

#include "violin/data/image.h"

namespace violin::codec {

bool is_jpeg(std::span<const std::uint8_t> bytes);
bool is_png(std::span<const std::uint8_t> bytes);
bool is_webp(std::span<const std::uint8_t> bytes);

Image decode_jpeg(std::span<const std::uint8_t> bytes, std::int64_t max_pixels, int& orientation);
Image decode_png(std::span<const std::uint8_t> bytes, std::int64_t max_pixels, int& orientation);
Image decode_webp(std::span<const std::uint8_t> bytes, std::int64_t max_pixels, int& orientation);

// Throws unless both sides are at least 1 and the product is within the limit.
void check_size(std::int64_t width, std::int64_t height, std::int64_t max_pixels);

// EXIF orientation, 1 to 8, of a TIFF block; 1 for anything that is not one.
int exif_orientation(std::span<const std::uint8_t> tiff);

// `rgba` [count, 4] laid on white, to `rgb` [count, 3].
void lay_on_white(const std::uint8_t* rgba, std::int64_t count, std::uint8_t* rgb);

}  // namespace violin::codec
