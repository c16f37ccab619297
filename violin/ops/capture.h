// CUDA graphs, as far as the host's part of a model has to know of them.
#pragma once

#include <c10/core/Device.h>

namespace violin::ops {

// Whether what this thread now asks of the device is recorded for later instead of being done: nothing that is made may
// be kept then, nor may anybody wait for it.
bool is_captured(const c10::Device& device);

}  // namespace violin::ops
