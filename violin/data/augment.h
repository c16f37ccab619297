// The operations of RandAugment and of colour jitter on 8-bit RGB, each with the result of its Pillow namesake, and
// RandAugment itself with timm's magnitudes.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "violin/data/image.h"
#include "violin/data/random.h"
#include "violin/data/resize.h"

namespace violin::data {

using Colour = std::array<std::uint8_t, 3>;

void flip_horizontally(Image& image);

void auto_contrast(Image& image);
void equalize(Image& image);
void invert(Image& image);
void posterize(Image& image, int bits);         // keeps the upper bits; 0 gives black, 8 and more change nothing
void solarize(Image& image, int threshold);     // inverts values from the threshold on
void solarize_add(Image& image, int addition);  // adds to values below 128

// Factor 1 changes nothing, 0 gives the degenerate image, beyond 1 extrapolates.
void brightness(Image& image, double factor);
void contrast(Image& image, double factor);
void saturation(Image& image, double factor);
void sharpness(Image& image, double factor);

// Output pixel (x, y) shows input at (m0 x + m1 y + m2, m3 x + m4 y + m5), measured from the corner of the image;
// outside the input it is `fill`. kLanczos is not offered for it.
using Affine = std::array<double, 6>;
Image affine(const Image& image, const Affine& matrix, Interpolation interpolation, const Colour& fill);
Image rotate(const Image& image, double degrees, Interpolation interpolation, const Colour& fill);

// timm's description, "rand-m9-mstd0.5-inc1": magnitude 9 of 10 with deviation 0.5, operations that grow with it.
struct RandAugmentOptions {
  double magnitude = 10;
  double deviation = 0;  // infinite: the magnitude is uniform in 0 … magnitude
  double maximum = 10;
  int operations = 2;  // per image
  double probability = 0.5;
  bool increasing = false;
  Interpolation interpolation = Interpolation::kBicubic;
  Colour fill = {128, 128, 128};
  double translate = 0.45;  // share of the side at magnitude 10
};

// Throws violin::Error for a description that is not timm's, naming the part.
RandAugmentOptions parse_rand_augment(std::string_view description);

// One of the fifteen, by its number in timm's list, at a magnitude; a sign is drawn where timm draws one.
inline constexpr int kRandAugmentOperations = 15;
std::string_view rand_augment_operation_name(int operation, bool increasing);
void rand_augment_operation(Image& image, int operation, double magnitude, const RandAugmentOptions& options,
                            Random& random);

void rand_augment(Image& image, const RandAugmentOptions& options, Random& random);

// Brightness, contrast and saturation, each by a factor in [1-strength, 1+strength], in random order.
void colour_jitter(Image& image, double strength, Random& random);

}  // namespace violin::data
