// The decay mask on CUDA devices: the kernels, or the reference where VIOLIN_PATH asks for it. Ranks are not looked at
// here: that would wait for the device.
#include <torch/library.h>

#include "violin/kernels/cuda/decay_mask.h"
#include "violin/ops/decay_mask_backend.h"
#include "violin/ops/device_cuda.h"
#include "violin/ops/path.h"

namespace violin::ops {
namespace {

namespace cuda = kernels::cuda;

template <class Call>
void run_kernels(const Call& call) {
  const c10::DeviceGuard guard(call.ranks.device());
  const auto parameters = kernel_parameters(call);
  const at::Tensor scratch = scratch_for(cuda::scratch_bytes(parameters), call.ranks);
  check_launch(cuda::launch(parameters, scratch.mutable_data_ptr(), current_stream(call.ranks)), "violin::decay_mask");
}

constexpr DecayMaskBackend kFused = {[](const DecayMaskCall& call) { run_kernels(call); },
                                     [](const DecayMaskBackwardCall& call) { run_kernels(call); }};

const DecayMaskBackend& backend() {
  return choose_path(at::kCUDA) == Path::kReference ? kReferenceDecayMask : kFused;
}

at::Tensor forward(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight, std::int64_t prefix,
                   const MaybeTensor& prefix_decay, bool log_space) {
  return forward_with(backend(), ranks, log_decay, weight, prefix, prefix_decay, log_space);
}

Tensors3 backward(const at::Tensor& dmask, const at::Tensor& ranks, const at::Tensor& log_decay,
                  const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay, bool log_space,
                  std::array<bool, 3> need) {
  return backward_with(backend(), dmask, ranks, log_decay, weight, prefix, prefix_decay, log_space, need);
}

TORCH_LIBRARY_IMPL(violin, CUDA, library) {
  library.impl("_decay_mask_forward", forward);
  library.impl("_decay_mask_backward", backward);
}

}  // namespace
}  // namespace violin::ops
