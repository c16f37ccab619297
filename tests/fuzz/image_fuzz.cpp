// Images: whatever the bytes, an Error or a picture within the limit that every step before a network takes.
#include <zlib.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "tests/fuzz/require.h"
#include "violin/data/image.h"
#include "violin/data/transforms.h"
#include "violin/error.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace violin {
namespace {

constexpr std::int64_t kMaxPixels = 64 * 64;

// The codecs are no part of this build: how they fail is all that shows how far the bytes came in them.
__attribute__((section("__libfuzzer_extra_counters"))) std::uint8_t failures[4096];

void count_failure(std::string_view message) {
  std::uint32_t hash = 0;
  for (const char c : message) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) hash = hash * 31 + static_cast<unsigned char>(c);
  }
  failures[hash % sizeof failures] = 1;
}

Image decoded(std::span<const std::uint8_t> bytes, std::int64_t max_pixels) {
  Image image = decode_image(bytes, "input", {.max_pixels = max_pixels});
  require(image.width >= 1 && image.height >= 1 && image.height <= max_pixels / image.width);
  require(image.pixels.size() == static_cast<std::size_t>(image.width * image.height * 3));
  return image;
}

void preprocess(const Image& image, std::uint64_t seed) {
  static const data::EvalTransform eval({.size = {12, 20}});
  static const data::TrainTransform small(data::deit_augmentation({16, 16}));
  static const data::TrainTransform large(data::deit_augmentation({12, 40}));
  data::Random random(seed, data::Purpose::kAugment);
  for (const data::Transform* transform :
       {static_cast<const data::Transform*>(&eval), static_cast<const data::Transform*>(&small),
        static_cast<const data::Transform*>(&large)}) {
    std::vector<float> values(static_cast<std::size_t>(3 * transform->size().area()));
    transform->apply(image, random, values.data());
    require(std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); }));
  }
}

// Mutations seldom get past a checksum: those of a PNG's chunks are put right.
void repair(std::span<std::uint8_t> png) {
  constexpr std::size_t kSignature = 8;
  const auto number = [](std::span<std::uint8_t, 4> at) {
    return std::size_t{at[0]} << 24 | std::size_t{at[1]} << 16 | std::size_t{at[2]} << 8 | at[3];
  };
  png = png.subspan(std::min(png.size(), kSignature));
  while (png.size() >= 12) {  // length, name, content, checksum
    const std::size_t length = number(png.first<4>());
    if (length > png.size() - 12) return;
    const auto sum = static_cast<std::uint32_t>(crc32(0, png.data() + 4, static_cast<uInt>(length + 4)));
    png = png.subspan(length + 8);
    for (std::size_t i = 0; i < 4; ++i) png[i] = static_cast<std::uint8_t>(sum >> (24 - 8 * i));
    png = png.subspan(4);
  }
}

}  // namespace
}  // namespace violin

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (size > 0 && data[0] == 0x89 && seed % 8 != 0) violin::repair({data, size});
  return size;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace violin;
  const std::span bytes(data, size);
  try {
    Image image = decoded(bytes, kMaxPixels);
    preprocess(image, size);
    if (image.pixels.size() < 1000) require(decode_image(encode_png(image), "again") == image);
    // JPEG gives a part of the sides where the whole is too large, until no part is small enough.
    for (;;) image = decoded(bytes, image.width * image.height - 1);
  } catch (const Error& error) {
    count_failure(error.what());
  }
  return 0;
}
