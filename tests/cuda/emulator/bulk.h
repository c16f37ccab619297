// Tensor maps of the emulated device: what cuTensorMapEncodeTiled is given, in the bytes of a CUtensorMap.
#pragma once

#include <cstdint>

namespace violin::emulator {

struct TensorMap {
  std::uint64_t mark;  // tells a map from other bytes
  std::uint64_t data;
  std::uint64_t sizes[4];    // from the innermost on
  std::uint64_t strides[3];  // bytes, from the second on
  std::uint32_t box[4];
  std::uint32_t element;  // bytes
  std::uint32_t swizzle;  // bytes: 0 or 128
};
static_assert(sizeof(TensorMap) <= 128);
constexpr std::uint64_t kMapMark = 0x70616d726f736e74ull;

}  // namespace violin::emulator
