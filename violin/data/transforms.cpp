#include "violin/data/transforms.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

#include "violin/data/pixel_loops.h"
#include "violin/error.h"
#include "violin/number_text.h"
#include "violin/text.h"

namespace violin::data {
namespace {

constexpr double kSmallestDeviation = 0.001;  // a quarter of a step of a pixel

// Half to even, as Python's round().
std::int64_t rounded(double value) {
  return static_cast<std::int64_t>(std::nearbyint(value));
}

void check_size(const Size& size) {
  if (size.shorter() < 1 || size.longer() > kLargestSize)
    throw Error("image size " + short_text(size) + ": choose 1 to " + std::to_string(kLargestSize) + " pixels");
}

void check_share(double value, const char* what) {
  if (!(value >= 0 && value <= 1)) throw Error(std::string(what) + " must be between 0 and 1");
}

void check_crop(double crop_pct) {
  if (!(crop_pct > 0 && crop_pct <= 1)) throw Error("crop_pct must be above 0 and at most 1");
}

// What an image of this size is scaled to before its centre is taken. timm's rules: for a square target the longer side
// is cut off, otherwise rounded. It is limited, for a strip of one pixel would grow without bounds.
Size scaled_to_cover(const Size& image, const Size& target) {
  constexpr std::int64_t kLimit = 1 << 15;
  if (target.is_square()) {
    const std::int64_t longer = std::min(target.height * image.longer() / image.shorter(), kLimit);
    return image.width <= image.height ? Size{longer, target.width} : Size{target.height, longer};
  }
  const auto height = static_cast<double>(image.height), width = static_cast<double>(image.width);
  const double shrink =
      std::min(height / static_cast<double>(target.height), width / static_cast<double>(target.width));
  return {std::min(rounded(height / shrink), kLimit), std::min(rounded(width / shrink), kLimit)};
}

EvalOptions eval_part(const TrainOptions& options) {
  return {options.size, options.crop_pct, options.crop == TrainCrop::kSquash ? EvalCrop::kSquash : EvalCrop::kCentre,
          options.interpolation, options.normalisation};
}

// Three numbers from 0 to 1 between commas.
bool parse_channels(std::string_view text, std::array<double, 3>& channels) {
  const char* at = text.data();
  const char* const end = at + text.size();
  for (std::size_t i = 0; i < channels.size(); ++i) {
    if (i > 0 && (at == end || *at++ != ',')) return false;
    const auto [rest, error] = std::from_chars(at, end, channels[i]);
    if (error != std::errc() || !(channels[i] >= 0 && channels[i] <= 1)) return false;
    at = rest;
  }
  return at == end;
}

}  // namespace

Normalisation parse_statistics(std::string_view text) {
  if (text == "imagenet") return kImageNetStatistics;
  if (text == "inception") return kInceptionStatistics;
  if (text == "cifar10") return kCifar10Statistics;
  if (text == "cifar100") return kCifar100Statistics;
  const std::size_t colon = text.find(':');
  Normalisation result;
  if (colon != std::string_view::npos && parse_channels(text.substr(0, colon), result.mean) &&
      parse_channels(text.substr(colon + 1), result.deviation) &&
      std::ranges::all_of(result.deviation, [](double x) { return x >= kSmallestDeviation; })) {
    return result;
  }
  throw Error(
      "unknown statistics " + in_quotes(text) +
      ": choose imagenet, inception, cifar10, cifar100, or three means from 0 to 1 and three deviations from 0.001 to "
      "1, as in 0.49,0.48,0.45:0.23,0.22,0.23");
}

std::string to_string(const Normalisation& normalisation) {
  const auto text_of = [](const std::array<double, 3>& channels) {
    std::string text;
    for (const double x : channels) text += (text.empty() ? "" : ",") + number_text(x, "%.4g");
    return text;
  };
  return text_of(normalisation.mean) + ":" + text_of(normalisation.deviation);
}

EvalOptions at_size(EvalOptions options, const Size& size) {
  if (is_small(size) && !is_small(options.size) && options.crop == EvalCrop::kCentre) options.crop_pct = 1;
  options.size = size;
  return options;
}

TrainOptions deit_augmentation(const Size& size, const Normalisation& normalisation) {
  TrainOptions options;
  options.size = size;
  if (is_small(size)) options.crop = TrainCrop::kPadded;
  options.rand_augment = "rand-m9-mstd0.5-inc1";
  options.erase = 0.25;
  options.normalisation = normalisation;
  return options;
}

Transform::Transform(const Size& size, const Normalisation& normalisation)
    : size_(size), normalisation_(normalisation) {
  check_size(size);
  for (const double deviation : normalisation.deviation) {
    if (!(deviation > 0)) throw Error("a standard deviation of the image statistics is not positive");
  }
}

void Transform::apply(const Image& image, Random& random, float* out) const {
  normalise(pixels(image, random), normalisation_, out);
  finish(random, out);
}

EvalTransform::EvalTransform(const EvalOptions& options)
    : Transform(options.size, options.normalisation), options_(options) {
  check_crop(options.crop_pct);
}

Image EvalTransform::pixels(const Image& image, Random& /*random*/) const {
  return eval_pixels(image, options_);
}

TrainTransform::TrainTransform(const TrainOptions& options)
    : Transform(options.size, options.normalisation), options_(options) {
  check_crop(options.crop_pct);
  check_share(options.flip, "the probability of a flip");
  check_share(options.erase, "the probability of erasing");
  if (!(options.scale[0] > 0 && options.scale[0] <= options.scale[1] && options.scale[1] <= 1)) {
    throw Error("the scale of random crops must be two shares of the area, the smaller one first");
  }
  if (!(options.ratio[0] > 0 && options.ratio[0] <= options.ratio[1])) {
    throw Error("the ratio of random crops must be two positive numbers, the smaller one first");
  }
  if (!(options.colour_jitter >= 0)) throw Error("colour jitter must not be negative");
  if (options.crop == TrainCrop::kPadded && (options.padding < 0 || options.padding > options.size.shorter())) {
    throw Error("padding of " + std::to_string(options.padding) + " pixels: images of " + to_string(options.size) +
                " take 0 to " + std::to_string(options.size.shorter()) + "; choose another crop");
  }
  if (options.erase_count < 1) throw Error("the number of erased boxes must be at least 1");
  if (!options.rand_augment.empty()) {
    RandAugmentOptions parsed = parse_rand_augment(options.rand_augment);
    parsed.interpolation =
        options.interpolation == Interpolation::kLanczos ? Interpolation::kBicubic : options.interpolation;
    for (std::size_t c = 0; c < 3; ++c) {
      parsed.fill[c] = static_cast<std::uint8_t>(
          std::clamp(rounded(255 * options.normalisation.mean[c]), std::int64_t{0}, std::int64_t{255}));
    }
    rand_augment_ = parsed;
  }
}

Image TrainTransform::pixels(const Image& image, Random& random) const {
  const auto [height, width] = options_.size;
  Image result;
  if (options_.crop == TrainCrop::kRandomResized) {
    const Box box = random_resized_crop(image.width, image.height, options_.scale, options_.ratio, random);
    result = resize(image, box, width, height, options_.interpolation);
  } else if (options_.crop == TrainCrop::kPadded) {
    const std::int64_t x = random.below(2 * options_.padding + 1) - options_.padding;
    const std::int64_t y = random.below(2 * options_.padding + 1) - options_.padding;
    const bool fits = image.width == width && image.height == height;
    result = crop(fits ? image : resize(image, width, height, options_.interpolation), {x, y, width, height});
  } else {
    result = eval_pixels(image, eval_part(options_));
  }
  if (random.chance(options_.flip)) flip_horizontally(result);
  if (rand_augment_) rand_augment(result, *rand_augment_, random);
  if (options_.colour_jitter > 0) colour_jitter(result, options_.colour_jitter, random);
  return result;
}

void TrainTransform::finish(Random& random, float* out) const {
  if (options_.erase > 0) {
    random_erase(out, options_.size.height, options_.size.width, options_.erase, options_.erase_mode,
                 options_.erase_count, random);
  }
}

Box random_resized_crop(std::int64_t width, std::int64_t height, const std::array<double, 2>& scale,
                        const std::array<double, 2>& ratio, Random& random) {
  const double area = static_cast<double>(width) * static_cast<double>(height);
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double target = random.uniform(scale[0], scale[1]) * area;
    const double aspect = std::exp(random.uniform(std::log(ratio[0]), std::log(ratio[1])));
    // An image of a few pixels may round to none.
    const std::int64_t w = std::max<std::int64_t>(rounded(std::sqrt(target * aspect)), 1);
    const std::int64_t h = std::max<std::int64_t>(rounded(std::sqrt(target / aspect)), 1);
    if (w > width || h > height) continue;
    const std::int64_t y = random.below(height - h + 1);
    const std::int64_t x = random.below(width - w + 1);
    return {x, y, w, h};
  }
  const double whole = static_cast<double>(width) / static_cast<double>(height);
  std::int64_t w = width;
  std::int64_t h = height;
  if (whole < ratio[0]) {
    h = std::clamp<std::int64_t>(rounded(static_cast<double>(width) / ratio[0]), 1, height);
  } else if (whole > ratio[1]) {
    w = std::clamp<std::int64_t>(rounded(static_cast<double>(height) * ratio[1]), 1, width);
  }
  return {(width - w) / 2, (height - h) / 2, w, h};
}

Image eval_pixels(const Image& image, const EvalOptions& options) {
  const Size size = options.size;
  const auto enlarged = [&](std::int64_t side) {
    return static_cast<std::int64_t>(static_cast<double>(side) / options.crop_pct);
  };
  Size scaled = {enlarged(size.height), enlarged(size.width)};
  if (options.crop == EvalCrop::kCentre) scaled = scaled_to_cover({image.height, image.width}, scaled);
  const Box view = {rounded(static_cast<double>(scaled.width - size.width) / 2),
                    rounded(static_cast<double>(scaled.height - size.height) / 2), size.width, size.height};
  return resize_part(image, scaled.width, scaled.height, view, options.interpolation);
}

void normalise(const Image& image, const Normalisation& normalisation, float* out) {
  float shift[3];
  float scale[3];
  for (std::size_t c = 0; c < 3; ++c) {
    shift[c] = static_cast<float>(255 * normalisation.mean[c]);
    scale[c] = static_cast<float>(1 / (255 * normalisation.deviation[c]));
  }
  chosen_loops().normalise(image.pixels.data(), image.width * image.height, shift, scale, out);
}

void random_erase(float* values, std::int64_t height, std::int64_t width, double probability, EraseMode mode,
                  int max_count, Random& random) {
  if (!random.chance(probability)) return;
  constexpr double kSmallest = 0.02;
  constexpr double kLargest = 1.0 / 3.0;
  const double log_aspect = std::log(1 / 0.3);
  const auto count = max_count > 1 ? static_cast<int>(1 + random.below(max_count)) : 1;
  const double area = static_cast<double>(height) * static_cast<double>(width);
  for (int box = 0; box < count; ++box) {
    for (int attempt = 0; attempt < 10; ++attempt) {
      const double target = random.uniform(kSmallest, kLargest) * area / count;
      const double aspect = std::exp(random.uniform(-log_aspect, log_aspect));
      const std::int64_t h = rounded(std::sqrt(target * aspect));
      const std::int64_t w = rounded(std::sqrt(target / aspect));
      if (w >= width || h >= height) continue;
      const std::int64_t top = random.below(height - h + 1);
      const std::int64_t left = random.below(width - w + 1);
      for (std::int64_t c = 0; c < 3; ++c) {
        const float colour = mode == EraseMode::kColour ? static_cast<float>(random.normal()) : 0.0f;
        for (std::int64_t y = top; y < top + h; ++y) {
          float* row = values + (c * height + y) * width + left;
          if (mode == EraseMode::kPixel) {
            for (std::int64_t x = 0; x < w; ++x) row[x] = static_cast<float>(random.normal());
          } else {
            std::fill_n(row, w, colour);
          }
        }
      }
      break;
    }
  }
}

}  // namespace violin::data
