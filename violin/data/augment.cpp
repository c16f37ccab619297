#include "violin/data/augment.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "violin/error.h"
#include "violin/text.h"

namespace violin::data {
namespace {

using Table = std::array<std::uint8_t, 256>;

template <typename Value>
Table table_of(const Value& value) {
  Table table;
  for (int i = 0; i < 256; ++i) table[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(value(i));
  return table;
}

void look_up(Image& image, const Table& table) {
  for (std::uint8_t& value : image.pixels) value = table[value];
}

void look_up(Image& image, const std::array<Table, 3>& tables) {
  for (std::size_t i = 0; i < image.pixels.size(); i += 3) {
    for (std::size_t c = 0; c < 3; ++c) image.pixels[i + c] = tables[c][image.pixels[i + c]];
  }
}

using Histogram = std::array<std::int64_t, 256>;

std::array<Histogram, 3> histograms(const Image& image) {
  std::array<Histogram, 3> result = {};
  for (std::size_t i = 0; i < image.pixels.size(); i += 3) {
    for (std::size_t c = 0; c < 3; ++c) ++result[c][image.pixels[i + c]];
  }
  return result;
}

Table identity_table() {
  return table_of([](int i) { return i; });
}

// Pillow's blend: single precision, and the fraction is cut off.
std::uint8_t blended(int degenerate, int value, float factor) {
  const float mixed = static_cast<float>(degenerate) + factor * static_cast<float>(value - degenerate);
  return static_cast<std::uint8_t>(std::clamp(static_cast<int>(mixed), 0, 255));  // a vector instruction, unlike floats
}

// ITU-R 601 luma in 16-bit fixed point.
int luma(const std::uint8_t* pixel) {
  return (pixel[0] * 19595 + pixel[1] * 38470 + pixel[2] * 7471 + 0x8000) >> 16;
}

double number(std::string_view text, std::string_view description) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  // Far beyond what any operation tells apart, and products with it still fit into an int.
  constexpr double kLargest = 1000000;
  if (error != std::errc() || end != text.data() + text.size() || !(value >= 0 && value <= kLargest)) {
    throw Error("RandAugment " + in_quotes(description) + ": " + in_quotes(text) +
                " is not a number from 0 to a million");
  }
  return value;
}

double with_random_sign(double value, Random& random) {
  return random.uniform() > 0.5 ? -value : value;
}

}  // namespace

void flip_horizontally(Image& image) {
  for (std::int64_t y = 0; y < image.height; ++y) {
    std::uint8_t* left = image.at(0, y);
    std::uint8_t* right = image.at(image.width - 1, y);
    for (; left < right; left += 3, right -= 3) std::swap_ranges(left, left + 3, right);
  }
}

void auto_contrast(Image& image) {
  std::array<Table, 3> tables;
  const auto counts = histograms(image);
  for (std::size_t c = 0; c < 3; ++c) {
    int low = 0;
    int high = 255;
    while (low < 255 && counts[c][static_cast<std::size_t>(low)] == 0) ++low;
    while (high > 0 && counts[c][static_cast<std::size_t>(high)] == 0) --high;
    if (high <= low) {
      tables[c] = identity_table();
      continue;
    }
    const double scale = 255.0 / (high - low);
    const double offset = -low * scale;
    tables[c] = table_of([&](int i) { return std::clamp(static_cast<int>(i * scale + offset), 0, 255); });
  }
  look_up(image, tables);
}

void equalize(Image& image) {
  std::array<Table, 3> tables;
  const auto counts = histograms(image);
  for (std::size_t c = 0; c < 3; ++c) {
    const auto used = std::count_if(counts[c].begin(), counts[c].end(), [](std::int64_t n) { return n > 0; });
    const auto last = std::find_if(counts[c].rbegin(), counts[c].rend(), [](std::int64_t n) { return n > 0; });
    const std::int64_t total = std::accumulate(counts[c].begin(), counts[c].end(), std::int64_t{0});
    const std::int64_t step = used <= 1 ? 0 : (total - *last) / 255;
    if (step == 0) {
      tables[c] = identity_table();
      continue;
    }
    std::int64_t below = step / 2;
    tables[c] = table_of([&](int i) {
      const std::int64_t value = std::min<std::int64_t>(below / step, 255);
      below += counts[c][static_cast<std::size_t>(i)];
      return value;
    });
  }
  look_up(image, tables);
}

void invert(Image& image) {
  for (std::uint8_t& value : image.pixels) value = static_cast<std::uint8_t>(255 - value);
}

void posterize(Image& image, int bits) {
  if (bits >= 8) return;
  const auto mask = static_cast<std::uint8_t>(0xff00 >> std::max(bits, 0));
  for (std::uint8_t& value : image.pixels) value &= mask;
}

void solarize(Image& image, int threshold) {
  look_up(image, table_of([&](int i) { return i < threshold ? i : 255 - i; }));
}

void solarize_add(Image& image, int addition) {
  look_up(image, table_of([&](int i) { return i < 128 ? std::min(255, i + addition) : i; }));
}

void brightness(Image& image, double factor) {
  look_up(image, table_of([&](int i) { return blended(0, i, static_cast<float>(factor)); }));
}

void contrast(Image& image, double factor) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < image.pixels.size(); i += 3) sum += luma(&image.pixels[i]);
  const double count = static_cast<double>(image.width * image.height);
  const int mean = static_cast<int>(std::floor(static_cast<double>(sum) / count + 0.5));
  look_up(image, table_of([&](int i) { return blended(mean, i, static_cast<float>(factor)); }));
}

void saturation(Image& image, double factor) {
  const auto alpha = static_cast<float>(factor);
  for (std::size_t i = 0; i < image.pixels.size(); i += 3) {
    std::uint8_t* pixel = &image.pixels[i];
    const int grey = luma(pixel);
    for (int c = 0; c < 3; ++c) pixel[c] = blended(grey, pixel[c], alpha);
  }
}

// Against the image smoothed by 1 1 1 / 1 5 1 / 1 1 1; the outermost pixels are not smoothed.
void sharpness(Image& image, double factor) {
  const auto alpha = static_cast<float>(factor);
  const std::int64_t bytes = image.width * 3;
  if (image.width < 3 || image.height < 3) return;
  // Rows as they were, while the image changes below them.
  std::vector<std::uint8_t> above(image.at(0, 0), image.at(0, 0) + bytes);
  std::vector<std::uint8_t> here(static_cast<std::size_t>(bytes));
  std::vector<std::int32_t> columns(static_cast<std::size_t>(bytes));
  for (std::int64_t y = 1; y + 1 < image.height; ++y) {
    std::uint8_t* out = image.at(0, y);
    const std::uint8_t* below = image.at(0, y + 1);
    std::copy_n(out, bytes, here.data());
    for (std::int64_t x = 0; x < bytes; ++x) {
      const auto i = static_cast<std::size_t>(x);
      columns[i] = above[i] + here[i] + below[x];
    }
    for (std::int64_t x = 3; x < bytes - 3; ++x) {
      const auto i = static_cast<std::size_t>(x);
      const int sum = columns[i - 3] + columns[i] + columns[i + 3] + 4 * here[i];
      out[x] = blended((2 * sum + 13) / 26, here[i], alpha);
    }
    std::swap(above, here);
  }
}

RandAugmentOptions parse_rand_augment(std::string_view description) {
  RandAugmentOptions options;
  std::string_view rest = description;
  const auto next_part = [&] {
    const std::string_view part = rest.substr(0, rest.find('-'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    return part;
  };
  if (next_part() != "rand") {
    throw Error("RandAugment " + in_quotes(description) + " must begin with rand, as in rand-m9-mstd0.5-inc1");
  }
  while (!rest.empty()) {
    const std::string_view part = next_part();
    const std::string_view key = part.substr(0, part.find_first_of("0123456789."));
    const double value = number(part.substr(key.size()), description);
    if (key == "m") {
      options.magnitude = value;
    } else if (key == "mstd") {
      options.deviation = value > 100 ? std::numeric_limits<double>::infinity() : value;
    } else if (key == "mmax") {
      options.maximum = value;
    } else if (key == "n") {
      options.operations = static_cast<int>(std::min(value, 100.0));
    } else if (key == "p") {
      options.probability = value;
    } else if (key == "inc") {
      options.increasing = value != 0;
    } else {
      throw Error("RandAugment " + in_quotes(description) + ": unknown part " + in_quotes(part) +
                  "; known are m, mstd, mmax, n, p and inc, each with a number");
    }
  }
  return options;
}

namespace {

enum Operation {
  kAutoContrast,
  kEqualize,
  kInvert,
  kRotate,
  kPosterize,
  kSolarize,
  kSolarizeAdd,
  kColor,
  kContrast,
  kBrightness,
  kSharpness,
  kShearX,
  kShearY,
  kTranslateX,
  kTranslateY,
};

constexpr std::array<std::string_view, kRandAugmentOperations> kPlainNames = {
    "AutoContrast", "Equalize",   "Invert",    "Rotate", "Posterize", "Solarize",      "SolarizeAdd",  "Color",
    "Contrast",     "Brightness", "Sharpness", "ShearX", "ShearY",    "TranslateXRel", "TranslateYRel"};
constexpr std::array<std::string_view, kRandAugmentOperations> kIncreasingNames = {"AutoContrast",
                                                                                   "Equalize",
                                                                                   "Invert",
                                                                                   "Rotate",
                                                                                   "PosterizeIncreasing",
                                                                                   "SolarizeIncreasing",
                                                                                   "SolarizeAdd",
                                                                                   "ColorIncreasing",
                                                                                   "ContrastIncreasing",
                                                                                   "BrightnessIncreasing",
                                                                                   "SharpnessIncreasing",
                                                                                   "ShearX",
                                                                                   "ShearY",
                                                                                   "TranslateXRel",
                                                                                   "TranslateYRel"};

}  // namespace

std::string_view rand_augment_operation_name(int operation, bool increasing) {
  return (increasing ? kIncreasingNames : kPlainNames).at(static_cast<std::size_t>(operation));
}

void rand_augment_operation(Image& image, int operation, double magnitude, const RandAugmentOptions& options,
                            Random& random) {
  const double level = magnitude / 10;
  // Away from 1 in either direction, or from 0.1 to 1.9.
  const auto enhancement = [&] {
    return options.increasing ? std::max(0.1, 1 + with_random_sign(level * 0.9, random)) : level * 1.8 + 0.1;
  };
  const auto moved = [&](const Affine& matrix) { image = affine(image, matrix, options.interpolation, options.fill); };
  switch (operation) {
    case kAutoContrast:
      return auto_contrast(image);
    case kEqualize:
      return equalize(image);
    case kInvert:
      return invert(image);
    case kRotate:
      image = rotate(image, with_random_sign(level * 30, random), options.interpolation, options.fill);
      return;
    case kPosterize: {
      const int bits = static_cast<int>(level * 4);
      return posterize(image, options.increasing ? 4 - bits : bits);
    }
    case kSolarize: {
      const int threshold = std::min(256, static_cast<int>(level * 256));
      return solarize(image, options.increasing ? 256 - threshold : threshold);
    }
    case kSolarizeAdd:
      return solarize_add(image, std::min(128, static_cast<int>(level * 110)));
    case kColor:
      return saturation(image, enhancement());
    case kContrast:
      return contrast(image, enhancement());
    case kBrightness:
      return brightness(image, enhancement());
    case kSharpness:
      return sharpness(image, enhancement());
    case kShearX:
      return moved({1, with_random_sign(level * 0.3, random), 0, 0, 1, 0});
    case kShearY:
      return moved({1, 0, 0, with_random_sign(level * 0.3, random), 1, 0});
    case kTranslateX: {
      const double share = with_random_sign(level * options.translate, random);
      return moved({1, 0, share * static_cast<double>(image.width), 0, 1, 0});
    }
    case kTranslateY: {
      const double share = with_random_sign(level * options.translate, random);
      return moved({1, 0, 0, 0, 1, share * static_cast<double>(image.height)});
    }
    default:
      throw Error("RandAugment has no operation " + std::to_string(operation));
  }
}

void rand_augment(Image& image, const RandAugmentOptions& options, Random& random) {
  for (int i = 0; i < options.operations; ++i) {
    const auto operation = static_cast<int>(random.below(kRandAugmentOperations));
    if (!random.chance(options.probability)) continue;
    double magnitude = options.magnitude;
    if (std::isinf(options.deviation)) {
      magnitude = random.uniform(0, magnitude);
    } else if (options.deviation > 0) {
      magnitude += options.deviation * random.normal();
    }
    rand_augment_operation(image, operation, std::clamp(magnitude, 0.0, options.maximum), options, random);
  }
}

void colour_jitter(Image& image, double strength, Random& random) {
  using Step = void (*)(Image&, double);
  std::array<Step, 3> steps = {brightness, contrast, saturation};
  for (std::int64_t i = 2; i > 0; --i) {
    std::swap(steps[static_cast<std::size_t>(i)], steps[static_cast<std::size_t>(random.below(i + 1))]);
  }
  for (const Step step : steps) step(image, random.uniform(std::max(0.0, 1 - strength), 1 + strength));
}

}  // namespace violin::data
