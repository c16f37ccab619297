// Makes the records of the sm_80 kernels and chooses the padded head dimension.
#include "violin/kernels/cuda/records.cuh"

namespace violin::kernels::cuda {
namespace sm80 {
// Each in a translation unit of its own.
template <int kDim>
cudaError_t launch_forward(const AttentionForward& p, const Records& records, cudaStream_t stream);
template <int kDim>
cudaError_t launch_backward(const AttentionBackward& p, const Records& records, float* delta, cudaStream_t stream);
extern template cudaError_t launch_forward<32>(const AttentionForward&, const Records&, cudaStream_t);
extern template cudaError_t launch_forward<64>(const AttentionForward&, const Records&, cudaStream_t);
extern template cudaError_t launch_forward<96>(const AttentionForward&, const Records&, cudaStream_t);
extern template cudaError_t launch_forward<128>(const AttentionForward&, const Records&, cudaStream_t);
extern template cudaError_t launch_backward<32>(const AttentionBackward&, const Records&, float*, cudaStream_t);
extern template cudaError_t launch_backward<64>(const AttentionBackward&, const Records&, float*, cudaStream_t);
extern template cudaError_t launch_backward<96>(const AttentionBackward&, const Records&, float*, cudaStream_t);
extern template cudaError_t launch_backward<128>(const AttentionBackward&, const Records&, float*, cudaStream_t);
}  // namespace sm80

cudaError_t launch_sm80(const AttentionForward& p, void* scratch, cudaStream_t stream) {
  Records records;
  if (const cudaError_t e = make_records(p.gain, p.shape, p.dtype, scratch, records, stream); e != cudaSuccess) {
    return e;
  }
  if (p.shape.dim <= 32) return sm80::launch_forward<32>(p, records, stream);
  if (p.shape.dim <= 64) return sm80::launch_forward<64>(p, records, stream);
  if (p.shape.dim <= 96) return sm80::launch_forward<96>(p, records, stream);
  return sm80::launch_forward<128>(p, records, stream);
}

cudaError_t launch_sm80(const AttentionBackward& p, float* delta, void* scratch, cudaStream_t stream) {
  Records records;
  if (const cudaError_t e = make_records(p.gain, p.shape, p.dtype, scratch, records, stream); e != cudaSuccess) {
    return e;
  }
  if (p.shape.dim <= 32) return sm80::launch_backward<32>(p, records, delta, stream);
  if (p.shape.dim <= 64) return sm80::launch_backward<64>(p, records, delta, stream);
  if (p.shape.dim <= 96) return sm80::launch_backward<96>(p, records, delta, stream);
  return sm80::launch_backward<128>(p, records, delta, stream);
}

}  // namespace violin::kernels::cuda
