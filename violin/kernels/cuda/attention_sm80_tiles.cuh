// Pieces that the sm_80 attention kernels are made of: 16-bit matrix products of tiles in shared memory and registers,
// asynchronous loads of rows, tables applied to tiles.
#pragma once

#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda::sm80 {

constexpr int kThreads = 128;
constexpr int kRows = 64;
constexpr int kImagesPerSum = 16;

template <class T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ std::uint32_t pack(float x, float y) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(v);
  }
};
template <>
struct Pair<__half> {
  static __device__ __forceinline__ std::uint32_t pack(float x, float y) {
    const __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(v);
  }
};

template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
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

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void ldmatrix(std::uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p)));
}
__device__ __forceinline__ void ldmatrix_transposed(std::uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p)));
}
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void commit() {
  asm volatile("cp.async.commit_group;");
}
template <int kLeft>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft));
}

// A tile of kCount rows in shared memory, each kDim numbers and 8 of padding, so that the eight rows of an 8 x 8 matrix
// start in different banks.
template <int kDim>
constexpr int kStride = kDim + 8;

// Rows [first, first + kCount) of a head into a tile; rows past the end and columns past d become 0. `wide`: 16-byte
// pieces may be copied (d and all strides are multiples of 8, the base is aligned).
template <class T, int kDim, int kCount>
__device__ __forceinline__ void load_tile(T* to, const T* from, std::int64_t stride, int first, int rows, int d,
                                          bool wide) {
  constexpr int kPieces = kDim / 8;
  static_assert(kCount * kPieces % kThreads == 0);
#pragma unroll
  for (int s = 0; s < kCount * kPieces / kThreads; ++s) {
    const int x = threadIdx.x + s * kThreads;
    const int r = x / kPieces;
    const int c = x % kPieces * 8;
    T* piece = to + r * kStride<kDim> + c;
    const bool valid = first + r < rows && c < d;
    const T* source = from + (valid ? (first + r) * stride + c : 0);
    if (wide) {
      copy_async(piece, source, valid);
    } else {
      alignas(16) T values[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) values[k] = valid && c + k < d ? source[k] : T(0.0f);
      *reinterpret_cast<uint4*>(piece) = *reinterpret_cast<const uint4*>(values);
    }
  }
}

// out[n] (+)= rows of A times rows of B^T: A is 16 x kDim in registers or at a, B is kN x kDim in shared memory.
template <class T, int kDim, int kN>
__device__ __forceinline__ void product(float (&out)[kN / 8][4], const T* a, const T* b) {
  const int lane = threadIdx.x % 32;
  const T* a_lane = a + lane % 16 * kStride<kDim> + lane / 16 * 8;
  const T* b_lane = b + (lane % 8 + lane / 16 * 8) * kStride<kDim> + lane / 8 % 2 * 8;
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    std::uint32_t left[4];
    ldmatrix(left, a_lane + 16 * k);
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      std::uint32_t right[4];
      ldmatrix(right, b_lane + 16 * n * kStride<kDim> + 16 * k);
      mma<T>(out[2 * n], left, right[0], right[1]);
      mma<T>(out[2 * n + 1], left, right[2], right[3]);
    }
  }
}

// sum += weights times B: weights 16 x kN as an accumulator tile in registers, B kN x kDim in shared memory.
template <class T, int kDim, int kN>
__device__ __forceinline__ void accumulate(float (&sum)[kDim / 8][4], const float (&weights)[kN / 8][4], const T* b) {
  const int lane = threadIdx.x % 32;
  const T* b_lane = b + lane % 16 * kStride<kDim> + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kN / 16; ++k) {
    const float(&x)[4] = weights[2 * k];
    const float(&y)[4] = weights[2 * k + 1];
    const std::uint32_t left[4] = {Pair<T>::pack(x[0], x[1]), Pair<T>::pack(x[2], x[3]), Pair<T>::pack(y[0], y[1]),
                                   Pair<T>::pack(y[2], y[3])};
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t right[4];
      ldmatrix_transposed(right, b_lane + 16 * k * kStride<kDim> + 16 * n);
      mma<T>(sum[2 * n], left, right[0], right[1]);
      mma<T>(sum[2 * n + 1], left, right[2], right[3]);
    }
  }
}

// Rows row and row + 8 of an accumulator tile to a head, times a factor.
template <class T, int kDim>
__device__ __forceinline__ void store(const float (&sum)[kDim / 8][4], T* to, std::int64_t stride, int row, int rows,
                                      int d, float factor0, float factor1, bool wide) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const int c = 8 * n + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
      const float factor = half ? factor1 : factor0;
      const std::uint32_t pair = Pair<T>::pack(sum[n][2 * half] * factor, sum[n][2 * half + 1] * factor);
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

// Where a thread reads a table slice whose rows are its own rows: row and row + 8, from its first column on. Rows past
// the end read the last one; what they give is never stored.
struct TableRows {
  const float* at[2] = {nullptr, nullptr};

  __device__ __forceinline__ TableRows(const float* slice, std::int64_t stride, int row, int rows) {
    if (slice == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      at[half] = slice + min(row + 8 * half, rows - 1) * stride + threadIdx.x % 4 * 2;
  }
  __device__ __forceinline__ explicit operator bool() const { return at[0] != nullptr; }

  // The values beside an accumulator tile of columns [first, first + kN); 0 past the end.
  template <int kN>
  __device__ __forceinline__ void load(float (&to)[kN / 8][4], int first, int columns) const {
    if (first + kN <= columns) {
#pragma unroll
      for (int n = 0; n < kN / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[n][e] = __ldg(at[e / 2] + first + 8 * n + e % 2);
    } else {
#pragma unroll
      for (int n = 0; n < kN / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = first + 8 * n + e % 2;
          to[n][e] = column + static_cast<int>(threadIdx.x % 4 * 2) < columns ? __ldg(at[e / 2] + column) : 0.0f;
        }
    }
  }
};

// The same where a thread's rows are the table's columns.
struct TableColumns {
  const float* at[2] = {nullptr, nullptr};
  std::int64_t stride = 0;

  __device__ __forceinline__ TableColumns(const float* slice, std::int64_t row_stride, int row, int rows)
      : stride(row_stride) {
    if (slice == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) at[half] = slice + min(row + 8 * half, rows - 1);
  }
  __device__ __forceinline__ explicit operator bool() const { return at[0] != nullptr; }

  template <int kN>
  __device__ __forceinline__ void load(float (&to)[kN / 8][4], int first, int columns) const {
    const bool whole = first + kN <= columns;
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const int column = first + 8 * n + static_cast<int>(threadIdx.x % 4 * 2) + y;
        const std::int64_t offset = (whole ? column : min(column, columns - 1)) * stride;
        to[n][y] = __ldg(at[0] + offset);
        to[n][y + 2] = __ldg(at[1] + offset);
      }
  }
};

// z = product * factor o gain + bias, in base 2.
template <int kN, class Reader>
__device__ __forceinline__ void make_logits(float (&z)[kN / 8][4], const Reader& gain, const Reader& bias, float factor,
                                            int first, int columns) {
  float t[kN / 8][4];
  if (gain) {
    gain.template load<kN>(t, first, columns);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) z[n][e] *= factor * t[n][e];
  } else {
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) z[n][e] *= factor;
  }
  if (bias) {
    bias.template load<kN>(t, first, columns);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) z[n][e] = fmaf(kLog2e, t[n][e], z[n][e]);
  }
}

template <int kN, class Reader>
__device__ __forceinline__ void multiply_table(float (&x)[kN / 8][4], const Reader& table, int first, int columns) {
  if (!table) return;
  float t[kN / 8][4];
  table.template load<kN>(t, first, columns);
#pragma unroll
  for (int n = 0; n < kN / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] *= t[n][e];
}

// Sets what stands in columns past the end.
template <int kN>
__device__ __forceinline__ void fill_past(float (&x)[kN / 8][4], int first, int columns, float value) {
  if (first + kN <= columns) return;
#pragma unroll
  for (int n = 0; n < kN / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first + 8 * n + static_cast<int>(threadIdx.x % 4 * 2) + e % 2 >= columns) x[n][e] = value;
    }
}

// The log-sum-exp in base 2 of a query; +inf, which makes every weight 0, past the end and where all logits are -inf.
__device__ __forceinline__ float base2_lse(const void* lse, std::int64_t at, bool valid) {
  const float x = valid ? static_cast<const float*>(lse)[at] * kLog2e : INFINITY;
  return x == -INFINITY ? INFINITY : x;
}

}  // namespace violin::kernels::cuda::sm80
