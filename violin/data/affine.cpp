// Affine maps of images with Pillow's bilinear and bicubic interpolation, in double precision and cut off to 8 bits as
// there. Away from the border a row is made with one register per pixel (its channels side by side), with the same
// operations in the same order, so that both ways give the same bits.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "violin/data/augment.h"
#include "violin/data/pixel_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace violin::data {
namespace {

// Cubic convolution through four values; exact at d = 0, where it is the second.
double cubic(double v0, double v1, double v2, double v3, double d) {
  const double p1 = v2 - v0;
  const double p2 = 2 * (v0 - v1) + v2 - v3;
  const double p3 = v1 - v0 - v2 + v3;
  return v1 + d * (p1 + d * (p2 + d * p3));
}

std::uint8_t truncated(double value) {
  return static_cast<std::uint8_t>(std::clamp(value, 0.0, 255.0));
}

// Where an output pixel comes from: whole part and rest, measured from pixel centres.
struct Place {
  std::int64_t x, y;
  double dx, dy;

  Place(double u, double v) : x(floored(u - 0.5)), y(floored(v - 0.5)) {
    dx = u - 0.5 - static_cast<double>(x);
    dy = v - 0.5 - static_cast<double>(y);
  }

 private:
  // std::floor is a call where the compiler may not assume SSE 4.
  static std::int64_t floored(double value) {
    const auto cut = static_cast<std::int64_t>(value);
    return cut - (value < static_cast<double>(cut) ? 1 : 0);
  }
};

// Rows and columns beyond the border are those at the border.
struct Clamped {
  const Image& image;
  std::int64_t column(std::int64_t x) const { return std::clamp<std::int64_t>(x, 0, image.width - 1) * 3; }
  const std::uint8_t* row(std::int64_t y) const {
    return image.at(0, std::clamp<std::int64_t>(y, 0, image.height - 1));
  }
};

void bicubic_pixel(const Image& image, const Place& place, std::uint8_t* out) {
  const Clamped clamped = {image};
  std::int64_t columns[4];
  for (int i = 0; i < 4; ++i) columns[i] = clamped.column(place.x - 1 + i);
  const auto across = [&](const std::uint8_t* row, int c) {
    return cubic(row[columns[0] + c], row[columns[1] + c], row[columns[2] + c], row[columns[3] + c], place.dx);
  };
  if (place.dy == 0) {  // shear and translation along x: one row is enough
    for (int c = 0; c < 3; ++c) out[c] = truncated(across(clamped.row(place.y), c));
    return;
  }
  const std::uint8_t* rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = clamped.row(place.y - 1 + i);
  if (place.dx == 0) {  // and one column along y
    for (int c = 0; c < 3; ++c) {
      const std::int64_t at = columns[1] + c;
      out[c] = truncated(cubic(rows[0][at], rows[1][at], rows[2][at], rows[3][at], place.dy));
    }
    return;
  }
  for (int c = 0; c < 3; ++c) {
    out[c] = truncated(cubic(across(rows[0], c), across(rows[1], c), across(rows[2], c), across(rows[3], c), place.dy));
  }
}

void bilinear_pixel(const Image& image, const Place& place, std::uint8_t* out) {
  const Clamped clamped = {image};
  const std::uint8_t* rows[2] = {clamped.row(place.y), clamped.row(place.y + 1)};
  const std::int64_t left = clamped.column(place.x);
  const std::int64_t right = clamped.column(place.x + 1);
  for (int c = 0; c < 3; ++c) {
    const double upper = rows[0][left + c] + (rows[0][right + c] - rows[0][left + c]) * place.dx;
    const double lower = rows[1][left + c] + (rows[1][right + c] - rows[1][left + c]) * place.dx;
    out[c] = truncated(upper + (lower - upper) * place.dy);
  }
}

struct Source {
  double x, y;
};

Source source_of(const Affine& matrix, std::int64_t x, std::int64_t y) {
  const double u = static_cast<double>(x) + 0.5;
  const double v = static_cast<double>(y) + 0.5;
  return {matrix[0] * u + matrix[1] * v + matrix[2], matrix[3] * u + matrix[4] * v + matrix[5]};
}

bool outside(const Image& image, const Source& source) {
  return source.x < 0 || source.x >= static_cast<double>(image.width) || source.y < 0 ||
         source.y >= static_cast<double>(image.height);
}

void bicubic_row(const Image& image, const Affine& matrix, std::int64_t y, const Colour& fill, std::uint8_t* out) {
  for (std::int64_t x = 0; x < image.width; ++x, out += 3) {
    const Source source = source_of(matrix, x, y);
    if (outside(image, source)) {
      std::copy_n(fill.data(), 3, out);
    } else {
      bicubic_pixel(image, Place(source.x, source.y), out);
    }
  }
}

void bilinear_row(const Image& image, const Affine& matrix, std::int64_t y, const Colour& fill, std::uint8_t* out) {
  for (std::int64_t x = 0; x < image.width; ++x, out += 3) {
    const Source source = source_of(matrix, x, y);
    if (outside(image, source)) {
      std::copy_n(fill.data(), 3, out);
    } else {
      bilinear_pixel(image, Place(source.x, source.y), out);
    }
  }
}

#if defined(__x86_64__)
#define VIOLIN_AVX2 __attribute__((target("avx2")))

VIOLIN_AVX2 inline __m256d four(const std::uint8_t* pixel) {
  std::int32_t bytes = 0;
  std::memcpy(&bytes, pixel, 4);
  return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(bytes)));
}

VIOLIN_AVX2 inline __m256d cubic_avx2(__m256d v0, __m256d v1, __m256d v2, __m256d v3, __m256d d) {
  const __m256d back = _mm256_sub_pd(v0, v1);
  const __m256d p1 = _mm256_sub_pd(v2, v0);
  const __m256d p2 = _mm256_sub_pd(_mm256_add_pd(_mm256_add_pd(back, back), v2), v3);
  const __m256d p3 = _mm256_add_pd(_mm256_sub_pd(_mm256_sub_pd(v1, v0), v2), v3);
  const __m256d inner = _mm256_add_pd(p2, _mm256_mul_pd(d, p3));
  return _mm256_add_pd(v1, _mm256_mul_pd(d, _mm256_add_pd(p1, _mm256_mul_pd(d, inner))));
}

VIOLIN_AVX2 inline __m256d across_avx2(const std::uint8_t* pixel, __m256d d) {
  return cubic_avx2(four(pixel), four(pixel + 3), four(pixel + 6), four(pixel + 9), d);
}

VIOLIN_AVX2 void bicubic_row_avx2(const Image& image, const Affine& matrix, std::int64_t y, const Colour& fill,
                                  std::uint8_t* out) {
  const std::int64_t stride = image.width * 3;
  for (std::int64_t x = 0; x < image.width; ++x, out += 3) {
    const Source source = source_of(matrix, x, y);
    if (outside(image, source)) {
      std::copy_n(fill.data(), 3, out);
      continue;
    }
    const Place place(source.x, source.y);
    // Four bytes are read for each of the four pixels: the last one needs a pixel behind it.
    if (place.x < 1 || place.x + 3 >= image.width || place.y < 1 || place.y + 2 >= image.height) {
      bicubic_pixel(image, place, out);
      continue;
    }
    const std::uint8_t* corner = image.at(place.x - 1, place.y - 1);
    const __m256d dx = _mm256_set1_pd(place.dx);
    __m256d value;
    if (place.dx == 0) {
      const std::uint8_t* top = corner + 3;
      value = cubic_avx2(four(top), four(top + stride), four(top + 2 * stride), four(top + 3 * stride),
                         _mm256_set1_pd(place.dy));
    } else {
      value = across_avx2(corner + stride, dx);
    }
    if (place.dx != 0 && place.dy != 0) {
      value = cubic_avx2(across_avx2(corner, dx), value, across_avx2(corner + 2 * stride, dx),
                         across_avx2(corner + 3 * stride, dx), _mm256_set1_pd(place.dy));
    }
    const __m128i cut = _mm256_cvttpd_epi32(value);
    const __m128i words = _mm_packs_epi32(cut, cut);
    const int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    std::memcpy(out, &bytes, 3);
  }
}
#endif

}  // namespace

Image affine(const Image& image, const Affine& matrix, Interpolation interpolation, const Colour& fill) {
  auto* row = interpolation == Interpolation::kBilinear ? bilinear_row : bicubic_row;
#if defined(__x86_64__)
  if (row == bicubic_row && avx2_loops() != nullptr) row = bicubic_row_avx2;
#endif
  Image result(image.width, image.height);
  for (std::int64_t y = 0; y < image.height; ++y) row(image, matrix, y, fill, result.at(0, y));
  return result;
}

Image rotate(const Image& image, double degrees, Interpolation interpolation, const Colour& fill) {
  // In [0, 360), as Pillow reduces it: the same angle through the same rounding.
  double turn = std::fmod(degrees, 360.0);
  if (turn < 0) turn += 360;
  if (turn == 0) return image;
  const double angle = -turn * (std::numbers::pi / 180);
  const double cosine = std::nearbyint(std::cos(angle) * 1e15) / 1e15;
  const double sine = std::nearbyint(std::sin(angle) * 1e15) / 1e15;
  const double x = static_cast<double>(image.width) / 2;
  const double y = static_cast<double>(image.height) / 2;
  return affine(image, {cosine, sine, cosine * -x + sine * -y + x, -sine, cosine, -sine * -x + cosine * -y + y},
                interpolation, fill);
}

}  // namespace violin::data
