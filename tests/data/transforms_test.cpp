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
    options.size = Size::square(entry["size"]);
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
  options.size = Size::square(32);
  options.crop_pct = 1;
  EXPECT_EQ(eval_pixels(image, options), image);
  options.size = {24, 40};
  EXPECT_EQ(eval_pixels(noise(40, 24, 8), options), noise(40, 24, 8));
}

TEST(EvalTransform, AnyShapeOfImageGivesTheSameShape) {
  for (const Size& size : {Size{17, 17}, Size{17, 41}, Size{30, 9}}) {
    const EvalTransform transform({.size = size});
    std::vector<float> out(static_cast<std::size_t>(3 * size.area()));
    for (const auto& [width, height] : {std::pair{1, 1}, {1, 3000}, {2000, 1}, {17, 5}, {300, 200}}) {
      Random random(0, Purpose::kAugment);
      const Image image = noise(width, height, 1);
      const Image pixels = transform.pixels(image, random);
      EXPECT_EQ(pixels.width, size.width);
      EXPECT_EQ(pixels.height, size.height);
      transform.apply(image, random, out.data());
    }
  }
}

// Sizes and corners as timm computes them (ResizeKeepRatio that covers the target, then CenterCrop).
TEST(EvalTransform, RectanglesAreCoveredInProportion) {
  struct Case {
    Size image, size;
    double crop_pct;
    Size scaled;
    std::int64_t left, top;
  };
  for (const Case& c :
       {Case{{40, 50}, {40, 30}, 1.0, {40, 50}, 10, 0}, Case{{31, 45}, {24, 36}, 0.9, {28, 40}, 2, 2},
        Case{{45, 31}, {24, 36}, 0.875, {60, 41}, 2, 18}, Case{{31, 45}, {36, 20}, 0.9, {40, 58}, 19, 2},
        Case{{10, 13}, {24, 40}, 0.8, {38, 50}, 5, 7}, Case{{100, 100}, {16, 48}, 0.95, {50, 50}, 1, 17}}) {
    const Image image = noise(c.image.width, c.image.height, 3);
    const Image expected =
        crop(resize(image, c.scaled.width, c.scaled.height), {c.left, c.top, c.size.width, c.size.height});
    EXPECT_EQ(eval_pixels(image, {.size = c.size, .crop_pct = c.crop_pct}), expected)
        << to_string(c.image) << " to " << to_string(c.size);
  }
}

TEST(EvalTransform, SquashScalesEachSideOfARectangle) {
  const Image image = noise(70, 20, 3);
  const Image expected = crop(resize(image, 50, 30), {5, 3, 40, 24});
  EXPECT_EQ(eval_pixels(image, {.size = {24, 40}, .crop_pct = 0.8, .crop = EvalCrop::kSquash}), expected);
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
  const Normalisation own = {{0.5, 0.25, 1}, {0.125, 0.2, 0.3}};
  EXPECT_EQ(parse_statistics("0.5,0.25,1:0.125,0.2,0.3"), own);
  EXPECT_EQ(parse_statistics(to_string(own)), own);
  EXPECT_EQ(to_string(kImageNetStatistics), "0.485,0.456,0.406:0.229,0.224,0.225");
  for (const char* wrong :
       {"mnist", "", "0.5:0.5", "0.5,0.5,0.5", "0.5,0.5,0.5:", "0.5,0.5,0.5:0.2,0.2,0", ":,,:,,",
        "0.5,0.5,0.5:0.2,0.2,0.2,0.2", "0.5,0.5,1.5:0.2,0.2,0.2", "0.5,0.5,nan:0.2,0.2,0.2", "0.5,0.5,0.5:0.2,0.2,-0.2",
        "0.5,0.5,0.5:0.2,0.2,0.0009", "0.5,0.5,0.5:0.2,0.2,0.2 ", "124,116,104:58,57,57"})
    EXPECT_THROW(parse_statistics(wrong), Error) << wrong;
}

TEST(EvalOptions, AtASmallSizeTakeImagesAsTheyAre) {
  const EvalOptions large = {.size = Size::square(224), .crop_pct = 0.9, .normalisation = kCifar10Statistics};
  const EvalOptions small = at_size(large, {24, 32});
  EXPECT_EQ(small.size, (Size{24, 32}));
  EXPECT_EQ(small.crop_pct, 1);
  EXPECT_EQ(small.normalisation, kCifar10Statistics);
  EXPECT_EQ(at_size(large, {32, 40}).crop_pct, 0.9);
  EXPECT_EQ(at_size({.size = Size::square(32), .crop_pct = 0.9}, Size::square(24)).crop_pct, 0.9);  // so they were
  EXPECT_EQ(at_size({.size = Size::square(64), .crop_pct = 0.9, .crop = EvalCrop::kSquash}, {32, 32}).crop_pct, 0.9);
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
  const TrainTransform transform(deit_augmentation(Size::square(64)));
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
  options.crop = TrainCrop::kPadded;
  options.flip = 0;
  for (const Size& size : {Size{32, 32}, Size{20, 32}}) {
    options.size = size;
    const TrainTransform transform(options);
    const Image image = noise(size.width, size.height, 6);
    std::set<std::pair<std::int64_t, std::int64_t>> places;
    for (int i = 0; i < 2000; ++i) {
      Random random(5, Purpose::kAugment, {i});
      const Image got = transform.pixels(image, random);
      for (std::int64_t y = -4; y <= 4; ++y) {
        for (std::int64_t x = -4; x <= 4; ++x) {
          if (got == crop(image, {x, y, size.width, size.height})) places.emplace(x, y);
        }
      }
    }
    EXPECT_EQ(places.size(), 81u);
  }
}

TEST(TrainTransform, PaddedCropsOfOtherImagesScaleThemFirst) {
  const TrainTransform transform({.size = {20, 32}, .crop = TrainCrop::kPadded, .padding = 0, .flip = 0});
  Random random(5, Purpose::kAugment);
  const Image image = noise(50, 60, 6);
  EXPECT_EQ(transform.pixels(image, random), resize(image, 32, 20));
}

TEST(TrainTransform, ARandomPartIsStretchedToTheSizeWhateverItsRatio) {
  TrainOptions options;
  options.size = {24, 56};
  options.flip = 0;
  const TrainTransform transform(options);
  const Image image = noise(90, 70, 6);
  for (int i = 0; i < 50; ++i) {
    Random random(5, Purpose::kAugment, {i}), same(5, Purpose::kAugment, {i});
    const Box box = random_resized_crop(90, 70, options.scale, options.ratio, same);
    EXPECT_EQ(transform.pixels(image, random), resize(image, box, 56, 24));
  }
}

TEST(TrainTransform, ErasesABoxOfARectangle) {
  TrainOptions options;
  options.size = {16, 48};
  options.crop = TrainCrop::kSquash;
  options.erase = 1;
  options.erase_mode = EraseMode::kConstant;
  const TrainTransform transform(options);
  const Image white = [] {
    Image image(48, 16);
    std::fill(image.pixels.begin(), image.pixels.end(), std::uint8_t{255});
    return image;
  }();
  std::int64_t rightmost = 0;
  for (int i = 0; i < 200; ++i) {
    std::vector<float> out(3 * 16 * 48);
    Random random(5, Purpose::kAugment, {i});
    transform.apply(white, random, out.data());
    std::set<std::int64_t> rows, columns;
    std::int64_t erased = 0;
    for (std::int64_t at = 0; at < 16 * 48; ++at) {
      if (out[static_cast<std::size_t>(at)] != 0) continue;
      ++erased;
      rows.insert(at / 48);
      columns.insert(at % 48);
      rightmost = std::max(rightmost, at % 48);
    }
    EXPECT_EQ(erased, static_cast<std::int64_t>(rows.size() * columns.size()));
  }
  EXPECT_EQ(rightmost, 47);
}

TEST(DeitAugmentation, ImagesAreSmallWhereBothSidesAre) {
  EXPECT_EQ(deit_augmentation({32, 32}).crop, TrainCrop::kPadded);
  EXPECT_EQ(deit_augmentation({16, 32}).crop, TrainCrop::kPadded);
  EXPECT_EQ(deit_augmentation({16, 33}).crop, TrainCrop::kRandomResized);
}

TEST(TrainTransform, FlipsHalfOfTheImages) {
  TrainOptions options;
  options.size = Size::square(8);
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
  EXPECT_THROW(with([](TrainOptions& o) { o.size = {0, 224}; })(), Error);
  EXPECT_THROW(with([](TrainOptions& o) { o.size = {224, kLargestSize + 1}; })(), Error);
  EXPECT_THROW(with([](TrainOptions& o) { o.size = {3, 32}, o.crop = TrainCrop::kPadded; })(), Error);  // padding is 4
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
