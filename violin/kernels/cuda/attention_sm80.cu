// Chooses the padded head dimension of the sm_80 kernels.
#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda {
namespace sm80 {
template <int kDim>
cudaError_t launch_forward(const AttentionForward& p, cudaStream_t stream);
template <int kDim>
cudaError_t launch_backward(const AttentionBackward& p, float* delta, cudaStream_t stream);
template <>
cudaError_t launch_forward<32>(const AttentionForward&, cudaStream_t);
template <>
cudaError_t launch_forward<64>(const AttentionForward&, cudaStream_t);
template <>
cudaError_t launch_forward<96>(const AttentionForward&, cudaStream_t);
template <>
cudaError_t launch_forward<128>(const AttentionForward&, cudaStream_t);
template <>
cudaError_t launch_backward<32>(const AttentionBackward&, float*, cudaStream_t);
template <>
cudaError_t launch_backward<64>(const AttentionBackward&, float*, cudaStream_t);
template <>
cudaError_t launch_backward<96>(const AttentionBackward&, float*, cudaStream_t);
template <>
cudaError_t launch_backward<128>(const AttentionBackward&, float*, cudaStream_t);
}  // namespace sm80

cudaError_t launch_sm80(const AttentionForward& p, cudaStream_t stream) {
  if (p.shape.dim <= 32) return sm80::launch_forward<32>(p, stream);
  if (p.shape.dim <= 64) return sm80::launch_forward<64>(p, stream);
  if (p.shape.dim <= 96) return sm80::launch_forward<96>(p, stream);
  return sm80::launch_forward<128>(p, stream);
}

cudaError_t launch_sm80(const AttentionBackward& p, float* delta, cudaStream_t stream) {
  if (p.shape.dim <= 32) return sm80::launch_backward<32>(p, delta, stream);
  if (p.shape.dim <= 64) return sm80::launch_backward<64>(p, delta, stream);
  if (p.shape.dim <= 96) return sm80::launch_backward<96>(p, delta, stream);
  return sm80::launch_backward<128>(p, delta, stream);
}

}  // namespace violin::kernels::cuda
