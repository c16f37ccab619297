// Attention on CUDA devices: the kernels of the path that choose_path() and the device allow, or the reference.
#include <torch/library.h>

#include "violin/kernels/cuda/attention.h"
#include "violin/ops/attention_backend.h"
#include "violin/ops/device_cuda.h"
#include "violin/ops/path.h"

namespace violin::ops {
namespace {

namespace cuda = kernels::cuda;

template <class Call>
void run_kernels(const Call& call, cuda::Path asked) {
  const c10::DeviceGuard guard(call.q.device());
  const cuda::Path path = cuda::best_path() == cuda::Path::kSm90 ? asked : cuda::Path::kSm80;
  const auto parameters = kernel_parameters(call);
  const at::Tensor scratch = scratch_for(cuda::scratch_bytes(parameters, path), call.q);
  check_launch(cuda::launch(parameters, path, scratch.mutable_data_ptr(), current_stream(call.q)), "violin::attention");
}

template <cuda::Path asked>
constexpr AttentionBackend kFused = {[](const AttentionCall& call) { run_kernels(call, asked); },
                                     [](const AttentionBackwardCall& call) { run_kernels(call, asked); }, true};

// The kernels hold a head in registers and shared memory; larger ones than any vision model has go the long way.
const AttentionBackend& backend(std::int64_t dim) {
  const Path path = choose_path(at::kCUDA);
  if (path == Path::kReference || dim > kLargestFusedHead) return kReferenceAttention;
  return path == Path::kSm80 ? kFused<cuda::Path::kSm80> : kFused<cuda::Path::kSm90>;
}

at::Tensor pack(const at::Tensor& gain, const at::Tensor& q) {
  at::Tensor packed = empty_packed(gain, q);  // with checks
  if (packed.numel() == 0) return packed;
  at::Tensor wide = (gain.dim() == 3 ? gain.unsqueeze(0) : gain).to(at::kFloat);
  const bool distinct = (wide.size(0) == 1 || wide.stride(0) > 0) && (wide.size(1) == 1 || wide.stride(1) > 0);
  if (!distinct || (wide.size(3) > 1 && wide.stride(3) != 1)) wide = wide.contiguous();
  const c10::DeviceGuard guard(q.device());
  const kernels::AttentionShape shape = {1, wide.size(1), wide.size(2), wide.size(3), 0, wide.size(0)};
  const kernels::Table view = {wide.const_data_ptr(), wide.size(0) == 1 ? 0 : wide.stride(0),
                               wide.size(1) == 1 ? 0 : wide.stride(1), wide.stride(2)};
  check_launch(cuda::pack_gain(view, shape, kernel_type(q.scalar_type()), packed.mutable_data_ptr(), current_stream(q)),
               "violin::_pack_gain");
  return packed;
}

Tensors2 forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                 const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale) {
  return forward_with(backend(q.size(-1)), q, k, v, gain, bias, gate, scale);
}

Tensors6 backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate, const at::Tensor& out,
                  const at::Tensor& lse, std::optional<double> scale, std::array<bool, 6> need) {
  return backward_with(backend(q.size(-1)), dout, q, k, v, gain, bias, gate, out, lse, scale, need);
}

Tensors4 qkv_backward(const at::Tensor& dout, const at::Tensor& qkv, const MaybeTensor& gain, const MaybeTensor& bias,
                      const MaybeTensor& gate, const at::Tensor& out, const at::Tensor& lse,
                      std::optional<double> scale, std::array<bool, 4> need) {
  return qkv_backward_with(backend(qkv.size(-1)), dout, qkv, gain, bias, gate, out, lse, scale, need);
}

TORCH_LIBRARY_IMPL(violin, CUDA, library) {
  library.impl("_pack_gain", pack);
  library.impl("_attention_forward", forward);
  library.impl("_attention_backward", backward);
  library.impl("_attention_qkv_backward", qkv_backward);
}

}  // namespace
}  // namespace violin::ops
