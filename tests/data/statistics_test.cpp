#include "violin/data/statistics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/data/pictures.h"
#include "tests/temporary_folder.h"
#include "violin/error.h"

namespace violin::data {
namespace {

Image of_colours(std::int64_t width, std::array<std::uint8_t, 3> left, std::array<std::uint8_t, 3> right) {
  Image image(width, 1);
  for (std::int64_t x = 0; x < width; ++x) std::copy_n((x < width / 2 ? left : right).data(), 3, image.at(x, 0));
  return image;
}

TEST(MeasuredStatistics, AreThoseOfAllPixelsAndEveryImageCountsTheSame) {
  const TemporaryFolder folder;
  write_image(folder.path() / "a/small.png", of_colours(2, {0, 10, 255}, {0, 30, 255}));
  write_image(folder.path() / "b/large.png", of_colours(200, {255, 30, 0}, {255, 50, 255}));
  const Measurement measured = measure_statistics(open_images({folder.path()}), 1);
  EXPECT_EQ(measured.images, 2);
  const std::array<double, 3> mean = {127.5, 30, 191.25};
  const std::array<double, 3> deviation = {127.5, std::sqrt(200.0), 255 * std::sqrt(0.1875)};
  for (std::size_t c = 0; c < 3; ++c) {
    EXPECT_NEAR(measured.normalisation.mean[c], mean[c] / 255, 1e-12);
    EXPECT_NEAR(measured.normalisation.deviation[c], deviation[c] / 255, 1e-12);
  }
}

TEST(MeasuredStatistics, NeitherThreadsNorBrokenImagesChangeThem) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "b"}, {9, 8});
  const Measurement one = measure_statistics(open_images({folder.path()}), 1);
  write_text(folder.path() / "a/broken.png", "\x89PNG\r\n\x1a\nnothing");
  const SampleSet with_broken = open_images({folder.path()});
  ASSERT_EQ(with_broken.size(), 18);
  for (const int threads : {1, 3}) {
    const Measurement measured = measure_statistics(with_broken, threads);
    EXPECT_EQ(measured.images, 17);
    EXPECT_EQ(measured.normalisation, one.normalisation);
  }
}

TEST(MeasuredStatistics, OfNothingOrOneColourAreAnError) {
  const TemporaryFolder folder;
  write_text(folder.path() / "broken.png", "\x89PNG\r\n\x1a\nnothing");
  EXPECT_THROW(measure_statistics(open_images({folder.path()}), 1), Error);
  write_image(folder.path() / "flat.png", of_colours(4, {7, 1, 2}, {7, 90, 90}));
  EXPECT_THROW(measure_statistics(open_images({folder.path()}), 2), Error);
}

}  // namespace
}  // namespace violin::data
