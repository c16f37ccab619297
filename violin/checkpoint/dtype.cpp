#include "violin/checkpoint/dtype.h"

namespace violin::checkpoint {
namespace {

// In the order of the enumeration.
constexpr DTypeInfo kTypes[] = {
    {DType::kBool, 1, 1, "BOOL", "bool", "BoolStorage"},
    {DType::kU8, 1, 1, "U8", "uint8", "ByteStorage"},
    {DType::kI8, 1, 1, "I8", "int8", "CharStorage"},
    {DType::kU16, 2, 2, "U16", "uint16", ""},
    {DType::kI16, 2, 2, "I16", "int16", "ShortStorage"},
    {DType::kU32, 4, 4, "U32", "uint32", ""},
    {DType::kI32, 4, 4, "I32", "int32", "IntStorage"},
    {DType::kU64, 8, 8, "U64", "uint64", ""},
    {DType::kI64, 8, 8, "I64", "int64", "LongStorage"},
    {DType::kF8E4M3, 1, 1, "F8_E4M3", "float8_e4m3fn", ""},
    {DType::kF8E5M2, 1, 1, "F8_E5M2", "float8_e5m2", ""},
    {DType::kF8E4M3Fnuz, 1, 1, "F8_E4M3FNUZ", "float8_e4m3fnuz", ""},
    {DType::kF8E5M2Fnuz, 1, 1, "F8_E5M2FNUZ", "float8_e5m2fnuz", ""},
    {DType::kF8E8M0, 1, 1, "F8_E8M0", "float8_e8m0fnu", ""},
    {DType::kF16, 2, 2, "F16", "float16", "HalfStorage"},
    {DType::kBF16, 2, 2, "BF16", "bfloat16", "BFloat16Storage"},
    {DType::kF32, 4, 4, "F32", "float32", "FloatStorage"},
    {DType::kF64, 8, 8, "F64", "float64", "DoubleStorage"},
    {DType::kC32, 4, 4, "", "complex32", ""},
    {DType::kC64, 8, 8, "C64", "complex64", "ComplexFloatStorage"},
    {DType::kC128, 16, 16, "", "complex128", "ComplexDoubleStorage"},
};

constexpr bool ordered() {
  std::size_t expected = 0;
  for (const DTypeInfo& type : kTypes) {
    if (static_cast<std::size_t>(type.dtype) != expected++) return false;
  }
  return true;
}
static_assert(ordered());

std::optional<DType> find(std::string_view name, std::string_view DTypeInfo::* field) {
  if (name.empty()) return std::nullopt;
  for (const DTypeInfo& type : kTypes) {
    if (type.*field == name) return type.dtype;
  }
  return std::nullopt;
}

}  // namespace

const DTypeInfo& info(DType dtype) {
  return kTypes[static_cast<std::size_t>(dtype)];
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  return find(name, &DTypeInfo::safetensors);
}

std::optional<DType> dtype_from_torch(std::string_view name) {
  return find(name, &DTypeInfo::torch);
}

std::optional<DType> dtype_from_storage(std::string_view name) {
  return find(name, &DTypeInfo::storage);
}

}  // namespace violin::checkpoint
