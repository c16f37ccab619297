#include "violin/data/pixel_loops.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace violin::data {
namespace {

constexpr std::int32_t kHalf = 1 << (kWeightBits - 1);

std::uint8_t rounded(std::int32_t sum) {
  return static_cast<std::uint8_t>(std::clamp(sum >> kWeightBits, 0, 255));
}

void horizontal_plain(const std::uint8_t* in, std::int64_t in_stride, std::int64_t /*in_pixels*/, std::int64_t rows,
                      const AxisWeights& axis, std::int64_t outputs, std::uint8_t* out, std::int64_t out_stride) {
  for (std::int64_t y = 0; y < rows; ++y) {
    for (std::int64_t x = 0; x < outputs; ++x) {
      const std::uint8_t* pixel = in + y * in_stride + axis.first[x] * 3;
      const std::int32_t* weight = axis.weights + x * axis.stride;
      std::int32_t sum[3] = {kHalf, kHalf, kHalf};
      for (std::int32_t i = 0; i < axis.count[x]; ++i, pixel += 3) {
        for (int c = 0; c < 3; ++c) sum[c] += pixel[c] * weight[i];
      }
      for (int c = 0; c < 3; ++c) out[y * out_stride + x * 3 + c] = rounded(sum[c]);
    }
  }
}

void vertical_plain(const std::uint8_t* in, std::int64_t in_stride, std::int64_t bytes, const std::int32_t* weights,
                    std::int64_t count, std::uint8_t* out) {
  for (std::int64_t x = 0; x < bytes; ++x) {
    std::int32_t sum = kHalf;
    for (std::int64_t i = 0; i < count; ++i) sum += in[i * in_stride + x] * weights[i];
    out[x] = rounded(sum);
  }
}

void normalise_plain(const std::uint8_t* pixels, std::int64_t count, const float* shift, const float* scale,
                     float* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    for (int c = 0; c < 3; ++c) out[c * count + i] = (static_cast<float>(pixels[i * 3 + c]) - shift[c]) * scale[c];
  }
}

#if defined(__x86_64__)
#define VIOLIN_AVX2 __attribute__((target("avx2")))

VIOLIN_AVX2 inline __m256i eight(const std::uint8_t* bytes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}

// Rounds, clips and packs 16 sums.
VIOLIN_AVX2 inline __m128i sixteen_bytes(__m256i low, __m256i high) {
  low = _mm256_srai_epi32(low, kWeightBits);
  high = _mm256_srai_epi32(high, kWeightBits);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// Four rows at once. They are interleaved first, 16 bytes per column (4 rows of red, green, blue and one byte that is
// not used), so that a weight meets a whole register.
VIOLIN_AVX2 void horizontal_avx2(const std::uint8_t* in, std::int64_t in_stride, std::int64_t in_pixels,
                                 std::int64_t rows, const AxisWeights& axis, std::int64_t outputs, std::uint8_t* out,
                                 std::int64_t out_stride) {
  std::vector<std::uint8_t> columns(static_cast<std::size_t>(in_pixels) * 16);
  for (std::int64_t y = 0; y < rows; y += 4) {
    const std::int64_t group = std::min<std::int64_t>(4, rows - y);
    for (std::int64_t r = 0; r < group; ++r) {
      const std::uint8_t* row = in + (y + r) * in_stride;
      std::uint8_t* column = columns.data() + r * 4;
      for (std::int64_t x = 0; x + 1 < in_pixels; ++x) std::memcpy(column + x * 16, row + x * 3, 4);
      std::memcpy(column + (in_pixels - 1) * 16, row + (in_pixels - 1) * 3, 3);
    }
    for (std::int64_t x = 0; x < outputs; ++x) {
      const std::uint8_t* column = columns.data() + axis.first[x] * 16;
      const std::int32_t* weight = axis.weights + x * axis.stride;
      __m256i low = _mm256_set1_epi32(kHalf);
      __m256i high = low;
      for (std::int32_t i = 0; i < axis.count[x]; ++i, column += 16) {
        const __m256i w = _mm256_set1_epi32(weight[i]);
        low = _mm256_add_epi32(low, _mm256_mullo_epi32(eight(column), w));
        high = _mm256_add_epi32(high, _mm256_mullo_epi32(eight(column + 8), w));
      }
      alignas(16) std::uint8_t bytes[16];
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes), sixteen_bytes(low, high));
      // The fourth byte falls on the next pixel, which is written later, or on the room behind the row.
      for (std::int64_t r = 0; r < group; ++r) std::memcpy(out + (y + r) * out_stride + x * 3, bytes + r * 4, 4);
    }
  }
}

VIOLIN_AVX2 void vertical_avx2(const std::uint8_t* in, std::int64_t in_stride, std::int64_t bytes,
                               const std::int32_t* weights, std::int64_t count, std::uint8_t* out) {
  std::int64_t x = 0;
  for (; x + 32 <= bytes; x += 32) {
    __m256i sum[4];
    for (__m256i& part : sum) part = _mm256_set1_epi32(kHalf);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint8_t* row = in + i * in_stride + x;
      const __m256i w = _mm256_set1_epi32(weights[i]);
      for (int k = 0; k < 4; ++k) sum[k] = _mm256_add_epi32(sum[k], _mm256_mullo_epi32(eight(row + k * 8), w));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + x), sixteen_bytes(sum[0], sum[1]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + x + 16), sixteen_bytes(sum[2], sum[3]));
  }
  vertical_plain(in + x, in_stride, bytes - x, weights, count, out + x);
}

VIOLIN_AVX2 void normalise_avx2(const std::uint8_t* pixels, std::int64_t count, const float* shift, const float* scale,
                                float* out) {
  // Bytes 0 … 15 and 8 … 23 of eight pixels; for each channel, where its eight bytes lie in the two.
  const auto pick = [](int c, bool second) {
    alignas(16) std::int8_t where[16];
    for (int i = 0; i < 16; ++i) {
      const int byte = i * 3 + c;
      const bool here = i < 8 && (byte < 16) != second;
      where[i] = static_cast<std::int8_t>(here ? byte - (second ? 8 : 0) : -1);
    }
    return _mm_load_si128(reinterpret_cast<const __m128i*>(where));
  };
  const __m128i from_first[3] = {pick(0, false), pick(1, false), pick(2, false)};
  const __m128i from_second[3] = {pick(0, true), pick(1, true), pick(2, true)};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pixels + i * 3));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pixels + i * 3 + 8));
    for (int c = 0; c < 3; ++c) {
      const __m128i channel =
          _mm_or_si128(_mm_shuffle_epi8(first, from_first[c]), _mm_shuffle_epi8(second, from_second[c]));
      const __m256 value = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(channel));
      _mm256_storeu_ps(out + c * count + i,
                       _mm256_mul_ps(_mm256_sub_ps(value, _mm256_set1_ps(shift[c])), _mm256_set1_ps(scale[c])));
    }
  }
  for (; i < count; ++i) {
    for (int c = 0; c < 3; ++c) out[c * count + i] = (static_cast<float>(pixels[i * 3 + c]) - shift[c]) * scale[c];
  }
}
#endif

}  // namespace

const PixelLoops& plain_loops() {
  static constexpr PixelLoops loops = {"plain", horizontal_plain, vertical_plain, normalise_plain};
  return loops;
}

const PixelLoops* avx2_loops() {
#if defined(__x86_64__)
  static constexpr PixelLoops loops = {"avx2", horizontal_avx2, vertical_avx2, normalise_avx2};
  static const bool available = __builtin_cpu_supports("avx2") != 0;
  return available ? &loops : nullptr;
#else
  return nullptr;
#endif
}

const PixelLoops& chosen_loops() {
  static const PixelLoops& loops = avx2_loops() != nullptr ? *avx2_loops() : plain_loops();
  return loops;
}

}  // namespace violin::data
