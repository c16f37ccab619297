// What both CUDA files of the operators need: the device of a call, its stream, scratch, and errors of the runtime.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <cuda_runtime_api.h>

namespace violin::ops {

// The stream comes through torch's generic interface, so that this compiles with a CPU build of torch too.
cudaStream_t current_stream(const at::Device& device);
inline cudaStream_t current_stream(const at::Tensor& tensor) {
  return current_stream(tensor.device());
}

inline void check_launch(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

inline at::Tensor scratch_for(std::size_t bytes, const at::Tensor& tensor) {
  return at::empty({static_cast<std::int64_t>(bytes)}, tensor.options().dtype(at::kByte));
}

}  // namespace violin::ops
