// What the float32 and float64 attention kernels share beside products: how a call is cut, what a logit is and what it
// contributes to the gradients.
#pragma once

#include <type_traits>

#include "violin/kernels/cuda/attention_simt_tiles.cuh"

namespace violin::kernels::cuda::simt {

// How a call is cut: heads of up to kWidth numbers, tiles of 16 M rows of what a block owns by 16 N of the other side.
template <class T, int kWidth_, int M_, int N_>
struct Cut {
  using Number = T;
  static constexpr int kWidth = kWidth_;
  static constexpr int M = M_;
  static constexpr int N = N_;
  static constexpr int kRows = kDown * M;
  static constexpr int kColumns = kAcross * N;
  static constexpr int kBlocks =
      sizeof(T) == 4 && kWidth <= 64 ? 2 : 1;  // on a processor, one beside the other's waits
};

// What a block works on: a tile of queries, or of keys, of one image and head.
struct Place {
  int d, nq, nk;
  int first;  // row of the tile
  std::int64_t b, h;
};

__device__ __forceinline__ Place place(const AttentionShape& s, std::int64_t rows, int tile) {
  const int tiles = (static_cast<int>(rows) + tile - 1) / tile;
  const std::int64_t image = blockIdx.x / tiles;
  return {static_cast<int>(s.dim),  static_cast<int>(s.queries),
          static_cast<int>(s.keys), static_cast<int>(blockIdx.x % tiles) * tile,
          image / s.heads,          image % s.heads};
}

// What the backward kernels know of each query: weights are exp(logit - shift) * factor, and D. [B,h,Nq] each.
template <class T>
struct Statistics {
  T* shift;
  T* factor;
  T* delta;
};
// The same of one query.
template <class T>
struct OfQuery {
  T shift, factor, delta;
};
// Of a tile of queries in shared memory, where they take no registers while products run.
template <class T, int kCount>
struct TileStatistics {
  static constexpr int kNumbers = 3 * kCount;
  T* data;

  __device__ __forceinline__ void fetch(const Statistics<T>& of, std::int64_t first, int i0, int nq) const {
    const int x = static_cast<int>(threadIdx.x);
    if (x >= kCount) return;
    const bool exists = i0 + x < nq;
    data[x] = exists ? of.shift[first + i0 + x] : T(0);
    data[kCount + x] = exists ? of.factor[first + i0 + x] : T(0);
    data[2 * kCount + x] = exists ? of.delta[first + i0 + x] : T(0);
  }
  __device__ __forceinline__ OfQuery<T> at(int x) const { return {data[x], data[kCount + x], data[2 * kCount + x]}; }
};

// What one element of the logits contributes to the gradients.
template <class T>
struct Element {
  T weight;    // P o gate
  T dlogit;    // dZ
  T dproduct;  // dZ o gain; times scale it is dA
  T dgate;
};

template <class T>
struct Tables {
  const T* gain;
  const T* bias;
  const T* gate;
  std::int64_t gain_row, bias_row, gate_row;
  T scale;

  template <class Call>
  __device__ Tables(const Call& p, std::int64_t g, std::int64_t h)
      : gain(slice_of<T>(p.gain, g, h)),
        bias(slice_of<T>(p.bias, g, h)),
        gate(slice_of<T>(p.gate, g, h)),
        gain_row(p.gain.row),
        bias_row(p.bias.row),
        gate_row(p.gate.row),
        scale(static_cast<T>(p.scale)) {}

  __device__ __forceinline__ T gain_at(int i, int j) const { return gain ? gain[i * gain_row + j] : T(1); }
  __device__ __forceinline__ T open_at(int i, int j) const { return gate ? gate[i * gate_row + j] : T(1); }
  __device__ __forceinline__ T logit(T product, T gain, int i, int j) const {
    const T z = product * scale * gain;
    return bias ? z + bias[i * bias_row + j] : z;
  }

  // product: (Q K^T)[i,j]; dot: (dO V^T)[i,j]; m: the gain there
  __device__ __forceinline__ Element<T> element(T product, T dot, T m, int i, int j, const OfQuery<T>& of) const {
    const T weight = exp(logit(product, m, i, j) - of.shift) * of.factor;
    const T open = open_at(i, j);
    const T dlogit = weight * (dot * open - of.delta);
    return {weight * open, dlogit, dlogit * m, weight * dot};
  }
};

// A thread's gains of a tile, on their way while products run. kTurned: rows of the tile are keys, columns queries.
template <bool kTurned, int M, int N, class T>
__device__ __forceinline__ void fetch_gains(T (&gains)[M][N], const Tables<T>& tables, int row0, int column0, int rows,
                                            int columns, Thread t) {
  if (tables.gain == nullptr) {
#pragma unroll
    for (int a = 0; a < M; ++a)
#pragma unroll
      for (int c = 0; c < N; ++c) gains[a][c] = 1;
    return;
  }
#pragma unroll
  for (int a = 0; a < M; ++a) {
    const int r = here(min(row0 + t.ty + kDown * a, rows - 1));
#pragma unroll
    for (int c = 0; c < N; ++c) {
      const int x = min(column0 + t.tx + kAcross * c, columns - 1);
      gains[a][c] = kTurned ? tables.gain[x * tables.gain_row + r] : tables.gain[r * tables.gain_row + x];
    }
  }
}

// Calls act with how many sixteens of rows (or columns) a tile has: all M of them, or one where no more than 16 rows
// are left, as a class token leaves them.
template <int M, class Act>
__device__ __forceinline__ void narrowed(int left, Act&& act) {
  if constexpr (M > 1) {
    if (left <= kDown) {
      act(std::integral_constant<int, 1>{});
      return;
    }
  }
  act(std::integral_constant<int, M>{});
}
static_assert(kDown == kAcross);

// All copies of the block have landed, and what its threads wrote or still read is done with.
__device__ __forceinline__ void settle() {
  wait<0>();
  __syncthreads();
}

}  // namespace violin::kernels::cuda::simt
