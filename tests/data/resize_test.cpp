#include "violin/data/resize.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/data/pictures.h"
#include "violin/data/pixel_loops.h"
#include "violin/error.h"

namespace violin::data {
namespace {

const std::filesystem::path kGolden = std::filesystem::path(VIOLIN_GOLDEN_DIR) / "data";

TEST(Resize, GivesPillowsBits) {
  const Image picture = load_image(kGolden / "picture.png");
  const auto cases = nlohmann::json::parse(std::ifstream(kGolden / "resize.json"));
  ASSERT_GE(cases.size(), 20u);
  for (const auto& entry : cases) {
    const auto box = entry["box"].get<std::array<std::int64_t, 4>>();
    const auto size = entry["size"].get<std::array<std::int64_t, 2>>();
    const Image expected = load_image(kGolden / entry["file"].get<std::string>());
    const Image got = resize(picture, {box[0], box[1], box[2], box[3]}, size[0], size[1],
                             parse_interpolation(entry["interpolation"].get<std::string>()));
    EXPECT_EQ(difference(got, expected), 0) << entry["file"];
  }
}

TEST(Resize, PartsEqualTheWhole) {
  const Image image = noise(53, 37, 3);
  const Image whole = resize(image, 40, 61);
  const Box view = {7, 11, 21, 30};
  EXPECT_EQ(resize_part(image, 40, 61, view), crop(whole, view));
  EXPECT_EQ(resize_part(image, 53, 61, view), crop(resize(image, 53, 61), view));
  EXPECT_EQ(resize_part(image, 53, 37, {3, 2, 10, 9}), crop(image, {3, 2, 10, 9}));
}

TEST(Resize, SeesNothingOutsideItsBox) {
  Image image = noise(40, 40, 4);
  const Box box = {8, 9, 17, 13};
  const Image before = resize(image, box, 30, 30);
  EXPECT_EQ(before, resize(crop(image, box), 30, 30));
  for (std::int64_t y = 0; y < 40; ++y) {
    for (std::int64_t x = 0; x < 40; ++x) {
      if (x < 8 || x >= 25 || y < 9 || y >= 22) image.at(x, y)[1] ^= 0xff;
    }
  }
  EXPECT_EQ(resize(image, box, 30, 30), before);
}

TEST(Resize, RefusesSizesAndBoxesThatMakeNoSense) {
  const Image image = noise(4, 4, 1);
  EXPECT_THROW(resize(image, 0, 4), Error);
  EXPECT_THROW(resize(image, 4, 1 << 20), Error);
  EXPECT_THROW(resize(image, {2, 2, 3, 1}, 4, 4), Error);
  EXPECT_THROW(resize_part(image, 8, 8, {4, 4, 5, 1}), Error);
  EXPECT_THROW(parse_interpolation("cubic"), Error);
}

TEST(Crop, FillsWhatLiesOutside) {
  const Image image = noise(3, 2, 5);
  const Image larger = crop(image, {-1, -1, 5, 4}, 9);
  EXPECT_EQ(larger.at(0, 0)[0], 9);
  EXPECT_EQ(larger.at(4, 3)[2], 9);
  EXPECT_EQ(crop(larger, {1, 1, 3, 2}), image);
  EXPECT_EQ(crop(image, {10, 0, 2, 2}), Image(2, 2));
}

TEST(PixelLoops, FastOnesGiveTheBitsOfThePlainOnes) {
  const PixelLoops* fast = avx2_loops();
  if (fast == nullptr) GTEST_SKIP() << "this processor has no AVX2";
  const PixelLoops& plain = plain_loops();
  for (const std::int64_t width : {1, 5, 11, 33, 70}) {
    const std::int64_t rows = 7;
    const Image image = noise(width, rows, static_cast<unsigned>(width));
    // Weights of both signs, large enough to leave the range at both ends.
    const std::vector<std::int32_t> weights = {-900000, 3000000, 2600000, -600000};
    const auto taps = static_cast<std::int32_t>(std::min<std::int64_t>(width, 4));
    const std::int64_t outputs = width - taps + 1;
    std::vector<std::int32_t> first, count, table;
    for (std::int64_t i = 0; i < outputs; ++i) {
      first.push_back(static_cast<std::int32_t>(i));
      count.push_back(taps);
      table.insert(table.end(), weights.begin(), weights.end());
    }
    const AxisWeights axis = {first.data(), count.data(), table.data(), 4};
    const std::int64_t stride = outputs * 3 + 1;
    std::vector<std::uint8_t> a(static_cast<std::size_t>(rows * stride)), b = a;
    plain.horizontal(image.pixels.data(), width * 3, width, rows, axis, outputs, a.data(), stride);
    fast->horizontal(image.pixels.data(), width * 3, width, rows, axis, outputs, b.data(), stride);
    for (std::int64_t y = 0; y < rows; ++y) {
      for (std::int64_t x = 0; x < outputs * 3; ++x) {
        ASSERT_EQ(a[static_cast<std::size_t>(y * stride + x)], b[static_cast<std::size_t>(y * stride + x)])
            << width << " " << x << " " << y;
      }
    }
    std::vector<std::uint8_t> c(static_cast<std::size_t>(width * 3)), d = c;
    plain.vertical(image.pixels.data(), width * 3, width * 3, weights.data(), 4, c.data());
    fast->vertical(image.pixels.data(), width * 3, width * 3, weights.data(), 4, d.data());
    EXPECT_EQ(c, d) << width;
    const float shift[3] = {1.5f, 100, 200};
    const float scale[3] = {0.01f, 0.02f, 0.03f};
    std::vector<float> e(image.pixels.size()), f = e;
    plain.normalise(image.pixels.data(), width * rows, shift, scale, e.data());
    fast->normalise(image.pixels.data(), width * rows, shift, scale, f.data());
    EXPECT_EQ(e, f) << width;
  }
}

}  // namespace
}  // namespace violin::data
