// The backward pass in float32 and float64: three kernels, each owning what it sums: dK and dV per key tile, dQ per
// query tile, the tables' gradients per (query, key) tile with a loop over the images. Nothing is summed with atomics.
//
// Before them, one kernel writes down what they need to know of each query: the log-sum-exp that the forward pass
// saved, and D = rowsum(dO o O). A large log-sum-exp resolves weights to |LSE| roundings only, and where a row has one
// weight D is off by more than dP - D itself: tiles of queries with large ones, or with few keys, pass over the keys
// once more and measure the softmax and D from the very products that the gradients are made of.
#pragma once

#include "violin/kernels/cuda/attention_simt.cuh"

namespace violin::kernels::cuda::simt {

constexpr int kImagesPerSum = 16;  // float32 sums over many images lose bits; sums of sums of 16 do not

template <class C>
constexpr int statistics_numbers() {
  return 2 * (C::kRows + C::kColumns) * C::kWidth;
}
template <class C>
__global__ void __launch_bounds__(kThreads, C::kBlocks)
    statistics_kernel(const __grid_constant__ AttentionBackward p, Statistics<typename C::Number> to) {
  using T = typename C::Number;
  constexpr int M = C::M, N = C::N, kWidth = C::kWidth;
  constexpr T kLargeLse = 16;  // beyond it the saved log-sum-exp is too coarse
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  const auto [d, nq, nk, i0, b, h] = place(p.shape, p.shape.queries, C::kRows);
  const Thread t = this_thread();
  const std::int64_t first = (b * p.shape.heads + h) * nq;
  const T* const lse = static_cast<const T*>(p.lse) + first;
  const T* const dout = head_of<T>(p.dout, b, h);

  bool measures = nk <= C::kColumns;  // which is cheap then
#pragma unroll
  for (int a = 0; a < M; ++a) {
    const int i = i0 + t.ty + kDown * a;
    if (i < nq && abs(lse[i]) > kLargeLse && lse[i] != -infinity<T>()) measures = true;
  }
  T shift[M], factor[M], delta[M];
  if (__syncthreads_or(measures)) {
    T* const q = reinterpret_cast<T*>(shared);
    T* const g_out = q + C::kRows * kWidth;
    T* const k = g_out + C::kRows * kWidth;
    T* const v = k + C::kColumns * kWidth;
    const Tables<T> tables(p, b % p.shape.groups, h);
    T total[M];
#pragma unroll
    for (int a = 0; a < M; ++a) {
      shift[a] = -infinity<T>();
      total[a] = delta[a] = 0;
    }
    fetch<C::kRows, kWidth>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
    fetch<C::kRows, kWidth>(g_out, dout, p.dout.token, i0, nq, d);
    commit();
    for (int j0 = 0; j0 < nk; j0 += C::kColumns) {
      __syncthreads();
      fetch<C::kColumns, kWidth>(k, head_of<T>(p.k, b, h), p.k.token, j0, nk, d);
      fetch<C::kColumns, kWidth>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
      commit();
      settle();
      T z[M][N], dot[M][N];
      product<kWidth>(z, q, k, t);
      product<kWidth>(dot, g_out, v, t);
#pragma unroll
      for (int a = 0; a < M; ++a) {
        const int i = here(i0 + t.ty + kDown * a);
        T top = shift[a];
#pragma unroll
        for (int c = 0; c < N; ++c) {
          const int j = j0 + t.tx + kAcross * c;
          const bool exists = i < nq && j < nk;
          z[a][c] = exists ? tables.logit(z[a][c], tables.gain_at(i, j), i, j) : -infinity<T>();
          dot[a][c] *= exists ? tables.open_at(i, j) : T(0);
          top = max(top, z[a][c]);
        }
        top = max_across(top);
        const T finite = top == -infinity<T>() ? T(0) : top;
        const T decay = exp(shift[a] - finite);
        shift[a] = top;
        total[a] *= decay;
        delta[a] *= decay;
#pragma unroll
        for (int c = 0; c < N; ++c) {
          const T weight = exp(z[a][c] - finite);
          total[a] += weight;
          delta[a] += weight * dot[a][c];
        }
      }
    }
    wait<0>();
#pragma unroll
    for (int a = 0; a < M; ++a) {
      const T whole = sum_across(total[a]);
      factor[a] = whole == 0 ? T(0) : T(1) / whole;
      delta[a] = sum_across(delta[a]) * factor[a];
    }
  } else {
    const T* const out = head_of<T>(p.out, b, h);
#pragma unroll
    for (int a = 0; a < M; ++a) {
      const int i = i0 + t.ty + kDown * a;
      T dot = 0;
      if (i < nq) {
        for (int c = t.tx; c < d; c += kAcross) dot += out[i * p.out.token + c] * dout[i * p.dout.token + c];
      }
      delta[a] = sum_across(dot);
      shift[a] = i < nq ? lse[i] : T(0);
      factor[a] = 1;
    }
  }
#pragma unroll
  for (int a = 0; a < M; ++a) {
    const int i = i0 + t.ty + kDown * a;
    if (t.tx != 0 || i >= nq) continue;
    to.shift[first + i] = shift[a] == -infinity<T>() ? infinity<T>() : shift[a];  // no key: every weight is 0
    to.factor[first + i] = factor[a];
    to.delta[first + i] = delta[a];
  }
}

// dK and dV of a key tile: rows of the tile are keys, columns queries.
template <class C>
constexpr int dkv_numbers() {
  return 2 * (C::kRows + C::kColumns) * C::kWidth + 2 * C::kRows * C::kColumns +
         TileStatistics<typename C::Number, C::kColumns>::kNumbers;
}
template <class C>
__global__ void __launch_bounds__(kThreads, C::kBlocks)
    dkv_kernel(const __grid_constant__ AttentionBackward p, Statistics<typename C::Number> of) {
  using T = typename C::Number;
  constexpr int kWidth = C::kWidth;
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  const auto [d, nq, nk, j0, b, h] = place(p.shape, p.shape.keys, C::kRows);
  const Thread t = this_thread();
  T* const k = reinterpret_cast<T*>(shared);
  T* const v = k + C::kRows * kWidth;
  T* const q = v + C::kRows * kWidth;
  T* const g_out = q + C::kColumns * kWidth;
  T* const weights = g_out + C::kColumns * kWidth;
  T* const dproducts = weights + C::kRows * C::kColumns;
  const TileStatistics<T, C::kColumns> queries{dproducts + C::kRows * C::kColumns};
  const Tables<T> tables(p, b % p.shape.groups, h);
  const auto fetch_queries = [&](int i0) {
    queries.fetch(of, (b * p.shape.heads + h) * nq, i0, nq);
    fetch<C::kColumns, kWidth>(g_out, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d);
    fetch<C::kColumns, kWidth>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
    commit();
  };

  narrowed<C::M>(nk - j0, [&](auto m) {
    constexpr int M = decltype(m)::value;
    T dk[M][Columns<kWidth>::kCount] = {};
    T dv[M][Columns<kWidth>::kCount] = {};
    fetch<kDown * M, kWidth>(k, head_of<T>(p.k, b, h), p.k.token, j0, nk, d);
    fetch<kDown * M, kWidth>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
    fetch_queries(0);
    for (int i0 = 0; i0 < nq; i0 += C::kColumns) {
      narrowed<C::N>(nq - i0, [&](auto n) {
        constexpr int N = decltype(n)::value;
        T gains[M][N];
        fetch_gains<true>(gains, tables, j0, i0, nk, nq, t);
        settle();
        T x[M][N], dot[M][N];
        product<kWidth>(x, k, q, t);
        product<kWidth>(dot, v, g_out, t);
#pragma unroll
        for (int a = 0; a < M; ++a) {
          const int j = here(j0 + t.ty + kDown * a);
#pragma unroll
          for (int c = 0; c < N; ++c) {
            const int i = i0 + t.tx + kAcross * c;
            Element<T> e{};
            if (i < nq && j < nk)
              e = tables.element(x[a][c], dot[a][c], gains[a][c], i, j, queries.at(t.tx + kAcross * c));
            x[a][c] = e.weight;
            dot[a][c] = e.dproduct;
          }
        }
        put(weights, x, t);
        put(dproducts, dot, t);
        __syncthreads();
        accumulate<kWidth, kAcross * N>(dv, weights, g_out, t);
        accumulate<kWidth, kAcross * N>(dk, dproducts, q, t);
        __syncthreads();
      });
      if (i0 + C::kColumns < nq) fetch_queries(i0 + C::kColumns);
    }
    if (p.dk.data) store<kWidth>(dk, head_of<T>(p.dk, b, h), p.dk.token, j0, nk, d, static_cast<T>(p.scale), t);
    if (p.dv.data) store<kWidth>(dv, head_of<T>(p.dv, b, h), p.dv.token, j0, nk, d, T(1), t);
  });
}

template <class C>
constexpr int dq_numbers() {
  return (2 * C::kRows + 3 * C::kColumns) * C::kWidth + C::kRows * C::kColumns +
         TileStatistics<typename C::Number, C::kRows>::kNumbers;
}
template <class C>
__global__ void __launch_bounds__(kThreads, C::kBlocks)
    dq_kernel(const __grid_constant__ AttentionBackward p, Statistics<typename C::Number> of) {
  using T = typename C::Number;
  constexpr int kWidth = C::kWidth;
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  const auto [d, nq, nk, i0, b, h] = place(p.shape, p.shape.queries, C::kRows);
  const Thread t = this_thread();
  T* const q = reinterpret_cast<T*>(shared);
  T* const g_out = q + C::kRows * kWidth;
  T* const v = g_out + C::kRows * kWidth;
  T* const two_k = v + C::kColumns * kWidth;  // in turns
  T* const dproducts = two_k + 2 * C::kColumns * kWidth;
  const T* const keys = head_of<T>(p.k, b, h);
  const Tables<T> tables(p, b % p.shape.groups, h);
  const TileStatistics<T, C::kRows> queries{dproducts + C::kRows * C::kColumns};

  narrowed<C::M>(nq - i0, [&](auto m) {
    constexpr int M = decltype(m)::value;
    T dq[M][Columns<kWidth>::kCount] = {};
    fetch<kDown * M, kWidth>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
    fetch<kDown * M, kWidth>(g_out, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d);
    if (nk > 0) fetch<C::kColumns, kWidth>(two_k, keys, p.k.token, 0, nk, d);
    queries.fetch(of, (b * p.shape.heads + h) * nq, i0, nq);
    commit();
    settle();
    T* k = two_k;
    T* next_k = two_k + C::kColumns * kWidth;
    for (int j0 = 0; j0 < nk; j0 += C::kColumns) {
      narrowed<C::N>(nk - j0, [&](auto n) {
        constexpr int N = decltype(n)::value;
        fetch<kAcross * N, kWidth>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
        commit();
        T gains[M][N], x[M][N], dot[M][N];
        fetch_gains<false>(gains, tables, i0, j0, nq, nk, t);
        product<kWidth>(x, q, k, t);
        settle();
        if (j0 + C::kColumns < nk) fetch<C::kColumns, kWidth>(next_k, keys, p.k.token, j0 + C::kColumns, nk, d);
        commit();
        product<kWidth>(dot, g_out, v, t);
#pragma unroll
        for (int a = 0; a < M; ++a) {
          const int i = here(i0 + t.ty + kDown * a);
#pragma unroll
          for (int c = 0; c < N; ++c) {
            const int j = j0 + t.tx + kAcross * c;
            x[a][c] = i < nq && j < nk
                          ? tables.element(x[a][c], dot[a][c], gains[a][c], i, j, queries.at(t.ty + kDown * a)).dproduct
                          : T(0);
          }
        }
        put(dproducts, x, t);
        settle();
        accumulate<kWidth, kAcross * N>(dq, dproducts, k, t);
      });
      T* const last = k;
      k = next_k;
      next_k = last;
    }
    store<kWidth>(dq, head_of<T>(p.dq, b, h), p.dq.token, i0, nq, d, static_cast<T>(p.scale), t);
  });
}

// Gradients of the tables in one (query, key) tile of one group and head: a sum over the images of the group, in order.
// kAll: not only of the gain.
template <class C>
constexpr int tables_numbers() {
  return 2 * (C::kRows + C::kColumns) * C::kWidth + TileStatistics<typename C::Number, C::kRows>::kNumbers;
}
template <class C, bool kAll>
__global__ void __launch_bounds__(kThreads, C::kBlocks)
    tables_kernel(const __grid_constant__ AttentionBackward p, Statistics<typename C::Number> of) {
  using T = typename C::Number;
  constexpr int kWidth = C::kWidth;
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  const Thread t = this_thread();
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  T* const q = reinterpret_cast<T*>(shared);
  T* const k = q + C::kRows * kWidth;
  T* const g_out = k + C::kColumns * kWidth;
  T* const v = g_out + C::kRows * kWidth;
  const TileStatistics<T, C::kRows> queries{v + C::kColumns * kWidth};
  const int key_tiles = (nk + C::kColumns - 1) / C::kColumns;
  const int query_tiles = (nq + C::kRows - 1) / C::kRows;
  const int j0 = static_cast<int>(blockIdx.x % key_tiles) * C::kColumns;
  const int i0 = static_cast<int>(blockIdx.x / key_tiles % query_tiles) * C::kRows;
  const std::int64_t gh = blockIdx.x / key_tiles / query_tiles;
  const std::int64_t h = gh % p.shape.heads;
  const std::int64_t g = gh / p.shape.heads;
  const Tables<T> tables(p, g, h);
  narrowed<C::M>(nq - i0, [&](auto m) {
    narrowed<C::N>(nk - j0, [&](auto n) {
      constexpr int M = decltype(m)::value, N = decltype(n)::value;
      const auto fetch_products = [&](std::int64_t b) {
        fetch<kDown * M, kWidth>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
        fetch<kAcross * N, kWidth>(k, head_of<T>(p.k, b, h), p.k.token, j0, nk, d);
      };

      T dgain[M][N] = {}, dbias[M][N] = {}, dgate[M][N] = {};
      T part_gain[M][N] = {}, part_bias[M][N] = {}, part_gate[M][N] = {};
      int images = 0;
      T gains[M][N];  // the same for all images
      fetch_gains<false>(gains, tables, i0, j0, nq, nk, t);
      fetch_products(g);
      commit();
      settle();
      for (std::int64_t b = g; b < p.shape.batch; b += p.shape.groups) {
        fetch<kDown * M, kWidth>(g_out, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d);
        fetch<kAcross * N, kWidth>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
        queries.fetch(of, (b * p.shape.heads + h) * nq, i0, nq);
        commit();
        T x[M][N], dot[M][N];
        product<kWidth>(x, q, k, t);
        settle();
        if (b + p.shape.groups < p.shape.batch) fetch_products(b + p.shape.groups);
        commit();
        product<kWidth>(dot, g_out, v, t);
        const bool fold = ++images % kImagesPerSum == 0;
#pragma unroll
        for (int a = 0; a < M; ++a) {
          const int i = here(i0 + t.ty + kDown * a);
#pragma unroll
          for (int c = 0; c < N; ++c) {
            const int j = j0 + t.tx + kAcross * c;
            if (i < nq && j < nk) {
              const Element<T> e = tables.element(x[a][c], dot[a][c], gains[a][c], i, j, queries.at(t.ty + kDown * a));
              part_gain[a][c] += e.dlogit * x[a][c];
              if constexpr (kAll) {
                part_bias[a][c] += e.dlogit;
                part_gate[a][c] += e.dgate;
              }
            }
            if (fold) {
              dgain[a][c] += part_gain[a][c];
              dbias[a][c] += part_bias[a][c];
              dgate[a][c] += part_gate[a][c];
              part_gain[a][c] = part_bias[a][c] = part_gate[a][c] = 0;
            }
          }
        }
        settle();
      }
#pragma unroll
      for (int a = 0; a < M; ++a)
#pragma unroll
        for (int c = 0; c < N; ++c) {
          const int i = i0 + t.ty + kDown * a;
          const int j = j0 + t.tx + kAcross * c;
          if (i >= nq || j >= nk) continue;
          const std::int64_t at = (gh * nq + i) * nk + j;
          if (p.dgain) static_cast<T*>(p.dgain)[at] = (dgain[a][c] + part_gain[a][c]) * static_cast<T>(p.scale);
          if (p.dbias) static_cast<T*>(p.dbias)[at] = dbias[a][c] + part_bias[a][c];
          if (p.dgate) static_cast<T*>(p.dgate)[at] = dgate[a][c] + part_gate[a][c];
        }
    });
  });
}

}  // namespace violin::kernels::cuda::simt
