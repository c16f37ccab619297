// The decay mask on the CPU: checks of values, then the kernels at the level that choose_path() says, or the reference.
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "violin/kernels/cpu/decay_mask.h"
#include "violin/ops/decay_mask_backend.h"
#include "violin/ops/parallel_cpu.h"
#include "violin/ops/path.h"

namespace violin::ops {
namespace {

namespace cpu = kernels::cpu;

cpu::Level level() {
  switch (choose_path(at::kCPU)) {
    case Path::kAvx512:
      return cpu::Level::kAvx512;
    case Path::kAvx2:
      return cpu::Level::kAvx2;
    default:
      return cpu::Level::kPlain;
  }
}

template <class Parameters>
void run_kernels(const Parameters& parameters) {
  const std::int64_t span = cpu::largest_distance(parameters.mask);
  TORCH_CHECK_VALUE(span <= std::numeric_limits<std::int32_t>::max(), "violin::decay_mask: ranks are up to ", span,
                    " apart with their axes added; expected distances within int32");
  const kernels::DecayMask& mask = parameters.mask;
  const std::int64_t operations = mask.groups * mask.heads * mask.curves * mask.tokens * mask.tokens;
  run_phases(cpu::plan(parameters, span), operations,
             [&](int phase, std::int64_t begin, std::int64_t end, const cpu::Scratch& scratch) {
               cpu::run(parameters, span, level(), phase, begin, end, scratch);
             });
}

constexpr DecayMaskBackend kFused = {[](const DecayMaskCall& call) { run_kernels(kernel_parameters(call)); },
                                     [](const DecayMaskBackwardCall& call) { run_kernels(kernel_parameters(call)); }};

const DecayMaskBackend& backend() {
  return choose_path(at::kCPU) == Path::kReference ? kReferenceDecayMask : kFused;
}

at::Tensor forward(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight, std::int64_t prefix,
                   const MaybeTensor& prefix_decay, bool log_space) {
  if (ranks.scalar_type() == at::kInt && ranks.numel() > 0) {
    const at::Tensor dense = ranks.contiguous();
    const auto* const first = dense.const_data_ptr<std::int32_t>();
    const std::int32_t lowest = *std::min_element(first, first + dense.numel());
    TORCH_CHECK_VALUE(lowest >= 0, "violin::decay_mask: ranks contain ", lowest, "; expected none below 0");
  }
  return forward_with(backend(), ranks, log_decay, weight, prefix, prefix_decay, log_space);
}

Tensors3 backward(const at::Tensor& dmask, const at::Tensor& ranks, const at::Tensor& log_decay,
                  const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay, bool log_space,
                  std::array<bool, 3> need) {
  return backward_with(backend(), dmask, ranks, log_decay, weight, prefix, prefix_decay, log_space, need);
}

TORCH_LIBRARY_IMPL(violin, CPU, library) {
  library.impl("_decay_mask_forward", forward);
  library.impl("_decay_mask_backward", backward);
}

}  // namespace
}  // namespace violin::ops
