// Writing safetensors; reading is TensorFile's business (tensor_file.h).
#pragma once

#include <filesystem>

#include "violin/checkpoint/tensor_file.h"

namespace violin::checkpoint {

// Writes the tensors, of any device and any strides, in row-major order. The file is written beside its place and
// renamed, so a kill leaves the previous one whole; equal content gives equal bytes, whatever the order of `tensors`.
// The data begins at a multiple of 64 bytes and large element types come first, so that every tensor is aligned when
// mapped. Throws violin::Error for names that occur twice or are not UTF-8, and for dtypes and layouts that the format
// has not.
void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors, const Metadata& metadata = {});

}  // namespace violin::checkpoint
