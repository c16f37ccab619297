// Pieces that the float32 and float64 attention kernels are made of: tiles in shared memory and their products on the
// ordinary arithmetic units.
//
// 256 threads work on tiles of logits; a thread owns those of rows ty + 16 a and columns tx + 16 c. Tiles lie in shared
// memory as rows of whole pieces of four numbers, piece x of row r in place x ^ r % 8: rows of a multiple of 32 numbers
// all begin in the same bank, and threads that ask for one piece of several rows find it in different ones. So a tile
// of keys serves both products that it has a part in, with the logits by its rows and with the output by its columns,
// and whoever brings it need not turn it. Tiles begin at multiples of their rows' size, so that a piece's address comes
// of its row's by one exclusive or.
#pragma once

#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda::simt {

constexpr int kThreads = 256;
constexpr int kAcross = 16;  // threads that share a row, all in one warp
constexpr int kDown = kThreads / kAcross;
constexpr int kTileAlignment = 1024;  // the largest rows

// A warp has two rows of 16 threads, and neighbouring lanes are in different rows. Loads of 16 bytes go by quarters of
// a warp, two of which are one where every lane asks for the same as its neighbour, or as its next but one: here the
// first is so of a column's pieces and the second of a row's.
struct Thread {
  int tx, ty;
};
__device__ __forceinline__ Thread this_thread() {
  const int t = static_cast<int>(threadIdx.x);
  return {t / 2 % kAcross, t / 32 * 2 + t % 2};
}
// Over the threads of a row.
template <class T>
__device__ __forceinline__ T sum_across(T x) {
  for (int s = 16; s > 1; s /= 2) x += __shfl_xor_sync(0xffffffffu, x, s);
  return x;
}
template <class T>
__device__ __forceinline__ T max_across(T x) {
  for (int s = 16; s > 1; s /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, s));
  return x;
}

__device__ __forceinline__ void read(float (&to)[4], std::uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"(address));
}
__device__ __forceinline__ void read(float (&to)[2], std::uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(address));
}
__device__ __forceinline__ void read(double (&to)[4], std::uint32_t address) {
  asm volatile("ld.shared.v2.f64 {%0,%1}, [%2];" : "=d"(to[0]), "=d"(to[1]) : "r"(address));
  asm volatile("ld.shared.v2.f64 {%0,%1}, [%2];" : "=d"(to[2]), "=d"(to[3]) : "r"(address + 16));
}

// Rows of kWidth numbers: where they are, in bytes from the tile's beginning.
template <class T, int kWidth>
struct Rows {
  static constexpr std::uint32_t kPiece = 4 * sizeof(T);
  static constexpr std::uint32_t kRow = kWidth * sizeof(T);
  static constexpr int kMask = (kWidth / 4 < 8 ? kWidth / 4 : 8) - 1;

  // Of piece 0; that of piece x is this ^ x * kPiece.
  static __device__ __forceinline__ std::uint32_t at(int row) { return row * kRow + (row & kMask) * kPiece; }
  static __device__ __forceinline__ std::uint32_t number(int row, int column) {
    return (at(row) ^ column / 4 * kPiece) + column % 4 * static_cast<std::uint32_t>(sizeof(T));
  }
};

// Rows [first, first + kRows) of a head on their way into a tile; what lies past the end of rows or of d becomes 0.
template <int kRows, int kWidth, class T>
__device__ __forceinline__ void fetch(T* tile, const T* from, std::int64_t stride, int first, int rows, int d) {
  constexpr int kChunk = 16 / sizeof(T);
  constexpr int kChunks = kWidth / kChunk;
  constexpr int kStep = kThreads / kChunks;
  const bool aligned =
      (reinterpret_cast<std::uintptr_t>(from) | static_cast<std::uintptr_t>(stride) * sizeof(T)) % 16 == 0 &&
      d % kChunk == 0;
  const int column = static_cast<int>(threadIdx.x) % kChunks * kChunk;
  const int local = static_cast<int>(threadIdx.x) / kChunks;
  if (kRows < kStep && local >= kRows) return;
  const T* source = from + (first + local) * stride + column;
  if (aligned) {
    const std::uint32_t to = shared_address(tile);
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      const bool valid = first + local + r < rows && column < d;
      copy_async(to + Rows<T, kWidth>::number(local + r, column), valid ? source : from, valid);
      source += kStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kRows; r += kStep) {
    T* to = tile + Rows<T, kWidth>::number(local + r, column) / sizeof(T);
    for (int e = 0; e < kChunk; ++e) to[e] = first + local + r < rows && column + e < d ? source[e] : T(0);
    source += kStep * stride;
  }
}

// out[a][c] = sum_k rows[ty + 16 a][k] * columns[tx + 16 c][k]
template <int kWidth, int M, int N, class T>
__device__ __forceinline__ void product(T (&out)[M][N], const T* rows, const T* columns, Thread t) {
  using R = Rows<T, kWidth>;
#pragma unroll
  for (int a = 0; a < M; ++a)
#pragma unroll
    for (int c = 0; c < N; ++c) out[a][c] = 0;
  const std::uint32_t row = shared_address(rows) + R::at(t.ty);
  const std::uint32_t column = shared_address(columns) + R::at(t.tx);
#pragma unroll 1
  for (std::uint32_t x = 0; x < R::kRow; x += R::kPiece) {
    T y[N][4];
#pragma unroll
    for (int c = 0; c < N; ++c) read(y[c], (column ^ x) + kAcross * c * R::kRow);
#pragma unroll
    for (int a = 0; a < M; ++a) {
      T r[4];
      read(r, (row ^ x) + kDown * a * R::kRow);
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int c = 0; c < N; ++c) out[a][c] += r[e] * y[c][e];
    }
  }
}

// A thread's columns of an output of kWidth: kSide of them side by side, and 16 kSide further on the next ones.
template <int kWidth>
struct Columns {
  static constexpr int kCount = kWidth / kAcross;
  static constexpr int kSide = kCount < 4 ? kCount : 4;
  static __device__ __forceinline__ int column(Thread t, int s) {
    return kSide * (t.tx + kAcross * (s / kSide)) + s % kSide;
  }
};

// sum[a][s] += sum_j weights[ty + 16 a][j] * rows[j][column s], where the tile is summed by itself first: long sums of
// float32 lose fewer bits so.
template <int kWidth, int kRows, int M, class T>
__device__ __forceinline__ void accumulate(T (&sum)[M][Columns<kWidth>::kCount], const T* weights, const T* rows,
                                           Thread t) {
  using W = Rows<T, kRows>;
  using R = Rows<T, kWidth>;
  constexpr int kCount = Columns<kWidth>::kCount;
  constexpr int kSide = Columns<kWidth>::kSide;
  T part[M][kCount] = {};
  const std::uint32_t weight = shared_address(weights) + W::at(t.ty);
  std::uint32_t row = shared_address(rows) + R::number(0, Columns<kWidth>::column(t, 0));
#pragma unroll 1
  for (std::uint32_t x = 0; x < W::kRow; x += 2 * W::kPiece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T y[4][kCount];
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int s = 0; s < kCount; s += kSide) {
          const int r = 4 * half + e;
          T numbers[kSide];
          read(numbers, (row ^ r * R::kPiece) + r * R::kRow + kAcross * (s / kSide) * R::kPiece);
#pragma unroll
          for (int i = 0; i < kSide; ++i) y[e][s + i] = numbers[i];
        }
#pragma unroll
      for (int a = 0; a < M; ++a) {
        T w[4];
        read(w, (weight ^ (x + half * W::kPiece)) + kDown * a * W::kRow);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int s = 0; s < kCount; ++s) part[a][s] += w[e] * y[e][s];
      }
    }
    row += 8 * R::kRow;
  }
#pragma unroll
  for (int a = 0; a < M; ++a)
#pragma unroll
    for (int s = 0; s < kCount; ++s) sum[a][s] += part[a][s];
}

// A thread's numbers of a tile of weights, as the left side of accumulate().
template <int M, int N, class T>
__device__ __forceinline__ void put(T* weights, const T (&x)[M][N], Thread t) {
  using R = Rows<T, kAcross * N>;
#pragma unroll
  for (int c = 0; c < N; ++c) {
    T* to = weights + R::number(t.ty, t.tx + kAcross * c) / sizeof(T);
#pragma unroll
    for (int a = 0; a < M; ++a) to[a * kDown * kAcross * N] = x[a][c];
  }
}

template <int kWidth, int M, class T>
__device__ __forceinline__ void store(const T (&sum)[M][Columns<kWidth>::kCount], T* to, std::int64_t stride, int first,
                                      int rows, int d, T factor, Thread t) {
#pragma unroll
  for (int a = 0; a < M; ++a)
#pragma unroll
    for (int s = 0; s < Columns<kWidth>::kCount; ++s) {
      const int r = first + t.ty + kDown * a;
      const int c = Columns<kWidth>::column(t, s);
      if (r < rows && c < d) to[r * stride + c] = sum[a][s] * factor;
    }
}

// The same number, of which the compiler does not know that: what is computed from it is computed where it is used, and
// not kept in registers over a loop.
__device__ __forceinline__ int here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(INFINITY);
}

}  // namespace violin::kernels::cuda::simt
