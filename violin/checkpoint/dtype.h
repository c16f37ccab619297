// Element types that tensor files hold, under their names in the two formats. No torch here: the parsers do without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace violin::checkpoint {

enum class DType : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF8E4M3,
  kF8E5M2,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kF8E8M0,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC32,
  kC64,
  kC128,
};

struct DTypeInfo {
  DType dtype;
  std::size_t size;              // bytes per element
  std::size_t alignment;         // of an element in memory
  std::string_view safetensors;  // "F32"; empty where that format has no name for it
  std::string_view torch;        // "float32"
  std::string_view storage;      // torch's typed storage, "FloatStorage"; empty where torch has none
};

const DTypeInfo& info(DType dtype);

std::optional<DType> dtype_from_safetensors(std::string_view name);
std::optional<DType> dtype_from_torch(std::string_view name);
std::optional<DType> dtype_from_storage(std::string_view name);

}  // namespace violin::checkpoint
