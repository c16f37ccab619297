// The emulated device in place of the operators' GPU, on tensors of the processor. Loaded with its symbols visible, and
// before libviolin_ops.so, this library answers for what it defines, the launchers of the kernels among it; after that
// emulator_register() sends the operators on the processor to their CUDA side.
#include <torch/library.h>

#include "violin/ops/device.h"
#include "violin/ops/device_cuda.h"

namespace violin::ops {

bool on_gpu(const at::Tensor&) {
  return true;
}
bool is_captured(const c10::Device&) {
  return false;
}
cudaStream_t current_stream(const at::Device&) {
  return nullptr;
}

}  // namespace violin::ops

namespace {

void to_cuda(const c10::OperatorHandle& op, c10::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), stack);
}

}  // namespace

extern "C" void emulator_register() {
  static torch::Library library(torch::Library::IMPL, "violin", c10::DispatchKey::CPU, __FILE__, __LINE__);
  for (const char* name :
       {"_pack_gain", "_attention_forward", "_attention_backward", "_attention_qkv_backward", "_decay_gain_forward",
        "_decay_gain_backward", "_decay_mask_forward", "_decay_mask_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&to_cuda>());
  }
}
