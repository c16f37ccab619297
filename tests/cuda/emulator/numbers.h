// Numbers of 16 bits on the host.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace violin::emulator {

inline float from_bfloat16(std::uint16_t x) {
  return std::bit_cast<float>(std::uint32_t{x} << 16);
}
inline std::uint16_t to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_float16(std::uint16_t x) {
  const int exponent = x >> 10 & 31;
  const int mantissa = x & 1023;
  float value;
  if (exponent == 31) {
    value = mantissa ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    value = std::bit_cast<float>(static_cast<std::uint32_t>((exponent + 112) << 23 | mantissa << 13));
  }
  return x & 0x8000 ? -value : value;
}
// To nearest, ties to even.
inline std::uint16_t to_float16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  if (std::isnan(x)) return 0x7fff;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 0x1p-14f)
    return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::nearbyint(size * 0x1p24f)));
  const std::uint32_t normal = (bits & 0x7fffffff) - (112u << 23);
  return static_cast<std::uint16_t>(sign | (normal + 0xfff + (normal >> 13 & 1)) >> 13);
}

}  // namespace violin::emulator
