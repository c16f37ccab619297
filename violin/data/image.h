// Images in memory, decoded from JPEG, PNG and (where built with libwebp) WebP, encoded as PNG.
//
// Everything becomes 8-bit RGB: grey is repeated, palettes are looked up, 16 bits are rounded to 8, transparency is
// laid on white, CMYK follows Adobe's inverted convention, and the EXIF orientation is applied, so pixels stand as a
// viewer shows them. Embedded colour profiles and gamma are ignored, as image-classification pipelines do. Files are
// hostile: sizes are checked from the header before anything is allocated, and every error is a violin::Error that
// names the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "violin/data/file.h"

namespace violin {

struct Image {
  std::int64_t width = 0;
  std::int64_t height = 0;
  std::vector<std::uint8_t> pixels;  // [height, width, 3]

  Image() = default;
  Image(std::int64_t w, std::int64_t h) : width(w), height(h), pixels(static_cast<std::size_t>(w * h * 3)) {}

  std::uint8_t* at(std::int64_t x, std::int64_t y) { return pixels.data() + (y * width + x) * 3; }
  const std::uint8_t* at(std::int64_t x, std::int64_t y) const { return pixels.data() + (y * width + x) * 3; }
  friend bool operator==(const Image&, const Image&) = default;
};

struct DecodeLimits {
  // A JPEG of one scan (most are) that has more is decoded at a half, a quarter or an eighth of its sides if that fits.
  std::int64_t max_pixels = std::int64_t{64} << 20;
  std::int64_t max_bytes = std::int64_t{256} << 20;  // of the file; load_image only
};

// The format is told from the content; `name` is only for messages.
Image decode_image(std::span<const std::uint8_t> bytes, std::string_view name, const DecodeLimits& limits = {});
Image load_image(const std::filesystem::path& path, const DecodeLimits& limits = {});

Bytes encode_png(const Image& image);

// True when this build reads WebP.
bool decodes_webp();

}  // namespace violin
