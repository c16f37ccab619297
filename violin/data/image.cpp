#include "violin/data/image.h"

#include <algorithm>
#include <string>
#include <utility>

#include "violin/data/codecs.h"
#include "violin/error.h"

namespace violin {
namespace codec {

void check_size(std::int64_t width, std::int64_t height, std::int64_t max_pixels) {
  if (width < 1 || height < 1) throw Error("the image has no pixels");
  if (height > max_pixels / width) {
    throw Error("the image has " + std::to_string(width) + "x" + std::to_string(height) +
                " pixels, more than the limit of " + std::to_string(max_pixels));
  }
}

int exif_orientation(std::span<const std::uint8_t> tiff) {
  if (tiff.size() < 8) return 1;
  const bool little = tiff[0] == 'I' && tiff[1] == 'I';
  if (!little && !(tiff[0] == 'M' && tiff[1] == 'M')) return 1;
  const auto number = [&](std::size_t at, std::size_t bytes) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value = value << 8 | tiff[at + (little ? bytes - 1 - i : i)];
    return value;
  };
  if (number(2, 2) != 42) return 1;
  const std::size_t directory = number(4, 4);
  if (directory > tiff.size() - 2) return 1;
  const std::size_t entries = number(directory, 2);
  for (std::size_t i = 0; i < entries; ++i) {
    const std::size_t entry = directory + 2 + i * 12;  // tag 2, type 2, count 4, value 4
    if (entry + 12 > tiff.size()) break;
    if (number(entry, 2) != 0x0112) continue;
    const std::uint32_t value = number(entry + 8, 2);
    return number(entry + 2, 2) == 3 && value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

void lay_on_white(const std::uint8_t* rgba, std::int64_t count, std::uint8_t* rgb) {
  for (std::int64_t i = 0; i < count; ++i) {
    const int alpha = rgba[i * 4 + 3];
    for (std::int64_t c = 0; c < 3; ++c) {
      rgb[i * 3 + c] = static_cast<std::uint8_t>((rgba[i * 4 + c] * alpha + 255 * (255 - alpha) + 127) / 255);
    }
  }
}

}  // namespace codec

namespace {

// EXIF numbers the eight ways to hold a camera: 2-4 are flips and the half turn, 5-8 also swap the sides.
Image oriented(Image image, int orientation) {
  if (orientation < 2 || orientation > 8) return image;
  const bool swapped = orientation >= 5;
  const bool from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool from_bottom = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  Image turned = swapped ? Image(image.height, image.width) : Image(image.width, image.height);
  for (std::int64_t y = 0; y < turned.height; ++y) {
    for (std::int64_t x = 0; x < turned.width; ++x) {
      const std::int64_t u = swapped ? y : x;
      const std::int64_t v = swapped ? x : y;
      const std::uint8_t* source =
          image.at(from_right ? image.width - 1 - u : u, from_bottom ? image.height - 1 - v : v);
      std::copy_n(source, 3, turned.at(x, y));
    }
  }
  return turned;
}

}  // namespace

Image decode_image(std::span<const std::uint8_t> bytes, std::string_view name, const DecodeLimits& limits) {
  int orientation = 1;
  Image image;
  try {
    if (bytes.empty()) throw Error("the file is empty");
    if (codec::is_jpeg(bytes)) {
      image = codec::decode_jpeg(bytes, limits.max_pixels, orientation);
    } else if (codec::is_png(bytes)) {
      image = codec::decode_png(bytes, limits.max_pixels, orientation);
    } else if (codec::is_webp(bytes)) {
      image = codec::decode_webp(bytes, limits.max_pixels, orientation);
    } else {
      throw Error(decodes_webp() ? "not a JPEG, PNG or WebP image" : "not a JPEG or PNG image");
    }
  } catch (const Error& error) {
    throw Error("cannot decode '" + std::string(name) + "': " + error.what());
  }
  return oriented(std::move(image), orientation);
}

Image load_image(const std::filesystem::path& path, const DecodeLimits& limits) {
  return decode_image(read_file(path, limits.max_bytes), path.string(), limits);
}

}  // namespace violin
