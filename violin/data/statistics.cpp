#include "violin/data/statistics.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "violin/error.h"

namespace violin::data {
namespace {

// Of one image, in 1/255: means of values and of squares.
struct Moments {
  std::array<double, 3> mean = {};
  std::array<double, 3> square = {};
};

Moments moments_of(const Image& image) {
  std::array<std::int64_t, 3> sums = {};
  std::array<std::int64_t, 3> squares = {};
  for (std::size_t i = 0; i < image.pixels.size(); i += 3) {
    for (std::size_t c = 0; c < 3; ++c) {
      const std::int64_t value = image.pixels[i + c];
      sums[c] += value;
      squares[c] += value * value;
    }
  }
  Moments result;
  const auto pixels = static_cast<double>(image.width * image.height);
  for (std::size_t c = 0; c < 3; ++c) {
    result.mean[c] = static_cast<double>(sums[c]) / pixels;
    result.square[c] = static_cast<double>(squares[c]) / pixels;
  }
  return result;
}

// Nothing where the image cannot be read: who trains on it names it.
std::optional<Moments> moments_of(const SampleSet& set, std::int64_t index) {
  try {
    return moments_of(set.decode(index));
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<std::optional<Moments>> all_moments(const SampleSet& set, int threads) {
  std::vector<std::optional<Moments>> result(static_cast<std::size_t>(set.size()));
  std::atomic<std::int64_t> next = 0;
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    try {
      for (std::int64_t i = next++; i < set.size(); i = next++) {
        result[static_cast<std::size_t>(i)] = moments_of(set, i);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
      next = set.size();
    }
  };
  {
    std::vector<std::jthread> others;
    const auto another = [&] {
      try {
        others.emplace_back(work);
        return true;
      } catch (const std::system_error&) {
        return false;  // fewer do it too
      }
    };
    while (std::ssize(others) + 1 < threads && another()) continue;
    work();
  }
  if (failure) std::rethrow_exception(failure);
  return result;
}

}  // namespace

Measurement measure_statistics(const SampleSet& set, int threads) {
  Moments sum;
  Measurement result;
  for (const std::optional<Moments>& image : all_moments(set, threads)) {
    if (!image) continue;
    ++result.images;
    for (std::size_t c = 0; c < 3; ++c) {
      sum.mean[c] += image->mean[c];
      sum.square[c] += image->square[c];
    }
  }
  if (result.images == 0)
    throw Error("none of " + std::to_string(set.size()) + " images can be read to measure their statistics");
  const auto images = static_cast<double>(result.images);
  for (std::size_t c = 0; c < 3; ++c) {
    const double mean = sum.mean[c] / images;
    const double variance = sum.square[c] / images - mean * mean;
    // Half a step of 8 bits: less is one flat colour.
    if (!(variance > 0.25))
      throw Error(
          "the images are one flat colour in a channel: their statistics cannot normalise them; name others "
          "(--statistics imagenet)");
    result.normalisation.mean[c] = mean / 255;
    result.normalisation.deviation[c] = std::sqrt(variance) / 255;
  }
  return result;
}

}  // namespace violin::data
