// Pieces that the sm_80 attention kernels are made of: 16-bit matrix products of tiles in shared memory and registers,
// asynchronous loads of rows and records, tables applied to tiles.
//
// A block is four warps. Its own rows are kM tiles of 64, of which warp w has rows 16 w to 16 w + 15 of each; a thread
// holds the part of a product that mma.sync gives it, number 4 n + e of tile m in x[m][4 n + e]: row lane / 4 (+ 8
// where e > 1), column 8 n + 2 (lane % 4) + e % 2.
#pragma once

#include "violin/kernels/cuda/records.cuh"

namespace violin::kernels::cuda::sm80 {

constexpr int kThreads = 128;

template <class T>
__device__ __forceinline__ void mma(float* c, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Rows of kDim numbers in shared memory. Their 16-byte pieces are swapped within groups, so that ldmatrix finds the
// eight rows of an 8 x 8 matrix in different banks: groups of eight by exclusive or with row % 8 where a row is a
// multiple of 128 bytes, else groups of four by row / 2 % 4.
template <int kDim>
struct Rows {
  static constexpr int kBytes = kDim * 2;
  static constexpr int kPieces = kDim / 8;
  static constexpr int kGroup = kDim % 64 == 0 ? 8 : 4;

  static __device__ __forceinline__ int key(int row) { return kGroup == 8 ? row % 8 : row / 2 % 4; }
  static __device__ __forceinline__ std::uint32_t at(int row, int piece) {
    return row * kBytes + (piece / kGroup * kGroup + (piece % kGroup ^ key(row))) * 16;
  }
  // From the address of (row, 0 or 1) to that of (row, 2 k or 2 k + 1).
  static __device__ __forceinline__ std::uint32_t step(std::uint32_t row, std::uint32_t first, int k) {
    return row + k / (kGroup / 2) * kGroup * 16 + (first ^ k % (kGroup / 2) * 32);
  }
};

// What a lane asks of ldmatrix: rows [0, 16) of a tile, pieces 2 k and 2 k + 1. kOrder 0: rows by lane % 16, the second
// piece in lanes 16 and up: a left side, or the right side of a sum over rows. 1: the second piece in lanes 8 to 15 and
// 24 up: the right side of a product with rows.
template <int kDim, int kOrder>
struct Lane {
  std::uint32_t row, first;

  __device__ __forceinline__ explicit Lane(std::uint32_t tile) {
    const int lane = threadIdx.x % 32;
    const int r = kOrder == 0 ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int piece = kOrder == 0 ? lane / 16 : lane / 8 % 2;
    row = tile + r * Rows<kDim>::kBytes;
    first = (piece ^ Rows<kDim>::key(r)) * 16;
  }
  __device__ __forceinline__ std::uint32_t operator()(int rows, int k) const {
    return Rows<kDim>::step(row + rows * Rows<kDim>::kBytes, first, k);
  }
};

// Rows [first, first + kCount) of a head into a tile; rows past the end and columns past d become 0. `wide`: 16-byte
// pieces may be copied (d and all strides are multiples of 8, the base is aligned).
template <class T, int kDim, int kCount>
__device__ __forceinline__ void load_rows(std::uint32_t to, const T* from, std::int64_t stride, int first, int rows,
                                          int d, bool wide) {
  using R = Rows<kDim>;
  static_assert(kCount * R::kPieces % kThreads == 0);
#pragma unroll
  for (int s = 0; s < kCount * R::kPieces / kThreads; ++s) {
    const int x = threadIdx.x + s * kThreads;
    const int r = x / R::kPieces;
    const int piece = x % R::kPieces;
    const int c = piece * 8;
    const bool valid = first + r < rows && c < d;
    const T* source = from + (valid ? (first + r) * stride + c : 0);
    if (wide) {
      copy_async(to + R::at(r, piece), source, valid);
    } else {
      alignas(16) T values[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) values[k] = valid && c + k < d ? source[k] : T(0.0f);
      const uint4& v = *reinterpret_cast<const uint4*>(values);
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to + R::at(r, piece)), "r"(v.x), "r"(v.y), "r"(v.z),
                   "r"(v.w)
                   : "memory");
    }
  }
}

// Bytes in multiples of 16.
__device__ __forceinline__ void load_bytes(std::uint32_t to, const unsigned char* from, int bytes) {
  for (int x = threadIdx.x * 16; x < bytes; x += kThreads * 16) copy_async(to + x, from + x, true);
}

// The records of kM query tiles beside a key tile. In place of a tile past the end stands the last one: what it gives
// is never stored, but it must not be what happened to lie there, because a warp's rows decide together when to scale.
template <int kM>
__device__ __forceinline__ void load_records(std::uint32_t to, const Records& records, int g, int h, int query_tiles,
                                             int key_tiles, int query_tile, int key_tile) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    load_bytes(to + m * kRecordBytes,
               records.at(g, h, query_tiles, key_tiles, min(query_tile + m, query_tiles - 1), key_tile), kRecordBytes);
  }
}

// out = A B^T: A are kM tiles of 64 rows, of which the warp has 16 each, B kN rows; both kDim wide in shared memory.
template <class T, int kDim, int kM, int kN>
__device__ __forceinline__ void product(float (&out)[kM][kN / 2], std::uint32_t a, std::uint32_t b) {
  const Lane<kDim, 0> left(a + threadIdx.x / 32 * 16 * Rows<kDim>::kBytes);
  const Lane<kDim, 1> right(b);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) out[m][n] = 0;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    std::uint32_t x[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) load_matrices<false>(x[m], left(64 * m, k));
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      std::uint32_t y[4];
      load_matrices<false>(y, right(16 * n, k));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma<T>(out[m] + 8 * n, x[m], y[0], y[1]);
        mma<T>(out[m] + 8 * n + 4, x[m], y[2], y[3]);
      }
    }
  }
}

// sum += W B: W kM times 16 x kN as products left it, B kN rows in shared memory.
template <class T, int kDim, int kM, int kN>
__device__ __forceinline__ void accumulate(float (&sum)[kM][kDim / 2], const float (&w)[kM][kN / 2], std::uint32_t b) {
  const Lane<kDim, 0> right(b);
#pragma unroll
  for (int k = 0; k < kN / 16; ++k) {
    std::uint32_t x[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][e] = pack<T>(w[m][8 * k + 2 * e], w[m][8 * k + 2 * e + 1]);
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t y[4];
      load_matrices<true>(y, right(16 * k, n));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma<T>(sum[m] + 8 * n, x[m], y[0], y[1]);
        mma<T>(sum[m] + 8 * n + 4, x[m], y[2], y[3]);
      }
    }
  }
}

// Rows row and row + 8 of a tile to a head, times a factor each.
template <class T, int kDim>
__device__ __forceinline__ void store(const float (&sum)[kDim / 2], T* to, std::int64_t stride, int row, int rows,
                                      int d, float factor0, float factor1, bool wide) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const int c = 8 * n + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
      const float factor = half ? factor1 : factor0;
      const std::uint32_t pair = pack<T>(sum[4 * n + 2 * half] * factor, sum[4 * n + 2 * half + 1] * factor);
      if (r >= rows || c >= d) continue;
      T* at = to + r * stride + c;
      if (wide) {
        *reinterpret_cast<std::uint32_t*>(at) = pair;
      } else {
        at[0] = reinterpret_cast<const T(&)[2]>(pair)[0];
        if (c + 1 < d) at[1] = reinterpret_cast<const T(&)[2]>(pair)[1];
      }
    }
  }
}

// Whether the rows of a head can be copied in pieces of 16 bytes.
template <class H>
__host__ __device__ __forceinline__ bool is_wide(const H& x, std::int64_t d) {
  return (reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0) && (d | x.batch | x.head | x.token) % 8 == 0;
}

// The gains of kN columns beside a tile, times `factor`, from a record in shared memory, of which this thread's part
// starts at record_offset() and whose range lies at `range`.
template <class T, bool kTransposed, int kN>
struct Gains {
  std::uint32_t parts[kN / 16][4];
  float base, slope;

  // first: columns of the tile in front of these, a multiple of 16.
  __device__ __forceinline__ Gains(std::uint32_t record, std::uint32_t offset, int first, std::uint32_t range,
                                   float factor) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(base), "=f"(slope) : "r"(range) : "memory");
#pragma unroll
    for (int q = 0; q < kN / 16; ++q) {
      const int x = first / 16 + q;
      // Records are aligned to 128 bytes, so that steps of two pieces can be exclusive ors.
      load_matrices<kTransposed>(parts[q], kTransposed ? record + offset + x * 2048 : (record + offset) ^ (x * 32));
    }
    base *= factor;
    slope *= factor;
  }
  __device__ __forceinline__ float operator[](int i) const {
    return fmaf(widen<T>(parts[i / 8][i % 8 / 2], i % 2), slope, base);
  }
};

// A float32 table in global memory beside a thread's part of a tile: element (row, column) of the tile is element
// row * row_step + column * column_step of the slice. What lies past the end is read from the last row and column.
struct TableView {
  const float* slice;
  std::int64_t row_step, column_step;
  int row, rows, columns;

  __device__ __forceinline__ explicit operator bool() const { return slice != nullptr; }
  template <int kN, class F>
  __device__ __forceinline__ void each(int below, int first, const F& use) const {
    const float* at[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) at[half] = slice + min(row + below + 8 * half, rows - 1) * row_step;
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = min(first + 8 * n + static_cast<int>(threadIdx.x % 4 * 2) + e % 2, columns - 1);
        use(4 * n + e, __ldg(at[e / 2] + column * column_step));
      }
  }
};

// Sets what stands in columns past the end.
template <int kN>
__device__ __forceinline__ void fill_past(float (&x)[kN / 2], int first, int columns, float value) {
  if (first + kN <= columns) return;
#pragma unroll
  for (int n = 0; n < kN / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first + 8 * n + static_cast<int>(threadIdx.x % 4 * 2) + e % 2 >= columns) x[4 * n + e] = value;
    }
}

// The log-sum-exp in base 2 of a query; +inf, which makes every weight 0, past the end and where all logits are -inf.
__device__ __forceinline__ float base2_lse(const void* lse, std::int64_t at, bool valid) {
  const float x = valid ? static_cast<const float*>(lse)[at] * kLog2e : INFINITY;
  return x == -INFINITY ? INFINITY : x;
}

struct Sizes {
  int d, nq, nk, query_tiles, key_tiles;

  __device__ __forceinline__ explicit Sizes(const AttentionShape& s)
      : d(static_cast<int>(s.dim)),
        nq(static_cast<int>(s.queries)),
        nk(static_cast<int>(s.keys)),
        query_tiles((nq + kTile - 1) / kTile),
        key_tiles((nk + kTile - 1) / kTile) {}
};

// Which image, head and tile of rows a block has: images fastest, so that neighbours in time share a table.
struct Block {
  int b, h, g, first;

  __device__ __forceinline__ Block(const AttentionShape& s, int rows, int tokens) {
    const int batch = static_cast<int>(s.batch);
    const int blocks = (tokens + rows - 1) / rows;
    b = static_cast<int>(blockIdx.x) % batch;
    first = static_cast<int>(blockIdx.x) / batch % blocks * rows;
    h = static_cast<int>(blockIdx.x) / batch / blocks;
    g = b % static_cast<int>(s.groups);
  }
};

}  // namespace violin::kernels::cuda::sm80
