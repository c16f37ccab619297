#include "violin/data/transforms.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/data/pictures.h"
#include "violin/error.h"

namespace violin::data {
namespace {

const std::filesystem::path kGolden = std::filesystem::path(VIOLIN_GOLDEN_DIR) / "data";

Image transposed(const Image& image) {
  Image result(image.height, image.width);
  for (std::int64_t y = 0; y < image.height; ++y) {
    for (std::int64_t x = 0; x < image.width; ++x) std::copy_n(image.at(x, y), 3, result.at(y, x));
  }
  return result;
}

TEST(EvalTransform, GivesTimmsPixels) {
  const Image picture = load_image(kGolden / "picture.png");
  for (const auto& entry : nlohmann::json::parse(std::ifstream(kGolden / "eval.json"))) {
    EvalOptions options;
    options.size = entry["size"];
    options.crop_pct = entry["crop_pct"];
    options.crop = entry["crop"] == "squash" ? EvalCrop::kSquash : EvalCrop::kCentre;
    const Image expected = load_image(kGolden / entry["file"].get<std::string>());
    const Image got = eval_pixels(entry["turned"].get<bool>() ? transposed(picture) : picture, options);
    EXPECT_EQ(difference(got, expected), 0) << entry;
  }
}

TEST(EvalTransform, TakesAnImageOfItsSizeAsItIs) {
  const Image image = noise(32, 32, 8);
  EvalOptions options;
  options.size = 32;
  options.crop_pct = 1;
  EXPECT_EQ(eval_pixels(image, options), image);
}

TEST(EvalTransform, AnyShapeOfImageGivesTheSameShape) {
  const EvalTransform transform({.size = 17});
  std::vector<float> out(3 * 17 * 17);
  for (const auto& [width, height] : {std::pair{1, 1}, {1, 3000}, {2000, 1}, {17, 5}, {300, 200}}) {
    Random random(0, Purpose::kAugment);
    const Image image = noise(width, height, 1);
    const Image pixels = transform.pixels(image, random);
    EXPECT_EQ(pixels.width, 17);
    EXPECT_EQ(pixels.height, 17);
    transform.apply(image, random, out.data());
  }
}

TEST(Normalise, SubtractsTheMeanAndDividesPerChannel) {
  const Image image = noise(11, 5, 4);
  std::vector<float> out(3 * 55);
  normalise(image, kImageNetStatistics, out.data());
  for (std::int64_t i = 0; i < 55; ++i) {
    for (std::int64_t c = 0; c < 3; ++c) {
      const auto channel = static_cast<std::size_t>(c);
      const double value = image.pixels[static_cast<std::size_t>(i * 3 + c)] / 255.0;
      const double expected = (value - kImageNetStatistics.mean[channel]) / kImageNetStatistics.deviation[channel];
      EXPECT_NEAR(out[static_cast<std::size_t>(c * 55 + i)], expected, 2e-6);
    }
  }
  EXPECT_EQ(parse_statistics("inception"), kInceptionStatistics);
  EXPECT_THROW(parse_statistics("mnist"), Error);
}

TEST(RandomResizedCrop, FollowsAreaAndRatio) {
  const std::array<double, 2> scale = {0.08, 1.0};
  const std::array<double, 2> ratio = {3.0 / 4.0, 4.0 / 3.0};
  double area = 0;
  double log_ratio = 0;
  double smallest = 1;
  double largest = 0;
  double x = 0;
  int whole = 0;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    Random random(1, Purpose::kAugment, {0, i});
    const Box box = random_resized_crop(500, 500, scale, ratio, random);
    ASSERT_TRUE(box.x >= 0 && box.y >= 0 && box.x + box.width <= 500 && box.y + box.height <= 500);
    const double share = static_cast<double>(box.width * box.height) / 250000;
    const double aspect = static_cast<double>(box.width) / static_cast<double>(box.height);
    ASSERT_GT(aspect, 0.74);
    ASSERT_LT(aspect, 1.35);
    area += share;
    log_ratio += std::log(aspect);
    smallest = std::min(smallest, share);
    largest = std::max(largest, share);
    x += box.width == 500 ? 0.5 : static_cast<double>(box.x) / static_cast<double>(500 - box.width);
    whole += box.width == 500 && box.height == 500 ? 1 : 0;
  }
  // Large parts that do not fit are drawn again, which pulls the mean area below that of the uniform draw, 0.54, to
  // timm's 0.480.
  EXPECT_NEAR(area / kDraws, 0.480, 0.006);
  EXPECT_NEAR(log_ratio / kDraws, 0, 0.005);
  EXPECT_NEAR(x / kDraws, 0.5, 0.01);
  EXPECT_NEAR(smallest, 0.08, 0.002);
  EXPECT_GT(largest, 0.97);
  EXPECT_LT(whole, kDraws / 100);
}

TEST(RandomResizedCrop, FallsBackToTheCentre) {
  Random random(1, Purpose::kAugment);
  // No part of this strip has an allowed ratio and area.
  EXPECT_EQ(random_resized_crop(1000, 20, {0.5, 1.0}, {3.0 / 4.0, 4.0 / 3.0}, random), (Box{486, 0, 27, 20}));
  EXPECT_EQ(random_resized_crop(20, 1000, {0.5, 1.0}, {3.0 / 4.0, 4.0 / 3.0}, random), (Box{0, 486, 20, 27}));
}

TEST(TrainTransform, SameKeySamePixels) {
  const TrainTransform transform(deit_augmentation(64));
  const Image image = noise(90, 70, 6);
  std::vector<float> a(3 * 64 * 64), b = a, c = a;
  Random first(5, Purpose::kAugment, {3, 17, 0});
  Random second(5, Purpose::kAugment, {3, 17, 0});
  Random other(5, Purpose::kAugment, {3, 17, 1});
  transform.apply(image, first, a.data());
  transform.apply(image, second, b.data());
  transform.apply(image, other, c.data());
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
}

TEST(TrainTransform, PaddedCropsMoveTheImageByUpToThePadding) {
  TrainOptions options;
  options.size = 32;
  options.crop = TrainCrop::kPadded;
  options.flip = 0;
  const TrainTransform transform(options);
  const Image image = noise(32, 32, 6);
  std::set<std::pair<std::int64_t, std::int64_t>> places;
  for (int i = 0; i < 2000; ++i) {
    Random random(5, Purpose::kAugment, {i});
    const Image got = transform.pixels(image, random);
    for (std::int64_t y = -4; y <= 4; ++y) {
      for (std::int64_t x = -4; x <= 4; ++x) {
        if (got == crop(image, {x, y, 32, 32})) places.emplace(x, y);
      }
    }
  }
  EXPECT_EQ(places.size(), 81u);
}

TEST(TrainTransform, FlipsHalfOfTheImages) {
  TrainOptions options;
  options.size = 8;
  options.crop = TrainCrop::kSquash;
  const TrainTransform transform(options);
  const Image image = noise(8, 8, 6);
  int flipped = 0;
  for (int i = 0; i < 1000; ++i) {
    Random random(5, Purpose::kAugment, {i});
    flipped += transform.pixels(image, random) == image ? 0 : 1;
  }
  EXPECT_NEAR(flipped, 500, 60);
}

TEST(TrainTransform, RefusesOptionsThatMakeNoSense) {
  const auto with = [](auto change) {
    TrainOptions options;
    change(options);
    return [options] { TrainTransform transform(options); };
  };
  EXPECT_THROW(with([](TrainOptions& o) { o.size = 0; })(), Error);
  EXPECT_THROW(with([](TrainOptions& o) { o.scale = {0.5, 0.2}; })(), Error);
  EXPECT_THROW(with([](TrainOptions& o) { o.flip = 2; })(), Error);
  EXPECT_THROW(with([](TrainOptions& o) { o.rand_augment = "rand-z1"; })(), Error);
  EXPECT_THROW(with([](TrainOptions& o) { o.normalisation.deviation = {1, 0, 1}; })(), Error);
  EXPECT_THROW(with([](TrainOptions& o) { o.erase = std::nan(""); })(), Error);
}

TEST(RandomErase, ErasesTheShareThatTimmErases) {
  constexpr std::int64_t kSide = 40;
  constexpr int kDraws = 4000;
  int erased = 0;
  double area = 0;
  double smallest = 1;
  double largest = 0;
  double sum = 0;
  double squares = 0;
  double count = 0;
  for (int i = 0; i < kDraws; ++i) {
    std::vector<float> values(3 * kSide * kSide, 1000.0f);
    Random random(3, Purpose::kAugment, {i});
    random_erase(values.data(), kSide, kSide, 0.25, EraseMode::kPixel, 1, random);
    double here = 0;
    for (const float value : values) {
      if (value == 1000.0f) continue;
      ++here;
      sum += value;
      squares += value * value;
    }
    count += here;
    if (here == 0) continue;
    ++erased;
    const double share = here / static_cast<double>(values.size());
    area += share;
    smallest = std::min(smallest, share);
    largest = std::max(largest, share);
  }
  EXPECT_NEAR(erased / static_cast<double>(kDraws), 0.25, 0.03);
  EXPECT_NEAR(area / erased, (0.02 + 1.0 / 3) / 2, 0.02);
  EXPECT_GT(smallest, 0.015);
  EXPECT_LT(largest, 0.36);
  EXPECT_NEAR(sum / count, 0, 0.01);
  EXPECT_NEAR(squares / count, 1, 0.02);
}

TEST(RandomErase, ConstantModesWriteOneColour) {
  std::vector<float> values(3 * 100, 7.0f);
  Random random(1, Purpose::kAugment);
  random_erase(values.data(), 10, 10, 1, EraseMode::kConstant, 1, random);
  EXPECT_GT(std::count(values.begin(), values.end(), 0.0f), 0);
  EXPECT_EQ(std::count(values.begin(), values.end(), 0.0f) + std::count(values.begin(), values.end(), 7.0f), 300);
}

}  // namespace
}  // namespace violin::data
