// The forward pass in float32 and float64. V comes during the logits, K of the next tile during the output.
#pragma once

#include "violin/kernels/cuda/attention_simt.cuh"

namespace violin::kernels::cuda::simt {

template <class C>
constexpr int forward_numbers() {
  return (C::kRows + 2 * C::kColumns) * C::kWidth + C::kRows * C::kColumns;
}
template <class C>
__global__ void __launch_bounds__(kThreads, C::kBlocks) forward_kernel(const __grid_constant__ AttentionForward p) {
  using T = typename C::Number;
  constexpr int kWidth = C::kWidth;
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  const auto [d, nq, nk, i0, b, h] = place(p.shape, p.shape.queries, C::kRows);
  const Thread t = this_thread();
  T* const q = reinterpret_cast<T*>(shared);
  T* const k = q + C::kRows * kWidth;
  T* const v = k + C::kColumns * kWidth;
  T* const weights = v + C::kColumns * kWidth;
  const T* const keys = head_of<T>(p.k, b, h);
  const T* const values = head_of<T>(p.v, b, h);
  const Tables<T> tables(p, b % p.shape.groups, h);

  narrowed<C::M>(nq - i0, [&](auto m) {
    constexpr int M = decltype(m)::value;
    T sum[M][Columns<kWidth>::kCount] = {};
    T maximum[M], total[M];
#pragma unroll
    for (int a = 0; a < M; ++a) {
      maximum[a] = -infinity<T>();
      total[a] = 0;
    }
    fetch<kDown * M, kWidth>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
    if (nk > 0) fetch<C::kColumns, kWidth>(k, keys, p.k.token, 0, nk, d);
    commit();
    settle();
    for (int j0 = 0; j0 < nk; j0 += C::kColumns) {
      narrowed<C::N>(nk - j0, [&](auto n) {
        constexpr int N = decltype(n)::value;
        fetch<kAcross * N, kWidth>(v, values, p.v.token, j0, nk, d);
        commit();
        T gains[M][N], z[M][N];
        fetch_gains<false>(gains, tables, i0, j0, nq, nk, t);
        product<kWidth>(z, q, k, t);
#pragma unroll
        for (int a = 0; a < M; ++a) {
          const int i = here(i0 + t.ty + kDown * a);
          T top = maximum[a];
#pragma unroll
          for (int c = 0; c < N; ++c) {
            const int j = j0 + t.tx + kAcross * c;
            z[a][c] = i < nq && j < nk ? tables.logit(z[a][c], gains[a][c], i, j) : -infinity<T>();
            top = max(top, z[a][c]);
          }
          top = max_across(top);
          const T shift = top == -infinity<T>() ? T(0) : top;
          const T decay = exp(maximum[a] - shift);
          maximum[a] = top;
          total[a] *= decay;
#pragma unroll
          for (int s = 0; s < Columns<kWidth>::kCount; ++s) sum[a][s] *= decay;
#pragma unroll
          for (int c = 0; c < N; ++c) {
            const int j = j0 + t.tx + kAcross * c;
            z[a][c] = exp(z[a][c] - shift);
            total[a] += z[a][c];
            if (tables.gate && i < nq && j < nk) z[a][c] *= tables.open_at(i, j);
          }
        }
        put(weights, z, t);
        settle();
        if (j0 + C::kColumns < nk) fetch<C::kColumns, kWidth>(k, keys, p.k.token, j0 + C::kColumns, nk, d);
        commit();
        accumulate<kWidth, kAcross * N>(sum, weights, v, t);
        settle();
      });
    }
#pragma unroll
    for (int a = 0; a < M; ++a) {
      const T whole = sum_across(total[a]);
      const T inverse = whole == 0 ? T(0) : T(1) / whole;  // and not a number where it is none
#pragma unroll
      for (int s = 0; s < Columns<kWidth>::kCount; ++s) sum[a][s] *= inverse;
      const int i = i0 + t.ty + kDown * a;
      if (t.tx == 0 && i < nq) {
        static_cast<T*>(p.lse)[(b * p.shape.heads + h) * nq + i] =
            whole == 0 ? -infinity<T>() : maximum[a] + log(whole);
      }
    }
    store<kWidth>(sum, head_of<T>(p.out, b, h), p.out.token, i0, nq, d, T(1), t);
  });
}

}  // namespace violin::kernels::cuda::simt
