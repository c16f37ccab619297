// Starts the kernels in float32 and float64, the exact path on the ordinary arithmetic units.
#include <algorithm>

#include "violin/kernels/cuda/attention_simt_backward.cuh"
#include "violin/kernels/cuda/attention_simt_forward.cuh"

namespace violin::kernels::cuda {
namespace simt {
namespace {

template <class P, class... Args>
cudaError_t start(void (*kernel)(P, Args...), std::int64_t blocks, std::size_t shared, cudaStream_t stream, const P& p,
                  Args... args) {
  if (blocks == 0) return cudaSuccess;
  if (const cudaError_t e = allow_most_shared(kernel); e != cudaSuccess) return e;
  kernel<<<static_cast<unsigned>(blocks), kThreads, shared, stream>>>(p, args...);
  return cudaGetLastError();
}

template <class C>
cudaError_t forward(const AttentionForward& p, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  return start(forward_kernel<C>, ceil_div(s.queries, C::kRows) * s.batch * s.heads,
               forward_numbers<C>() * sizeof(typename C::Number), stream, p);
}

// Half of a cut each way: where three tables' sums would take too many registers, and where tiles are fewer than what
// the device works on at a time.
template <class C>
using Halves = Cut<typename C::Number, C::kWidth, (C::M + 1) / 2, (C::N + 1) / 2>;
template <class C>
std::int64_t table_tiles(const AttentionShape& s) {
  return ceil_div(s.queries, C::kRows) * ceil_div(s.keys, C::kColumns) * s.groups * s.heads;
}
template <class C, bool kAll>
cudaError_t tables(const AttentionBackward& p, const Statistics<typename C::Number>& of, cudaStream_t stream) {
  return start(tables_kernel<C, kAll>, table_tiles<C>(p.shape), tables_numbers<C>() * sizeof(typename C::Number),
               stream, p, of);
}

template <class C>
cudaError_t backward(const AttentionBackward& p, void* scratch, cudaStream_t stream) {
  using T = typename C::Number;
  const AttentionShape& s = p.shape;
  const std::int64_t query_tiles = ceil_div(s.queries, C::kRows);
  const std::int64_t key_tiles = ceil_div(s.keys, C::kRows);
  const std::int64_t rows = s.batch * s.heads * s.queries;
  T* const first = static_cast<T*>(scratch);
  const Statistics<T> of{first, first + rows, first + 2 * rows};
  cudaError_t e =
      start(statistics_kernel<C>, query_tiles * s.batch * s.heads, statistics_numbers<C>() * sizeof(T), stream, p, of);
  if (e == cudaSuccess && (p.dk.data || p.dv.data)) {
    e = start(dkv_kernel<C>, key_tiles * s.batch * s.heads, dkv_numbers<C>() * sizeof(T), stream, p, of);
  }
  if (e == cudaSuccess && p.dq.data) {
    e = start(dq_kernel<C>, query_tiles * s.batch * s.heads, dq_numbers<C>() * sizeof(T), stream, p, of);
  }
  if (e == cudaSuccess && (p.dgain || p.dbias || p.dgate)) {
    if (p.dbias || p.dgate) {
      e = tables<Halves<C>, true>(p, of, stream);
    } else if (table_tiles<C>(s) < 2 * processors()) {
      e = tables<Halves<C>, false>(p, of, stream);
    } else {
      e = tables<C, false>(p, of, stream);
    }
  }
  return e;
}

// Calls act with the cut for a head. Devices differ in shared memory per block (sm_86: 99 KiB, sm_80: 163, sm_90: 227);
// large tiles where they fit.
template <class C>
bool fits(C) {
  return std::max({forward_numbers<C>(), dkv_numbers<C>(), dq_numbers<C>()}) * sizeof(typename C::Number) <=
         most_shared();
}
template <class Act>
cudaError_t with_cut(DType dtype, std::int64_t d, Act&& act) {
  const auto first_that_fits = [&](auto large, auto small) { return fits(large) ? act(large) : act(small); };
  if (dtype == DType::kFloat64) {
    return d <= 64 ? first_that_fits(Cut<double, 64, 4, 4>{}, Cut<double, 64, 2, 2>{})
                   : first_that_fits(Cut<double, 128, 2, 2>{}, Cut<double, 128, 1, 1>{});
  }
  if (d <= 32) return act(Cut<float, 32, 4, 4>{});
  return d <= 64 ? act(Cut<float, 64, 4, 4>{}) : first_that_fits(Cut<float, 128, 4, 4>{}, Cut<float, 128, 2, 2>{});
}

}  // namespace
}  // namespace simt

cudaError_t launch_simt(const AttentionForward& p, cudaStream_t stream) {
  return simt::with_cut(p.dtype, p.shape.dim, [&](auto cut) { return simt::forward<decltype(cut)>(p, stream); });
}

std::size_t scratch_simt(const AttentionBackward& p) {
  const std::int64_t rows = p.shape.batch * p.shape.heads * p.shape.queries;
  return static_cast<std::size_t>(3 * rows) * (p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
}

cudaError_t launch_simt(const AttentionBackward& p, void* scratch, cudaStream_t stream) {
  return simt::with_cut(p.dtype, p.shape.dim,
                        [&](auto cut) { return simt::backward<decltype(cut)>(p, scratch, stream); });
}

}  // namespace violin::kernels::cuda
