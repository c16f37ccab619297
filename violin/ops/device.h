// What the host's part of operators and models has to know of a tensor's device.
#pragma once

#include <ATen/core/Tensor.h>

namespace violin::ops {

// Whether a tensor is where the CUDA kernels compute. The one place that says so: tests put an emulated device there.
bool on_gpu(const at::Tensor& tensor);

// Whether what this thread now asks of the device is recorded for a CUDA graph instead of being done: nothing that is
// made may be kept then, nor may anybody wait for it.
bool is_captured(const c10::Device& device);

}  // namespace violin::ops
