#include "violin/viz/resample.h"

#include <gtest/gtest.h>

#include <numeric>

#include "violin/viz/scene.h"

namespace violin::viz {
namespace {

Image flat(std::int64_t width, std::int64_t height, Color color) {
  Image image(width, height);
  for (std::int64_t i = 0; i < width * height; ++i) set_pixel(image, i % width, i / width, color);
  return image;
}

TEST(Resize, KeepsFlatColour) {
  for (const auto& [width, height] : std::vector<std::pair<int, int>>{{1, 1}, {3, 50}, {64, 7}, {200, 200}}) {
    EXPECT_EQ(resize(flat(31, 17, rgb(0x40c020)), width, height), flat(width, height, rgb(0x40c020)));
  }
}

TEST(Resize, AveragesWhatItShrinks) {
  Image checks(64, 64);
  for (std::int64_t i = 0; i < 64 * 64; ++i)
    set_pixel(checks, i % 64, i / 64, (i % 64 + i / 64) % 2 == 0 ? kPaper : rgb(0));
  const Image small = resize(checks, 4, 4);
  for (const std::uint8_t value : small.pixels) EXPECT_NEAR(value, 127.5, 4);
}

TEST(Resize, InterpolatesWhatItEnlarges) {
  Image two(2, 1);
  set_pixel(two, 1, 0, rgb(0xffffff));
  const Image wide = resize(two, 8, 1);
  for (std::int64_t x = 1; x < 8; ++x) EXPECT_GE(wide.at(x, 0)[0], wide.at(x - 1, 0)[0]);
  EXPECT_EQ(wide.at(0, 0)[0], 0);
  EXPECT_EQ(wide.at(7, 0)[0], 255);
}

TEST(CropToFit, TakesTheMiddle) {
  Image wide = flat(90, 30, rgb(0xff0000));
  for (std::int64_t y = 0; y < 30; ++y) {
    for (std::int64_t x = 30; x < 60; ++x) set_pixel(wide, x, y, rgb(0x00ff00));
  }
  EXPECT_EQ(crop_to_fit(wide, 10, 10), flat(10, 10, rgb(0x00ff00)));
  EXPECT_EQ(crop_to_fit(wide, 1, 40).height, 40);
  EXPECT_EQ(crop_to_fit(wide, 400, 1).width, 400);
}

}  // namespace
}  // namespace violin::viz
