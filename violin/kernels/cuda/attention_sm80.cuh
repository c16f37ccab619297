// Attention in float16 and bfloat16 on the tensor cores of sm_80 and later: mma.sync m16n8k16 with float32 sums.
//
// Four warps work on 128 or 64 rows and stream steps of the other side's rows through two buffers that cp.async fills
// one step ahead. A warp with two tiles of 16 rows uses every matrix of the other side twice: shared memory is what
// these kernels wait for first. The head dimension is padded to kDim in shared memory only. Every sum takes its left
// side from registers. The gain comes as records through the same buffers; bias and gate are read from global memory in
// float32, where they stay in L2. Nothing takes more than 99 KiB of shared memory, which is what the smaller devices
// have.
//
// This file starts the kernels of one head dimension.
#pragma once

#include "violin/kernels/cuda/attention_sm80_backward.cuh"
#include "violin/kernels/cuda/attention_sm80_forward.cuh"
#include "violin/kernels/cuda/attention_sm80_tables.cuh"

namespace violin::kernels::cuda::sm80 {

constexpr std::size_t kMostShared = 99 * 1024;

template <std::size_t kShared, class P, class... Args>
cudaError_t start(void (*kernel)(P, Args...), dim3 blocks, cudaStream_t stream, const P& p, Args... args) {
  static_assert(kShared <= kMostShared);
  if (blocks.x == 0) return cudaSuccess;
  const cudaError_t e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (e != cudaSuccess) return e;
  kernel<<<blocks, kThreads, kShared, stream>>>(p, args...);
  return cudaGetLastError();
}

template <class T, int kDim>
cudaError_t forward(const AttentionForward& p, const Records& records, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const std::int64_t blocks = ceil_div(s.queries, kForwardTiles * kTile) * s.batch * s.heads;
  return start<kForwardShared<kDim>>(forward_kernel<T, kDim>, static_cast<unsigned>(blocks), stream, p, records);
}

template <class T, int kDim>
cudaError_t backward(const AttentionBackward& p, const Records& records, float* delta, const TableGradients& tables,
                     cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const auto blocks = [&](std::int64_t rows) {
    return static_cast<unsigned>(ceil_div(rows, kBackwardTiles<kDim> * kTile) * s.batch * s.heads);
  };
  const float* read = delta;
  cudaError_t e = cudaSuccess;
  if (measures_delta(p)) {
    e = start<kDqShared<kDim>>(dq_kernel<T, kDim, true>, blocks(s.queries), stream, p, records, delta);
  }
  if (e == cudaSuccess && (p.dk.data || p.dv.data)) {
    e = start<kDkvShared<kDim>>(dkv_kernel<T, kDim>, blocks(s.keys), stream, p, records, read);
  }
  if (e == cudaSuccess && p.dq.data) {
    e = start<kDqShared<kDim>>(dq_kernel<T, kDim, false>, blocks(s.queries), stream, p, records, delta);
  }
  if (e == cudaSuccess && tables.splits > 0) {
    const dim3 tiles(static_cast<unsigned>(tables_blocks(s, needs_all(p))), tables.splits);
    if (needs_all(p)) {
      e = start<kTablesShared<kDim, true>>(tables_kernel<T, kDim, true>, tiles, stream, p, records, read, tables);
    } else {
      e = start<kTablesShared<kDim, false>>(tables_kernel<T, kDim, false>, tiles, stream, p, records, read, tables);
    }
  }
  return e;
}

// One translation unit per head dimension defines these.
template <int kDim>
cudaError_t launch_forward(const AttentionForward& p, const Records& records, cudaStream_t stream);
template <int kDim>
cudaError_t launch_backward(const AttentionBackward& p, const Records& records, float* delta,
                            const TableGradients& tables, cudaStream_t stream);

#define VIOLIN_ATTENTION_SM80(kDim)                                                                          \
  template <>                                                                                                \
  cudaError_t launch_forward<kDim>(const AttentionForward& p, const Records& records, cudaStream_t stream) { \
    return p.dtype == DType::kFloat16 ? forward<__half, kDim>(p, records, stream)                            \
                                      : forward<__nv_bfloat16, kDim>(p, records, stream);                    \
  }                                                                                                          \
  template <>                                                                                                \
  cudaError_t launch_backward<kDim>(const AttentionBackward& p, const Records& records, float* delta,        \
                                    const TableGradients& tables, cudaStream_t stream) {                     \
    return p.dtype == DType::kFloat16 ? backward<__half, kDim>(p, records, delta, tables, stream)            \
                                      : backward<__nv_bfloat16, kDim>(p, records, delta, tables, stream);    \
  }

}  // namespace violin::kernels::cuda::sm80
