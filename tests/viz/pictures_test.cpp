#include "violin/viz/pictures.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "tests/viz/well_formed.h"
#include "violin/error.h"

namespace violin::viz {
namespace {

using curves::Grid;
using curves::parse_curves;

Image noise(std::int64_t width, std::int64_t height) {
  std::mt19937 random(1);
  Image image(width, height);
  for (std::uint8_t& value : image.pixels) value = static_cast<std::uint8_t>(random());
  return image;
}

std::vector<Grid> odd_grids() {
  return {{0, 1, 1}, {0, 1, 30}, {0, 30, 1}, {0, 14, 10}, {0, 5, 7}, {1, 2, 2}, {3, 4, 5}, {9, 3, 2}};
}

const char* const kEverywhere = "snake,snake_T,hilbert,peano,peano_T,z,random:3,manhattan,frame:zigzag";

template <typename Wanted>
std::vector<Wanted> all_of(const Scene& scene) {
  std::vector<Wanted> found;
  for (const Shape& shape : scene.shapes) {
    if (const auto* wanted = std::get_if<Wanted>(&shape)) found.push_back(*wanted);
  }
  return found;
}

bool has_text(const Scene& scene, const std::string& text) {
  for (const Text& candidate : all_of<Text>(scene)) {
    if (candidate.text == text) return true;
  }
  return false;
}

void expect_drawable(const Scene& scene, const std::string& what) {
  EXPECT_EQ(xml_problem(to_svg(scene)), "") << what;
  EXPECT_GT(to_image(scene, 0.5).width, 0) << what;
  // Everything within the picture; text may reach out by a letter.
  for (const Picture& picture : all_of<Picture>(scene)) {
    EXPECT_GE(picture.box.x, 0) << what;
    EXPECT_LE(picture.box.x + picture.box.width, scene.width + 1e-6) << what;
    EXPECT_LE(picture.box.y + picture.box.height, scene.height + 1e-6) << what;
  }
  for (const Polyline& line : all_of<Polyline>(scene)) {
    for (const Point& point : line.points) {
      EXPECT_TRUE(point.x >= 0 && point.x <= scene.width && point.y >= 0 && point.y <= scene.height) << what;
    }
  }
}

TEST(CurveGallery, DrawsEveryCurveOnEveryGrid) {
  const Image photo = noise(50, 40);
  for (const Grid& grid : odd_grids()) {
    const auto curves = parse_curves(kEverywhere);
    const Scene scene = curve_gallery(curves, grid, &photo);
    expect_drawable(scene, grid.to_string());
    for (const curves::Curve& curve : curves) EXPECT_TRUE(has_text(scene, curve.name())) << curve.name();
  }
}

TEST(CurveGallery, ThePathVisitsEveryCellInColoursOfItsPosition) {
  const Scene scene = curve_gallery(parse_curves("hilbert"), {0, 6, 6});
  for (const Polyline& line : all_of<Polyline>(scene)) {
    if (line.points.size() < 3) continue;  // rules of the grid
    EXPECT_EQ(line.points.size(), 36U);
    EXPECT_EQ(line.colors.size(), 35U);
    EXPECT_EQ(line.colors.front(), position_color(std::round(0.5 / 35 * 63) / 63));
    return;
  }
  FAIL() << "no path";
}

TEST(CurveGallery, HoldsThePhotoOnce) {
  const Image photo = noise(64, 64);
  const std::string svg = to_svg(curve_gallery(parse_curves("violin"), {0, 8, 8}, &photo));
  EXPECT_EQ(count(svg, "data:image/png"), 2U);  // and the ramp of the legend
  EXPECT_EQ(count(svg, "<use "), 8U);
}

TEST(CurveGallery, RefusesGridsThatNobodyCouldSee) {
  EXPECT_THROW(curve_gallery(parse_curves("z"), {0, 1024, 1024}), Error);
}

TEST(Flattened, PutsPatchesInTheSequenceOfTheCurveAndZFirst) {
  const Grid grid = {0, 5, 4};
  for (const bool with_photo : {false, true}) {
    const Image photo = noise(40, 50);
    const auto chosen = parse_curves("hilbert,z,peano");
    const Scene scene = flattened(chosen, grid, with_photo ? &photo : nullptr);
    const std::vector<Picture> pictures = all_of<Picture>(scene);  // the original, then z, hilbert, peano
    ASSERT_EQ(pictures.size(), 4U);
    const Image& original = *pictures[0].image;
    const std::int64_t side = original.width / grid.width;
    const char* const names[] = {"z", "hilbert", "peano"};
    for (std::size_t row = 0; row < 3; ++row) {
      EXPECT_TRUE(has_text(scene, names[row]));
      const Image& strip = *pictures[row + 1].image;
      ASSERT_EQ(strip.width, side * grid.cells());
      ASSERT_EQ(strip.height, side);
      const auto order = curves::order(*curves::ranks(curves::parse_curve(names[row]), grid));
      for (std::int64_t k = 0; k < grid.cells(); ++k) {
        const std::int64_t cell = order[static_cast<std::size_t>(k)];
        for (std::int64_t i = 0; i < side * side; ++i) {
          const std::uint8_t* seen = strip.at(k * side + i % side, i / side);
          const std::uint8_t* expected =
              original.at(cell % grid.width * side + i % side, cell / grid.width * side + i / side);
          ASSERT_TRUE(std::equal(seen, seen + 3, expected)) << names[row] << " " << k;
        }
      }
    }
  }
}

TEST(Flattened, DrawsEveryGridAndBreaksLongSequences) {
  for (const Grid& grid : odd_grids()) {
    expect_drawable(flattened(parse_curves("snake,hilbert,frame:zigzag"), grid), grid.to_string());
  }
  const Scene scene = flattened(parse_curves("hilbert"), {0, 14, 14});
  EXPECT_EQ(all_of<Picture>(scene).size(), 1U + 2 * 2);
  EXPECT_LT(scene.width, 1300);
  EXPECT_LT(flattened(parse_curves("hilbert"), {0, 128, 128}).height, 2000);
}

TEST(Flattened, RefusesManhattan) {
  EXPECT_THROW(flattened(parse_curves("manhattan"), {0, 4, 4}), Error);
}

TEST(DecayField, IsGammaToThePowerOfTheDistanceAlongTheCurve) {
  const Grid grid = {0, 5, 6};
  const auto chosen = parse_curves("hilbert,manhattan,snake_T");
  const curves::Coordinates coordinates = curves::coordinates(chosen, grid);
  for (const std::int64_t cell : {0, 13, 29}) {
    const auto hilbert = decay_field(coordinates, 0, cell, 0.9);
    const auto manhattan = decay_field(coordinates, 1, cell, 0.9);
    const auto ranks = curves::ranks(chosen[0], grid);
    for (std::int64_t i = 0; i < grid.cells(); ++i) {
      const int along = std::abs(ranks->at(static_cast<std::size_t>(i)) - ranks->at(static_cast<std::size_t>(cell)));
      const auto across = static_cast<double>(std::abs(i / 6 - cell / 6) + std::abs(i % 6 - cell % 6));
      EXPECT_NEAR(hilbert[static_cast<std::size_t>(i)], std::pow(0.9, along), 1e-12);
      EXPECT_NEAR(manhattan[static_cast<std::size_t>(i)], std::pow(0.9, across), 1e-12);
    }
  }
  for (const double value : decay_field(coordinates, 2, 4, 1.0)) EXPECT_EQ(value, 1);
}

TEST(MeanField, IsTheMean) {
  const std::vector<std::vector<double>> fields = {{1, 2}, {3, 6}};
  EXPECT_EQ(mean_field(fields), (std::vector<double>{2, 4}));
}

TEST(MaskPanels, HasAHeatMapForEachCurveCellAndGammaAndTheirMean) {
  const auto chosen = parse_curves("snake,hilbert,peano");
  const Scene scene = mask_panels({{0, 6, 6}, chosen, {0.9, 0.98}, {0, 35}});
  EXPECT_EQ(all_of<Picture>(scene).size(), 2U * 2 * 4 + 1);
  EXPECT_EQ(all_of<Dot>(scene).size(), 2U * 2 * 4);
  EXPECT_TRUE(has_text(scene, "mean"));
  EXPECT_TRUE(has_text(scene, "γ = 0.98"));
  EXPECT_TRUE(has_text(scene, "at 5,5"));
  const Scene single = mask_panels({{0, 6, 6}, parse_curves("snake"), {0.9}, {0}});
  EXPECT_EQ(all_of<Picture>(single).size(), 2U);
  EXPECT_FALSE(has_text(single, "mean"));
}

TEST(MaskPanels, TheReferenceIsBrightestAndTheScaleFitsTheMask) {
  const Scene far = mask_panels({{0, 8, 8}, parse_curves("z"), {0.9}, {9}});
  const Image& map = *all_of<Picture>(far)[0].image;
  EXPECT_TRUE(std::equal(map.at(1, 1), map.at(1, 1) + 1, &map.pixels[9 * 3]));
  EXPECT_EQ(map.at(1, 1)[0], mask_color(1).red);
  EXPECT_TRUE(has_text(far, "0"));
  EXPECT_TRUE(has_text(mask_panels({{0, 8, 8}, parse_curves("z"), {0.9996}, {0}}), "0.95"));
  EXPECT_TRUE(has_text(mask_panels({{0, 8, 8}, parse_curves("z"), {1.0}, {0}}), "1"));
}

TEST(MaskPanels, PutsTheFramesOfAMaskSideBySide) {
  const std::vector<Picture> maps = all_of<Picture>(mask_panels({{2, 5, 5}, parse_curves(kEverywhere), {0.98}, {0}}));
  EXPECT_EQ(maps[0].box.y, maps[1].box.y);
  EXPECT_GT(maps[1].box.x, maps[0].box.x + maps[0].box.width);
}

TEST(MaskPanels, DrawsEveryGrid) {
  for (const Grid& grid : odd_grids()) {
    expect_drawable(mask_panels({grid, parse_curves(kEverywhere), {0.98}, {0, grid.cells() - 1}}), grid.to_string());
  }
}

}  // namespace
}  // namespace violin::viz
