// From a decoded image to the numbers a network reads: cropping, resizing, augmentation, normalisation, erasing, as
// timm and DeiT define them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "violin/data/augment.h"
#include "violin/data/image.h"
#include "violin/data/random.h"
#include "violin/data/resize.h"
#include "violin/size.h"

namespace violin::data {

// (value/255 - mean) / deviation, per channel
struct Normalisation {
  std::array<double, 3> mean = {0.485, 0.456, 0.406};
  std::array<double, 3> deviation = {0.229, 0.224, 0.225};
  friend bool operator==(const Normalisation&, const Normalisation&) = default;
};
inline constexpr Normalisation kImageNetStatistics = {};
inline constexpr Normalisation kInceptionStatistics = {{0.5, 0.5, 0.5}, {0.5, 0.5, 0.5}};
inline constexpr Normalisation kCifar10Statistics = {{0.4914, 0.4822, 0.4465}, {0.2470, 0.2435, 0.2616}};
inline constexpr Normalisation kCifar100Statistics = {{0.5071, 0.4865, 0.4409}, {0.2673, 0.2564, 0.2762}};
// "imagenet", "inception", "cifar10", "cifar100", or means and deviations as "0.49,0.48,0.45:0.23,0.22,0.23"; throws
// violin::Error for anything else.
Normalisation parse_statistics(std::string_view text);
std::string to_string(const Normalisation& normalisation);  // as that reads it, with four digits

// What evaluation does to an image; travels with the weights.
enum class EvalCrop {
  kCentre,  // scaled to cover int(size / crop_pct), sides in proportion, then the centre
  kSquash,  // both sides to int(size / crop_pct), then the centre; with crop_pct 1 the plain resize of VTAB
};
struct EvalOptions {
  Size size = Size::square(224);
  double crop_pct = 0.875;  // 1 for small images: an image of `size` is taken as it is
  EvalCrop crop = EvalCrop::kCentre;
  Interpolation interpolation = Interpolation::kBicubic;
  Normalisation normalisation;
};

// The same at another size, which is taken as it is where it is small (is_small below) and the one before was not.
EvalOptions at_size(EvalOptions options, const Size& size);

enum class TrainCrop {
  kRandomResized,  // a random part of the image, scaled
  kPadded,         // small images: `padding` black pixels around, then a random window of `size`
  kCentre,         // as evaluation does
  kSquash,         // plain resize
};
enum class EraseMode { kConstant, kColour, kPixel };  // zero, one normal colour per box, normal noise

struct TrainOptions {
  Size size = Size::square(224);
  TrainCrop crop = TrainCrop::kRandomResized;
  std::array<double, 2> scale = {0.08, 1.0};             // share of the area, kRandomResized
  std::array<double, 2> ratio = {3.0 / 4.0, 4.0 / 3.0};  // width over height of that part, whatever shape `size` has
  std::int64_t padding = 4;                              // kPadded
  double crop_pct = 1;                                   // kCentre and kSquash
  double flip = 0.5;
  std::string rand_augment;  // timm's description, "rand-m9-mstd0.5-inc1"; empty: none
  double colour_jitter =
      0;             // timm leaves it out where RandAugment is on; here both are applied when both are asked for
  double erase = 0;  // probability
  EraseMode erase_mode = EraseMode::kPixel;
  int erase_count = 1;  // boxes per image, at most
  Interpolation interpolation = Interpolation::kBicubic;
  Normalisation normalisation;
};

constexpr std::int64_t kSmallImage = 32;     // pixels up to which images are shifted, not cropped and scaled
constexpr std::int64_t kLargestSize = 4096;  // pixels of a side
inline bool is_small(const Size& size) {     // neither side is longer
  return size.longer() <= kSmallImage;
}
// The augmentation of DeiT: random resized crop (padded crop of small images), flip, RandAugment m9-mstd0.5-inc1,
// erasing 0.25.
TrainOptions deit_augmentation(const Size& size, const Normalisation& normalisation = kImageNetStatistics);

class Transform {
 public:
  virtual ~Transform() = default;
  const Size& size() const { return size_; }

  // out [3, height, width] of size()
  void apply(const Image& image, Random& random, float* out) const;
  // The 8-bit image that apply() normalises: for pictures and for tests.
  virtual Image pixels(const Image& image, Random& random) const = 0;

 protected:
  Transform(const Size& size, const Normalisation& normalisation);
  // After normalisation.
  virtual void finish(Random&, float*) const {}

 private:
  Size size_;
  Normalisation normalisation_;
};

class EvalTransform : public Transform {
 public:
  explicit EvalTransform(const EvalOptions& options);
  Image pixels(const Image& image, Random& random) const override;

 private:
  EvalOptions options_;
};

class TrainTransform : public Transform {
 public:
  explicit TrainTransform(const TrainOptions& options);
  Image pixels(const Image& image, Random& random) const override;

 private:
  void finish(Random& random, float* out) const override;

  TrainOptions options_;
  std::optional<RandAugmentOptions> rand_augment_;
};

// The steps, for use on their own.

// Ten tries for a part with a random area and aspect ratio, else the largest centred part whose ratio is allowed.
Box random_resized_crop(std::int64_t width, std::int64_t height, const std::array<double, 2>& scale,
                        const std::array<double, 2>& ratio, Random& random);

// Resize and centre crop in one step; smaller images are padded with black, as torchvision does.
Image eval_pixels(const Image& image, const EvalOptions& options);

// image [height, width, 3] to out [3, height, width]
void normalise(const Image& image, const Normalisation& normalisation, float* out);

// values [3, height, width], already normalised
void random_erase(float* values, std::int64_t height, std::int64_t width, double probability, EraseMode mode,
                  int max_count, Random& random);

}  // namespace violin::data
