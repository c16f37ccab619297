#ifdef VIOLIN_HAVE_WEBP
#include <webp/decode.h>
#endif

#include <algorithm>
#include <cstring>
#include <vector>

#include "violin/data/codecs.h"
#include "violin/error.h"

namespace violin::codec {

bool is_webp(std::span<const std::uint8_t> bytes) {
  return bytes.size() >= 12 && std::memcmp(bytes.data(), "RIFF", 4) == 0 &&
         std::memcmp(bytes.data() + 8, "WEBP", 4) == 0;
}

#ifdef VIOLIN_HAVE_WEBP
namespace {

// The file is a row of chunks: four letters, a little-endian length, the content, padded to an even length.
int orientation_of(std::span<const std::uint8_t> bytes) {
  std::span<const std::uint8_t> rest = bytes.subspan(12);
  while (rest.size() >= 8) {
    const std::uint64_t size = rest[4] | rest[5] << 8 | rest[6] << 16 | std::uint64_t{rest[7]} << 24;
    if (size > rest.size() - 8) break;
    if (std::memcmp(rest.data(), "EXIF", 4) == 0) {
      // Some programs leave the six bytes in front of the TIFF block that only JPEG has.
      constexpr char kExif[] = "Exif\0";
      const std::span<const std::uint8_t> block = rest.subspan(8, size);
      const bool prefixed = size >= sizeof kExif && std::memcmp(block.data(), kExif, sizeof kExif) == 0;
      return exif_orientation(prefixed ? block.subspan(sizeof kExif) : block);
    }
    rest = rest.subspan(std::min<std::uint64_t>(8 + size + size % 2, rest.size()));
  }
  return 1;
}

}  // namespace

Image decode_webp(std::span<const std::uint8_t> bytes, std::int64_t max_pixels, int& orientation) {
  WebPBitstreamFeatures features;
  const VP8StatusCode status = WebPGetFeatures(bytes.data(), bytes.size(), &features);
  if (status == VP8_STATUS_NOT_ENOUGH_DATA) throw Error("broken WebP: the file is truncated");
  if (status != VP8_STATUS_OK) throw Error("broken WebP: bad header");
  if (features.has_animation != 0) throw Error("animated WebP is not supported; save one frame of it");
  check_size(features.width, features.height, max_pixels);

  Image image(features.width, features.height);
  bool whole = false;
  if (features.has_alpha == 0) {
    whole = WebPDecodeRGBInto(bytes.data(), bytes.size(), image.pixels.data(), image.pixels.size(),
                              features.width * 3) != nullptr;
  } else {
    std::vector<std::uint8_t> rgba(image.pixels.size() / 3 * 4);
    whole = WebPDecodeRGBAInto(bytes.data(), bytes.size(), rgba.data(), rgba.size(), features.width * 4) != nullptr;
    lay_on_white(rgba.data(), image.width * image.height, image.pixels.data());
  }
  if (!whole) throw Error("broken WebP: the data is truncated or corrupt");
  orientation = orientation_of(bytes);
  return image;
}
#else
Image decode_webp(std::span<const std::uint8_t>, std::int64_t, int&) {
  throw Error(
      "WebP is not supported by this build; convert the file to JPEG or PNG, or install libwebp-dev and rebuild");
}
#endif

}  // namespace violin::codec

namespace violin {

bool decodes_webp() {
#ifdef VIOLIN_HAVE_WEBP
  return true;
#else
  return false;
#endif
}

}  // namespace violin
