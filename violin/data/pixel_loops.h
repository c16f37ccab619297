// The inner loops over pixels, once in plain C++ and once with AVX2; both give the same bits. chosen() takes the
// fastest that this processor has, and tests call each.
#pragma once

#include <cstdint>

namespace violin::data {

// Weights of one resampled axis: output i is the sum of `count[i]` inputs from `first[i]` on, times weights in units of
// 2^-22.
struct AxisWeights {
  const std::int32_t* first;
  const std::int32_t* count;
  const std::int32_t* weights;  // [outputs, stride]
  std::int64_t stride;
};
inline constexpr int kWeightBits = 22;

struct PixelLoops {
  const char* name;

  // `rows` rows of in [.., 3] to out [outputs, 3], output columns 0 … outputs-1 of `axis`. in_pixels is the length of
  // an input row; rows of `out` have room for one byte more than outputs * 3.
  void (*horizontal)(const std::uint8_t* in, std::int64_t in_stride, std::int64_t in_pixels, std::int64_t rows,
                     const AxisWeights& axis, std::int64_t outputs, std::uint8_t* out, std::int64_t out_stride);

  // One output row of `bytes` bytes: the sum of `count` input rows times their weights.
  void (*vertical)(const std::uint8_t* in, std::int64_t in_stride, std::int64_t bytes, const std::int32_t* weights,
                   std::int64_t count, std::uint8_t* out);

  // pixels [count, 3] to three planes: (value - shift[c]) * scale[c].
  void (*normalise)(const std::uint8_t* pixels, std::int64_t count, const float* shift, const float* scale, float* out);
};

const PixelLoops& plain_loops();
const PixelLoops* avx2_loops();  // null where the processor or the build has none
const PixelLoops& chosen_loops();

}  // namespace violin::data
