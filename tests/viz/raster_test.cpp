#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <numbers>
#include <string>

#include "violin/error.h"
#include "violin/viz/font.h"
#include "violin/viz/scene.h"

namespace violin::viz {
namespace {

constexpr Color kBlack = rgb(0x000000);

Scene scene_of(double width, double height, std::vector<Shape> shapes) {
  return {.width = width, .height = height, .title = "", .shapes = std::move(shapes)};
}

// Ink of black shapes on white, in pixels.
double ink(const Image& image) {
  double total = 0;
  for (std::size_t i = 0; i < image.pixels.size(); i += 3) total += 1 - image.pixels[i] / 255.0;
  return total;
}

int grey(const Image& image, int x, int y) {
  return image.at(x, y)[0];
}

TEST(Raster, FillsExactlyTheBackgroundOfAnEmptyScene) {
  Scene scene = scene_of(3, 2, {});
  scene.background = rgb(0x102030);
  const Image image = to_image(scene, 1);
  EXPECT_EQ(image.width, 3);
  EXPECT_EQ(image.height, 2);
  for (std::size_t i = 0; i < image.pixels.size(); i += 3) EXPECT_EQ(image.pixels[i + 1], 0x20);
}

TEST(Raster, ALineCoversTheExpectedPixels) {
  const Image image = to_image(scene_of(40, 20, {Polyline{{{10, 10}, {30, 10}}, {kBlack}, 4}}), 1);
  for (int x = 10; x < 30; ++x) {
    for (const int y : {8, 9, 10, 11}) EXPECT_EQ(grey(image, x, y), 0) << x << "," << y;
    EXPECT_EQ(grey(image, x, 7), 255);
    EXPECT_EQ(grey(image, x, 12), 255);
  }
  EXPECT_EQ(grey(image, 9, 9), 0);     // the round end
  EXPECT_EQ(grey(image, 7, 10), 255);  // beyond it
  EXPECT_NEAR(ink(image), 20 * 4 + std::numbers::pi * 4, 1.5);
}

TEST(Raster, TheAreaOfALineDoesNotDependOnItsDirection) {
  for (int degrees = 0; degrees < 360; degrees += 15) {
    const double a = degrees * std::numbers::pi / 180;
    const Point from = {30 - 20 * std::cos(a), 30 - 20 * std::sin(a)};
    const Point to = {30 + 20 * std::cos(a), 30 + 20 * std::sin(a)};
    const Image image = to_image(scene_of(60, 60, {Polyline{{from, to}, {kBlack}, 3}}), 1);
    EXPECT_NEAR(ink(image), 40 * 3 + std::numbers::pi * 2.25, 4) << degrees;
  }
}

TEST(Raster, AThinLineIsPaleInsteadOfBroken) {
  const Image image = to_image(scene_of(40, 20, {Polyline{{{5, 9.5}, {35, 9.5}}, {kBlack}, 0.25}}), 1);
  for (int x = 6; x < 34; ++x) EXPECT_NEAR(grey(image, x, 9), 255 * 0.75, 20) << x;
}

TEST(Raster, ATransparentLineIsNotDarkerWhereItsSegmentsMeet) {
  const Color half = kBlack.with_alpha(0.5);
  const Image image = to_image(scene_of(40, 40, {Polyline{{{5, 20}, {20, 20}, {35, 20}}, {half}, 6}}), 1);
  EXPECT_EQ(grey(image, 20, 20), grey(image, 10, 20));
  EXPECT_NEAR(grey(image, 20, 20), 128, 1);
}

TEST(Raster, SegmentsHaveTheirOwnColours) {
  const Image image =
      to_image(scene_of(40, 10, {Polyline{{{5, 5}, {20, 5}, {35, 5}}, {rgb(0xff0000), rgb(0x0000ff)}, 4}}), 1);
  EXPECT_EQ(image.at(10, 5)[0], 255);
  EXPECT_EQ(image.at(10, 5)[2], 0);
  EXPECT_EQ(image.at(30, 5)[0], 0);
  EXPECT_EQ(image.at(30, 5)[2], 255);
}

TEST(Raster, RectanglesAndDotsHaveTheirAreas) {
  EXPECT_NEAR(ink(to_image(scene_of(20, 20, {Rectangle{.box = {3, 4, 10, 7}, .fill = kBlack}}), 1)), 70, 1e-9);
  EXPECT_NEAR(ink(to_image(scene_of(20, 20, {Rectangle{.box = {3.5, 4, 10, 7}, .fill = kBlack}}), 1)), 70, 1);
  EXPECT_NEAR(ink(to_image(scene_of(40, 40, {Dot{.center = {20, 20}, .radius = 12, .fill = kBlack}}), 1)),
              std::numbers::pi * 144, 3);
  const Rectangle frame = {.box = {5, 5, 20, 20}, .stroke = kBlack, .stroke_width = 2};
  EXPECT_NEAR(ink(to_image(scene_of(30, 30, {frame}), 1)), 4 * 20 * 2, 2);
}

TEST(Raster, DrawsAtAnyScale) {
  const Scene scene = scene_of(10, 8, {Rectangle{.box = {2, 2, 4, 4}, .fill = kBlack}});
  for (const double scale : {0.5, 1.0, 2.0, 3.0}) {
    const Image image = to_image(scene, scale);
    EXPECT_EQ(image.width, static_cast<std::int64_t>(std::ceil(10 * scale)));
    EXPECT_NEAR(ink(image), 16 * scale * scale, 1e-9);
  }
}

TEST(Raster, ShapesBeyondTheEdgeAreCut) {
  auto blocks = std::make_shared<Image>(2, 2);
  std::vector<Shape> shapes;
  for (const double far : {-1e6, -15.0, 15.0, 1e6}) {
    shapes.push_back(Polyline{{{far, 5}, {5, far}, {-far, far}}, {kBlack}, 3});
    shapes.push_back(
        Rectangle{.box = {far, far, 10, 10}, .fill = kBlack, .stroke = kBlack, .stroke_width = 2, .radius = 3});
    shapes.push_back(Dot{.center = {far, 5}, .radius = 8, .fill = kBlack});
    shapes.push_back(Text{.baseline = {far, 5}, .text = "text", .size = 12});
    shapes.push_back(Picture{.box = {far, far, 10, 10}, .image = blocks});
    shapes.push_back(Picture{.box = {far, 3, 10, 10}, .image = blocks, .smooth = false});
  }
  EXPECT_EQ(to_image(scene_of(20, 20, shapes), 1).pixels.size(), 1200U);
}

TEST(Raster, BlocksStaySharp) {
  auto blocks = std::make_shared<Image>(2, 1);
  set_pixel(*blocks, 0, 0, kBlack);
  set_pixel(*blocks, 1, 0, rgb(0xffffff));
  const Image image = to_image(scene_of(12, 6, {Picture{.box = {2, 2, 8, 2}, .image = blocks, .smooth = false}}), 1);
  EXPECT_NEAR(ink(image), 8, 1e-9);
  EXPECT_EQ(grey(image, 5, 2), 0);
  EXPECT_EQ(grey(image, 6, 2), 255);
}

TEST(Raster, RefusesPicturesThatNobodyCouldOpen) {
  EXPECT_THROW(to_image(scene_of(100000, 100000, {}), 1), Error);
  EXPECT_THROW(to_image(scene_of(0, 10, {}), 1), Error);
}

TEST(Font, HasEveryPrintableCharacter) {
  const auto unknown = text_strokes("\x01", 20);
  for (char c = 33; c < 127; ++c) {
    const auto strokes = text_strokes(std::string(1, c), 20);
    ASSERT_FALSE(strokes.empty()) << c;
    const bool is_box =
        strokes.size() == 1 && strokes[0].size() == unknown[0].size() && strokes[0][2].x == unknown[0][2].x;
    EXPECT_FALSE(is_box) << c;
  }
  EXPECT_TRUE(text_strokes(" ", 20).empty());
}

TEST(Font, StaysWithinTheWidthThatItPromises) {
  for (const std::string text : {"hilbert_T", "22 jumps, mean 4.4", "γ = 0.98 · 14×14", "WAVE jJ @#"}) {
    const double width = text_width(text, 20);
    for (const auto& stroke : text_strokes(text, 20)) {
      for (const Point& point : stroke) {
        EXPECT_GE(point.x, -3) << text;
        EXPECT_LE(point.x, width + 3) << text;
        EXPECT_LE(std::abs(point.y), 20) << text;
      }
    }
  }
}

TEST(Font, SurvivesBytesThatAreNotUtf8) {
  for (const std::string text : {"\xff\xfe", "\xe2\x82", "a\xc3", "\xf0\x9f\x8e\xbb"}) {
    EXPECT_GT(text_width(text, 12), 0);
    EXPECT_FALSE(text_strokes(text, 12).empty());
  }
}

TEST(Text, AnchorsAtItsStartMiddleAndEnd) {
  const auto edges = [](Anchor anchor) {
    const Image image = to_image(
        scene_of(200, 30, {Text{.baseline = {100, 20}, .text = "HHHH", .size = 16, .color = kBlack, .anchor = anchor}}),
        1);
    int first = 200;
    int last = 0;
    for (int x = 0; x < 200; ++x) {
      for (int y = 0; y < 30; ++y) {
        if (grey(image, x, y) > 200) continue;
        first = std::min(first, x);
        last = std::max(last, x);
      }
    }
    return std::pair(first, last + 1);
  };
  EXPECT_NEAR(edges(Anchor::kStart).first, 100, 1);
  EXPECT_NEAR(edges(Anchor::kEnd).second, 100, 1);
  EXPECT_NEAR((edges(Anchor::kMiddle).first + edges(Anchor::kMiddle).second) / 2.0, 100, 1);
}

TEST(ColourMaps, GetLighterAllTheWay) {
  const auto lightness = [](Color c) { return 0.2126 * c.red + 0.7152 * c.green + 0.0722 * c.blue; };
  for (int i = 0; i < 100; ++i) {
    EXPECT_LE(lightness(position_color(i / 100.0)), lightness(position_color((i + 1) / 100.0)) + 1) << i;
    EXPECT_LE(lightness(mask_color(i / 100.0)), lightness(mask_color((i + 1) / 100.0)) + 1) << i;
  }
  EXPECT_EQ(mask_color(-1), mask_color(0));
  EXPECT_EQ(mask_color(2), mask_color(1));
}

TEST(ColourMaps, MixingNothingChangesNothing) {
  for (const std::uint32_t hex : {0x000000U, 0xffffffU, 0x2b2a80U, 0x00ff00U}) {
    EXPECT_EQ(mix(rgb(hex), rgb(0x808080), 0), rgb(hex));
    EXPECT_EQ(mix(rgb(0x808080), rgb(hex), 1), rgb(hex));
  }
}

}  // namespace
}  // namespace violin::viz
