// Around the sm_80 kernels: records, scratch, the padded head dimension, the sum of split table gradients.
#include "violin/kernels/cuda/attention_sm80_plan.cuh"

namespace violin::kernels::cuda {
namespace sm80 {
namespace {

// to[i] = the sum of parts[s][i] over the splits, in their order.
__global__ void __launch_bounds__(256) sum_splits_kernel(float* to, const float* parts, std::int64_t size, int splits) {
  const std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x;
  if (i >= size) return;
  float sum = parts[i];
  for (int s = 1; s < splits; ++s) sum += parts[s * size + i];
  to[i] = sum;
}

}  // namespace

// Each in a translation unit of its own.
template <int kDim>
cudaError_t launch_forward(const AttentionForward& p, const Records& records, cudaStream_t stream);
template <int kDim>
cudaError_t launch_backward(const AttentionBackward& p, const Records& records, float* delta,
                            const TableGradients& tables, cudaStream_t stream);
#define VIOLIN_ATTENTION_SM80_EXTERN(kDim)                                                                 \
  extern template cudaError_t launch_forward<kDim>(const AttentionForward&, const Records&, cudaStream_t); \
  extern template cudaError_t launch_backward<kDim>(const AttentionBackward&, const Records&, float*,      \
                                                    const TableGradients&, cudaStream_t);
VIOLIN_ATTENTION_SM80_EXTERN(32)
VIOLIN_ATTENTION_SM80_EXTERN(64)
VIOLIN_ATTENTION_SM80_EXTERN(96)
VIOLIN_ATTENTION_SM80_EXTERN(128)

}  // namespace sm80

std::size_t scratch_sm80(const AttentionForward& p) {
  return record_bytes(p.gain, p.shape);
}

std::size_t scratch_sm80(const AttentionBackward& p) {
  const AttentionShape& s = p.shape;
  const int splits = sm80::tables_splits(p);
  const std::int64_t numbers =
      splits > 1 ? std::int64_t{splits} * sm80::wanted_tables(p) * s.groups * s.heads * s.queries * s.keys : 0;
  return record_bytes(p.gain, s) + static_cast<std::size_t>(numbers) * sizeof(float);
}

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
  const AttentionShape& s = p.shape;
  Records records;
  if (const cudaError_t e = make_records(p.gain, s, p.dtype, scratch, records, stream); e != cudaSuccess) return e;
  float* parts = reinterpret_cast<float*>(static_cast<unsigned char*>(scratch) + record_bytes(p.gain, s));
  sm80::TableGradients tables;
  tables.size = s.groups * s.heads * s.queries * s.keys;
  tables.splits = sm80::tables_splits(p);
  float* results[3] = {static_cast<float*>(p.dgain), static_cast<float*>(p.dbias), static_cast<float*>(p.dgate)};
  float** places[3] = {&tables.gain, &tables.bias, &tables.gate};
  for (int x = 0; x < 3; ++x) {
    *places[x] = results[x];
    if (results[x] == nullptr || tables.splits <= 1) continue;
    *places[x] = parts;
    parts += tables.splits * tables.size;
  }
  cudaError_t e = s.dim <= 32   ? sm80::launch_backward<32>(p, records, delta, tables, stream)
                  : s.dim <= 64 ? sm80::launch_backward<64>(p, records, delta, tables, stream)
                  : s.dim <= 96 ? sm80::launch_backward<96>(p, records, delta, tables, stream)
                                : sm80::launch_backward<128>(p, records, delta, tables, stream);
  for (int x = 0; x < 3 && e == cudaSuccess; ++x) {
    if (*places[x] == results[x]) continue;
    sm80::sum_splits_kernel<<<static_cast<unsigned>(ceil_div(tables.size, 256)), 256, 0, stream>>>(
        results[x], *places[x], tables.size, tables.splits);
    e = cudaGetLastError();
  }
  return e;
}

}  // namespace violin::kernels::cuda
