// Attention on the CPU: the fused kernels at the level that choose_path() says, or the reference.
#include <torch/library.h>

#include "violin/kernels/cpu/attention.h"
#include "violin/ops/attention_backend.h"
#include "violin/ops/matmul_cpu.h"
#include "violin/ops/parallel_cpu.h"
#include "violin/ops/path.h"

namespace violin::ops {
namespace {

namespace cpu = kernels::cpu;

template <class Parameters>
void run_kernels(const Parameters& parameters, cpu::Level level) {
  const kernels::AttentionShape& shape = parameters.shape;
  const std::int64_t operations = shape.batch * shape.heads * shape.queries * shape.keys * shape.dim;
  run_phases(cpu::plan(parameters, cpu_matmul()), operations,
             [&](int phase, std::int64_t begin, std::int64_t end, const cpu::Scratch& scratch) {
               cpu::run(parameters, level, cpu_matmul(), phase, begin, end, scratch);
             });
}

template <cpu::Level level>
constexpr AttentionBackend kFused = {
    [](const AttentionCall& call) { run_kernels(kernel_parameters(call), level); },
    [](const AttentionBackwardCall& call) { run_kernels(kernel_parameters(call), level); }};

const AttentionBackend& backend() {
  const Path path = choose_path(at::kCPU);
  if (path == Path::kAvx512) return kFused<cpu::Level::kAvx512>;
  if (path == Path::kAvx2) return kFused<cpu::Level::kAvx2>;
  if (path == Path::kPlain) return kFused<cpu::Level::kPlain>;
  return kReferenceAttention;
}

Tensors2 forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                 const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale) {
  return forward_with(backend(), q, k, v, gain, bias, gate, scale);
}

Tensors6 backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate, const at::Tensor& out,
                  const at::Tensor& lse, std::optional<double> scale, std::array<bool, 6> need) {
  return backward_with(backend(), dout, q, k, v, gain, bias, gate, out, lse, scale, need);
}

Tensors4 qkv_backward(const at::Tensor& dout, const at::Tensor& qkv, const MaybeTensor& gain, const MaybeTensor& bias,
                      const MaybeTensor& gate, const at::Tensor& out, const at::Tensor& lse,
                      std::optional<double> scale, std::array<bool, 4> need) {
  return qkv_backward_with(backend(), dout, qkv, gain, bias, gate, out, lse, scale, need);
}

TORCH_LIBRARY_IMPL(violin, CPU, library) {
  library.impl("_attention_forward", forward);
  library.impl("_attention_backward", backward);
  library.impl("_attention_qkv_backward", qkv_backward);
}

}  // namespace
}  // namespace violin::ops
