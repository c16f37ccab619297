#include "violin/data/augment.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/data/pictures.h"
#include "violin/error.h"

namespace violin::data {
namespace {

const std::filesystem::path kGolden = std::filesystem::path(VIOLIN_GOLDEN_DIR) / "data";
constexpr Colour kFill = {124, 116, 104};

using Apply = std::function<void(Image&, double)>;

std::map<std::string, Apply> operations() {
  std::map<std::string, Apply> all = {
      {"auto_contrast", [](Image& image, double) { auto_contrast(image); }},
      {"equalize", [](Image& image, double) { equalize(image); }},
      {"invert", [](Image& image, double) { invert(image); }},
      {"posterize", [](Image& image, double v) { posterize(image, static_cast<int>(v)); }},
      {"solarize", [](Image& image, double v) { solarize(image, static_cast<int>(v)); }},
      {"solarize_add", [](Image& image, double v) { solarize_add(image, static_cast<int>(v)); }},
      {"brightness", brightness},
      {"contrast", contrast},
      {"saturation", saturation},
      {"sharpness", sharpness},
  };
  for (const Interpolation filter : {Interpolation::kBilinear, Interpolation::kBicubic}) {
    const std::string suffix = " " + std::string(interpolation_name(filter));
    all["rotate" + suffix] = [=](Image& image, double v) { image = rotate(image, v, filter, kFill); };
    all["shear_x" + suffix] = [=](Image& image, double v) { image = affine(image, {1, v, 0, 0, 1, 0}, filter, kFill); };
    all["shear_y" + suffix] = [=](Image& image, double v) { image = affine(image, {1, 0, 0, v, 1, 0}, filter, kFill); };
    all["translate_x" + suffix] = [=](Image& image, double v) {
      image = affine(image, {1, 0, v * static_cast<double>(image.width), 0, 1, 0}, filter, kFill);
    };
    all["translate_y" + suffix] = [=](Image& image, double v) {
      image = affine(image, {1, 0, 0, 0, 1, v * static_cast<double>(image.height)}, filter, kFill);
    };
  }
  return all;
}

TEST(Augment, OperationsGivePillowsBits) {
  const Image picture = load_image(kGolden / "picture.png");
  const Image sheet = load_image(kGolden / "operations.png");
  const auto rows = nlohmann::json::parse(std::ifstream(kGolden / "operations.json"));
  const auto known = operations();
  ASSERT_EQ(sheet.height, picture.height * static_cast<std::int64_t>(rows.size()));
  std::set<std::string> seen;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string name = rows[i][0];
    seen.insert(name);
    Image image = picture;
    known.at(name)(image, rows[i][1]);
    const Image expected =
        crop(sheet, {0, static_cast<std::int64_t>(i) * picture.height, picture.width, picture.height});
    EXPECT_EQ(difference(image, expected), 0) << rows[i];
  }
  EXPECT_EQ(seen.size(), known.size());
}

TEST(Augment, FlatAndTinyImagesAreLeftAlone) {
  Image flat(5, 4);
  std::fill(flat.pixels.begin(), flat.pixels.end(), std::uint8_t{77});
  for (const auto& operation : {auto_contrast, equalize}) {
    Image image = flat;
    operation(image);
    EXPECT_EQ(image, flat);
  }
  Image tiny = noise(2, 2, 1);
  const Image before = tiny;
  sharpness(tiny, 1.9);
  EXPECT_EQ(tiny, before);
}

TEST(Augment, FlipTwiceIsNothing) {
  for (const std::int64_t width : {1, 2, 7}) {
    const Image before = noise(width, 3, 2);
    Image image = before;
    flip_horizontally(image);
    EXPECT_EQ(image.at(0, 1)[2], before.at(width - 1, 1)[2]);
    flip_horizontally(image);
    EXPECT_EQ(image, before);
  }
}

TEST(RandAugment, ReadsTimmsDescriptions) {
  const RandAugmentOptions deit = parse_rand_augment("rand-m9-mstd0.5-inc1");
  EXPECT_EQ(deit.magnitude, 9);
  EXPECT_EQ(deit.deviation, 0.5);
  EXPECT_TRUE(deit.increasing);
  EXPECT_EQ(deit.operations, 2);
  EXPECT_EQ(deit.probability, 0.5);
  const RandAugmentOptions other = parse_rand_augment("rand-n3-p0.25-mmax12-mstd101");
  EXPECT_EQ(other.operations, 3);
  EXPECT_EQ(other.probability, 0.25);
  EXPECT_EQ(other.maximum, 12);
  EXPECT_TRUE(std::isinf(other.deviation));
  EXPECT_FALSE(other.increasing);
  for (const char* bad : {"", "augmix-m3", "rand-q4", "rand-m", "rand-mx", "rand-m9-5"}) {
    EXPECT_THROW(parse_rand_augment(bad), Error) << bad;
  }
}

// What each operation does at magnitude 9, by the direct call with the number that timm's table gives.
TEST(RandAugment, MagnitudesAreTimms) {
  const Image picture = load_image(kGolden / "picture.png");
  RandAugmentOptions options = parse_rand_augment("rand-m9-mstd0.5-inc1");
  options.fill = kFill;
  const auto known = operations();
  // Both signs where one is drawn.
  const std::map<std::string, std::pair<std::string, std::vector<double>>> expected = {
      {"AutoContrast", {"auto_contrast", {0}}},
      {"Equalize", {"equalize", {0}}},
      {"Invert", {"invert", {0}}},
      {"Rotate", {"rotate bicubic", {27, -27}}},
      {"PosterizeIncreasing", {"posterize", {1}}},
      {"SolarizeIncreasing", {"solarize", {26}}},
      {"SolarizeAdd", {"solarize_add", {99}}},
      {"ColorIncreasing", {"saturation", {1.81, 1 - 0.9 * 0.9}}},
      {"ContrastIncreasing", {"contrast", {1.81, 1 - 0.9 * 0.9}}},
      {"BrightnessIncreasing", {"brightness", {1.81, 1 - 0.9 * 0.9}}},
      {"SharpnessIncreasing", {"sharpness", {1.81, 1 - 0.9 * 0.9}}},
      {"ShearX", {"shear_x bicubic", {0.27, -0.27}}},
      {"ShearY", {"shear_y bicubic", {0.27, -0.27}}},
      {"TranslateXRel", {"translate_x bicubic", {0.405, -0.405}}},
      {"TranslateYRel", {"translate_y bicubic", {0.405, -0.405}}},
  };
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(kRandAugmentOperations));
  for (int operation = 0; operation < kRandAugmentOperations; ++operation) {
    const std::string name(rand_augment_operation_name(operation, true));
    const auto& [ours, values] = expected.at(name);
    std::set<std::size_t> reached;
    for (int draw = 0; draw < 40; ++draw) {
      Random random(1, Purpose::kAugment, {operation, draw});
      Image image = picture;
      rand_augment_operation(image, operation, 9, options, random);
      bool found = false;
      for (std::size_t i = 0; i < values.size(); ++i) {
        Image wanted = picture;
        known.at(ours)(wanted, values[i]);
        if (image != wanted) continue;
        reached.insert(i);
        found = true;
      }
      EXPECT_TRUE(found) << name;
    }
    EXPECT_EQ(reached.size(), values.size()) << name;
  }
}

TEST(RandAugment, StrongestPosterizationIsBlack) {
  RandAugmentOptions options = parse_rand_augment("rand-m9-mstd0.5-inc1");
  Image image = noise(6, 6, 1);
  Random random(0, Purpose::kAugment);
  rand_augment_operation(image, 4, 10, options, random);
  EXPECT_EQ(image, Image(6, 6));
}

TEST(RandAugment, LeavesAQuarterOfTheImagesAlone) {
  const RandAugmentOptions options = parse_rand_augment("rand-m9-mstd0.5-inc1");
  const Image before = noise(16, 16, 3);
  int same = 0;
  for (int i = 0; i < 2000; ++i) {
    Image image = before;
    Random random(9, Purpose::kAugment, {0, i});
    rand_augment(image, options, random);
    same += image == before ? 1 : 0;
  }
  // Neither of two operations with probability one half; noise fills the range, so auto contrast changes nothing
  // either.
  EXPECT_NEAR(same / 2000.0, 0.25 + 2 * 0.25 / 15, 0.04);
}

TEST(ColourJitter, StaysWithinItsStrength) {
  Image grey(4, 4);
  std::fill(grey.pixels.begin(), grey.pixels.end(), std::uint8_t{100});
  int low = 255;
  int high = 0;
  for (int i = 0; i < 500; ++i) {
    Image image = grey;  // contrast and saturation do nothing to it: brightness alone is seen
    Random random(2, Purpose::kAugment, {i});
    colour_jitter(image, 0.3, random);
    low = std::min<int>(low, image.pixels[0]);
    high = std::max<int>(high, image.pixels[0]);
  }
  EXPECT_GE(low, 69);
  EXPECT_LE(low, 72);
  EXPECT_LE(high, 130);
  EXPECT_GE(high, 127);
}

}  // namespace
}  // namespace violin::data
