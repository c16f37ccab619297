// Attention in float16 and bfloat16 on the tensor cores of sm_80 and later: mma.sync m16n8k16 with float32 sums.
//
// Four warps work on tiles of 64 rows, 16 rows a warp, and stream tiles of kStep rows of the other side through two
// buffers that cp.async fills one step ahead. The head dimension is padded to kDim in shared memory only. Every product
// takes its left side from registers: the forward pass reuses the weights it just computed; dK and dV are summed on the
// transposed logits S^T = K Q^T, so that P^T and dA^T already lie in registers as dV = P^T dO and dK = dA^T Q want
// them. Tables are read from global memory in float32, where they stay in L2. The tables' gradients have a kernel of
// their own: a block owns one (query, key) tile and walks over the images in order; every 16 images the partial sums go
// to the output. No atomics.
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

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ AttentionForward p) {
  constexpr int kStep = 64;
  extern __shared__ __align__(16) unsigned char shared[];
  T* q_tile = reinterpret_cast<T*>(shared);
  T* k_tiles = q_tile + kRows * kStride<kDim>;
  T* v_tiles = k_tiles + 2 * kStep * kStride<kDim>;
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const std::int64_t b = blockIdx.x % p.shape.batch;
  const int i0 = static_cast<int>(blockIdx.x / p.shape.batch % ((nq + kRows - 1) / kRows)) * kRows;
  const std::int64_t h = blockIdx.x / p.shape.batch / ((nq + kRows - 1) / kRows);
  const std::int64_t g = b % p.shape.groups;
  const T* k = head_of<T>(p.k, b, h);
  const T* v = head_of<T>(p.v, b, h);
  const bool k_wide = is_wide(p.k, d);
  const bool v_wide = is_wide(p.v, d);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = i0 + 16 * warp + lane / 4;
  const TableRows gain(slice_of<float>(p.gain, g, h), p.gain.row, row, nq);
  const TableRows bias(slice_of<float>(p.bias, g, h), p.bias.row, row, nq);
  const TableRows gate(slice_of<float>(p.gate, g, h), p.gate.row, row, nq);

  const auto load_step = [&](int step) {
    const int j0 = step * kStep;
    load_tile<T, kDim, kStep>(k_tiles + step % 2 * kStep * kStride<kDim>, k, p.k.token, j0, nk, d, k_wide);
    load_tile<T, kDim, kStep>(v_tiles + step % 2 * kStep * kStride<kDim>, v, p.v.token, j0, nk, d, v_wide);
  };
  const int steps = (nk + kStep - 1) / kStep;
  load_tile<T, kDim, kRows>(q_tile, head_of<T>(p.q, b, h), p.q.token, i0, nq, d, is_wide(p.q, d));
  if (steps > 0) load_step(0);
  commit();

  float sum[kDim / 8][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY};
  float total[2] = {0, 0};
  const float factor = static_cast<float>(p.scale) * kLog2e;
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_step(step + 1);
    commit();
    wait<1>();
    __syncthreads();
    float z[kStep / 8][4];
    product<T, kDim, kStep>(z, q_tile + 16 * warp * kStride<kDim>, k_tiles + step % 2 * kStep * kStride<kDim>);
    const int j0 = step * kStep;
    make_logits<kStep>(z, gain, bias, factor, j0, nk);
    fill_past<kStep>(z, j0, nk, -INFINITY);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = maximum[half];
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n) top = fmaxf(top, fmaxf(z[n][2 * half], z[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float shift = top == -INFINITY ? 0.0f : top;
      const float decay = power2(maximum[half] - shift);
      maximum[half] = top;
      float part = 0;
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          z[n][e] = power2(z[n][e] - shift);
          part += z[n][e];
        }
      total[half] = total[half] * decay + part;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        sum[n][2 * half] *= decay;
        sum[n][2 * half + 1] *= decay;
      }
    }
    multiply_table<kStep>(z, gate, j0, nk);
    accumulate<T, kDim, kStep>(sum, z, v_tiles + step % 2 * kStep * kStride<kDim>);
    __syncthreads();
  }
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    inverse[half] = total[half] > 0 ? 1.0f / total[half] : 0.0f;
    if (lane % 4 == 0 && row + 8 * half < nq) {
      static_cast<float*>(p.lse)[(b * p.shape.heads + h) * nq + row + 8 * half] =
          total[half] > 0 ? (maximum[half] + log2f(total[half])) * kLn2 : -INFINITY;
    }
  }
  store<T, kDim>(sum, head_of<T>(p.out, b, h), p.out.token, row, nq, d, inverse[0], inverse[1], is_wide(p.out, d));
}

template <int kDim>
constexpr int kQueryStep = kDim <= 64 ? 64 : 32;

// dK and dV of 64 keys: a warp's rows are keys, its columns queries.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) dkv_kernel(const __grid_constant__ AttentionBackward p, float* delta) {
  constexpr int kStep = kQueryStep<kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* k_tile = reinterpret_cast<T*>(shared);
  T* v_tile = k_tile + kRows * kStride<kDim>;
  T* q_tiles = v_tile + kRows * kStride<kDim>;
  T* g_tiles = q_tiles + 2 * kStep * kStride<kDim>;
  float* statistics = reinterpret_cast<float*>(g_tiles + 2 * kStep * kStride<kDim>);  // [2][2][kStep]: lse, delta
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const std::int64_t b = blockIdx.x % p.shape.batch;
  const int j0 = static_cast<int>(blockIdx.x / p.shape.batch % ((nk + kRows - 1) / kRows)) * kRows;
  const std::int64_t h = blockIdx.x / p.shape.batch / ((nk + kRows - 1) / kRows);
  const std::int64_t g = b % p.shape.groups;
  const float factor = static_cast<float>(p.scale) * kLog2e;
  const std::int64_t first_row = (b * p.shape.heads + h) * nq;
  const T* q = head_of<T>(p.q, b, h);
  const T* g_out = head_of<T>(p.dout, b, h);
  const bool q_wide = is_wide(p.q, d);
  const bool g_wide = is_wide(p.dout, d);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = j0 + 16 * warp + lane / 4;
  const TableColumns gain(slice_of<float>(p.gain, g, h), p.gain.row, row, nk);
  const TableColumns bias(slice_of<float>(p.bias, g, h), p.bias.row, row, nk);
  const TableColumns gate(slice_of<float>(p.gate, g, h), p.gate.row, row, nk);

  const auto load_step = [&](int step) {
    const int i0 = step * kStep;
    load_tile<T, kDim, kStep>(q_tiles + step % 2 * kStep * kStride<kDim>, q, p.q.token, i0, nq, d, q_wide);
    load_tile<T, kDim, kStep>(g_tiles + step % 2 * kStep * kStride<kDim>, g_out, p.dout.token, i0, nq, d, g_wide);
    float* at = statistics + step % 2 * 2 * kStep;
    for (int x = threadIdx.x; x < kStep; x += kThreads) {
      at[x] = base2_lse(p.lse, first_row + i0 + x, i0 + x < nq);
      at[kStep + x] = i0 + x < nq ? delta[first_row + i0 + x] : 0.0f;
    }
  };
  const int steps = (nq + kStep - 1) / kStep;
  load_tile<T, kDim, kRows>(k_tile, head_of<T>(p.k, b, h), p.k.token, j0, nk, d, is_wide(p.k, d));
  load_tile<T, kDim, kRows>(v_tile, head_of<T>(p.v, b, h), p.v.token, j0, nk, d, is_wide(p.v, d));
  load_step(0);
  commit();

  float dk[kDim / 8][4] = {};
  float dv[kDim / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_step(step + 1);
    commit();
    wait<1>();
    __syncthreads();
    const T* q_tile = q_tiles + step % 2 * kStep * kStride<kDim>;
    const T* g_tile = g_tiles + step % 2 * kStep * kStride<kDim>;
    const float* at = statistics + step % 2 * 2 * kStep;
    float weights[kStep / 8][4];
    float dproducts[kStep / 8][4];
    product<T, kDim, kStep>(weights, k_tile + 16 * warp * kStride<kDim>, q_tile);
    product<T, kDim, kStep>(dproducts, v_tile + 16 * warp * kStride<kDim>, g_tile);
    make_logits<kStep>(weights, gain, bias, factor, step * kStep, nq);
    multiply_table<kStep>(dproducts, gate, step * kStep, nq);
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * n + lane % 4 * 2 + e % 2;
        weights[n][e] = power2(weights[n][e] - at[column]);
        dproducts[n][e] = weights[n][e] * (dproducts[n][e] - at[kStep + column]);
      }
    multiply_table<kStep>(dproducts, gain, step * kStep, nq);
    multiply_table<kStep>(weights, gate, step * kStep, nq);
    accumulate<T, kDim, kStep>(dv, weights, g_tile);
    accumulate<T, kDim, kStep>(dk, dproducts, q_tile);
    __syncthreads();
  }
  const float scale = static_cast<float>(p.scale);
  if (p.dk.data) store<T, kDim>(dk, head_of<T>(p.dk, b, h), p.dk.token, row, nk, d, scale, scale, is_wide(p.dk, d));
  if (p.dv.data) store<T, kDim>(dv, head_of<T>(p.dv, b, h), p.dv.token, row, nk, d, 1.0f, 1.0f, is_wide(p.dv, d));
}

// dQ of 64 queries. kDelta: instead, D = rowsum(P o gate o dO V^T) itself. rowsum(dO o O) is the same but for the
// roundings of O in 16 bits, which a gate of both signs makes large beside the sum.
template <class T, int kDim, bool kDelta>
__global__ void __launch_bounds__(kThreads) dq_kernel(const __grid_constant__ AttentionBackward p, float* delta) {
  constexpr int kStep = kQueryStep<kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* q_tile = reinterpret_cast<T*>(shared);
  T* g_tile = q_tile + kRows * kStride<kDim>;
  T* k_tiles = g_tile + kRows * kStride<kDim>;
  T* v_tiles = k_tiles + 2 * kStep * kStride<kDim>;
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const std::int64_t b = blockIdx.x % p.shape.batch;
  const int i0 = static_cast<int>(blockIdx.x / p.shape.batch % ((nq + kRows - 1) / kRows)) * kRows;
  const std::int64_t h = blockIdx.x / p.shape.batch / ((nq + kRows - 1) / kRows);
  const std::int64_t g = b % p.shape.groups;
  const float factor = static_cast<float>(p.scale) * kLog2e;
  const T* k = head_of<T>(p.k, b, h);
  const T* v = head_of<T>(p.v, b, h);
  const bool k_wide = is_wide(p.k, d);
  const bool v_wide = is_wide(p.v, d);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = i0 + 16 * warp + lane / 4;
  const TableRows gain(slice_of<float>(p.gain, g, h), p.gain.row, row, nq);
  const TableRows bias(slice_of<float>(p.bias, g, h), p.bias.row, row, nq);
  const TableRows gate(slice_of<float>(p.gate, g, h), p.gate.row, row, nq);
  float lse[2], deltas[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half;
    const std::int64_t at = (b * p.shape.heads + h) * nq + i;
    lse[half] = base2_lse(p.lse, at, i < nq);
    deltas[half] = i < nq && !kDelta ? delta[at] : 0.0f;
  }

  const auto load_step = [&](int step) {
    const int j0 = step * kStep;
    load_tile<T, kDim, kStep>(k_tiles + step % 2 * kStep * kStride<kDim>, k, p.k.token, j0, nk, d, k_wide);
    load_tile<T, kDim, kStep>(v_tiles + step % 2 * kStep * kStride<kDim>, v, p.v.token, j0, nk, d, v_wide);
  };
  const int steps = (nk + kStep - 1) / kStep;
  load_tile<T, kDim, kRows>(q_tile, head_of<T>(p.q, b, h), p.q.token, i0, nq, d, is_wide(p.q, d));
  load_tile<T, kDim, kRows>(g_tile, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d, is_wide(p.dout, d));
  if (steps > 0) load_step(0);
  commit();

  float dq[kDim / 8][4] = {};
  [[maybe_unused]] float rowsum[2] = {0, 0};
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_step(step + 1);
    commit();
    wait<1>();
    __syncthreads();
    const T* k_tile = k_tiles + step % 2 * kStep * kStride<kDim>;
    float products[kStep / 8][4];
    float dproducts[kStep / 8][4];
    product<T, kDim, kStep>(products, q_tile + 16 * warp * kStride<kDim>, k_tile);
    product<T, kDim, kStep>(dproducts, g_tile + 16 * warp * kStride<kDim>, v_tiles + step % 2 * kStep * kStride<kDim>);
    const int j0 = step * kStep;
    make_logits<kStep>(products, gain, bias, factor, j0, nk);
    fill_past<kStep>(products, j0, nk, -INFINITY);
    multiply_table<kStep>(dproducts, gate, j0, nk);
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dproducts[n][e] = power2(products[n][e] - lse[e / 2]) * (dproducts[n][e] - deltas[e / 2]);
      }
    if constexpr (kDelta) {
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rowsum[e / 2] += dproducts[n][e];
    } else {
      multiply_table<kStep>(dproducts, gain, j0, nk);
      accumulate<T, kDim, kStep>(dq, dproducts, k_tile);
    }
    __syncthreads();
  }
  if constexpr (kDelta) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rowsum[half] += __shfl_xor_sync(0xffffffffu, rowsum[half], 1);
      rowsum[half] += __shfl_xor_sync(0xffffffffu, rowsum[half], 2);
      const int i = row + 8 * half;
      if (lane % 4 == 0 && i < nq) delta[(b * p.shape.heads + h) * nq + i] = rowsum[half];
    }
    return;
  }
  const float scale = static_cast<float>(p.scale);
  store<T, kDim>(dq, head_of<T>(p.dq, b, h), p.dq.token, row, nq, d, scale, scale, is_wide(p.dq, d));
}

// Adds a tile of partial sums to a gradient [.., Nq, Nk] and clears it; the first time it writes.
__device__ __forceinline__ void fold(float (&part)[8][4], float* gradient, int row, int column, int nq, int nk,
                                     float factor, bool first) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = row + e / 2 * 8;
      const int j = column + 8 * n + e % 2;
      if (gradient != nullptr && i < nq && j < nk) {
        float* at = gradient + static_cast<std::int64_t>(i) * nk + j;
        *at = part[n][e] * factor + (first ? 0.0f : *at);
      }
      part[n][e] = 0;
    }
}

template <class T, int kDim, bool kAll>
__global__ void __launch_bounds__(kThreads) tables_kernel(const __grid_constant__ AttentionBackward p, float* delta) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* tiles = reinterpret_cast<T*>(shared);  // [2][q, dout, k, v][64][kStride]
  constexpr int kTile = kRows * kStride<kDim>;
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int key_tiles = (nk + kRows - 1) / kRows;
  const int query_tiles = (nq + kRows - 1) / kRows;
  const int j0 = static_cast<int>(blockIdx.x % key_tiles) * kRows;
  const int i0 = static_cast<int>(blockIdx.x / key_tiles % query_tiles) * kRows;
  const std::int64_t gh = blockIdx.x / key_tiles / query_tiles;
  const std::int64_t h = gh % p.shape.heads;
  const std::int64_t g = gh / p.shape.heads;
  const float factor = static_cast<float>(p.scale) * kLog2e;
  const bool q_wide = is_wide(p.q, d);
  const bool g_wide = is_wide(p.dout, d);
  const bool k_wide = is_wide(p.k, d);
  const bool v_wide = is_wide(p.v, d);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = i0 + 16 * warp + lane / 4;
  const int column = j0 + lane % 4 * 2;
  const TableRows gain(slice_of<float>(p.gain, g, h), p.gain.row, row, nq);
  const TableRows bias(slice_of<float>(p.bias, g, h), p.bias.row, row, nq);
  const TableRows gate(slice_of<float>(p.gate, g, h), p.gate.row, row, nq);
  const std::int64_t slice = gh * nq * nk;
  float* dgain = p.dgain ? static_cast<float*>(p.dgain) + slice : nullptr;
  float* dbias = p.dbias ? static_cast<float*>(p.dbias) + slice : nullptr;
  float* dgate = p.dgate ? static_cast<float*>(p.dgate) + slice : nullptr;

  const int images = static_cast<int>(p.shape.batch / p.shape.groups);
  const auto load_image = [&](int x) {
    const std::int64_t b = g + x * p.shape.groups;
    T* to = tiles + x % 2 * 4 * kTile;
    load_tile<T, kDim, kRows>(to, head_of<T>(p.q, b, h), p.q.token, i0, nq, d, q_wide);
    load_tile<T, kDim, kRows>(to + kTile, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d, g_wide);
    load_tile<T, kDim, kRows>(to + 2 * kTile, head_of<T>(p.k, b, h), p.k.token, j0, nk, d, k_wide);
    load_tile<T, kDim, kRows>(to + 3 * kTile, head_of<T>(p.v, b, h), p.v.token, j0, nk, d, v_wide);
  };
  load_image(0);
  commit();
  float part_gain[8][4] = {};
  [[maybe_unused]] float part_bias[8][4] = {}, part_gate[8][4] = {};
  for (int x = 0; x < images; ++x) {
    if (x + 1 < images) load_image(x + 1);
    commit();
    wait<1>();
    __syncthreads();
    const std::int64_t b = g + x * p.shape.groups;
    float lse[2], deltas[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half;
      const std::int64_t at = (b * p.shape.heads + h) * nq + i;
      lse[half] = base2_lse(p.lse, at, i < nq);
      deltas[half] = i < nq ? delta[at] : 0.0f;
    }
    const T* from = tiles + x % 2 * 4 * kTile;
    float products[8][4];
    float dots[8][4];
    product<T, kDim, kRows>(products, from + 16 * warp * kStride<kDim>, from + 2 * kTile);
    product<T, kDim, kRows>(dots, from + kTile + 16 * warp * kStride<kDim>, from + 3 * kTile);
    float weights[8][4];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[n][e] = products[n][e];
    make_logits<kRows>(weights, gain, bias, factor, j0, nk);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weights[n][e] = power2(weights[n][e] - lse[e / 2]);
        if constexpr (kAll) part_gate[n][e] = fmaf(weights[n][e], dots[n][e], part_gate[n][e]);
      }
    if constexpr (kAll) multiply_table<kRows>(dots, gate, j0, nk);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float dlogit = weights[n][e] * (dots[n][e] - deltas[e / 2]);
        part_gain[n][e] = fmaf(dlogit, products[n][e], part_gain[n][e]);
        if constexpr (kAll) part_bias[n][e] += dlogit;
      }
    __syncthreads();
    if ((x + 1) % kImagesPerSum == 0 || x + 1 == images) {
      const bool first = x < kImagesPerSum;
      fold(part_gain, dgain, row, column, nq, nk, static_cast<float>(p.scale), first);
      if constexpr (!kAll) continue;
      fold(part_bias, dbias, row, column, nq, nk, 1.0f, first);
      fold(part_gate, dgate, row, column, nq, nk, 1.0f, first);
    }
  }
}

template <class P, class... Args>
cudaError_t start(void (*kernel)(P, Args...), std::int64_t blocks, std::size_t shared, cudaStream_t stream, const P& p,
                  Args... args) {
  if (blocks == 0) return cudaSuccess;
  const cudaError_t e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (e != cudaSuccess) return e;
  kernel<<<static_cast<unsigned>(blocks), kThreads, shared, stream>>>(p, args...);
  return cudaGetLastError();
}

template <class T, int kDim>
cudaError_t forward(const AttentionForward& p, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  return start(forward_kernel<T, kDim>, ceil_div(s.queries, kRows) * s.batch * s.heads,
               5 * kRows * kStride<kDim> * sizeof(T), stream, p);
}

template <class T, int kDim>
cudaError_t backward(const AttentionBackward& p, float* delta, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  constexpr int kStep = kQueryStep<kDim>;
  const std::size_t streamed = (2 * kRows + 4 * kStep) * kStride<kDim> * sizeof(T);
  cudaError_t e = cudaSuccess;
  if (p.gate.data) {
    e = start(dq_kernel<T, kDim, true>, ceil_div(s.queries, kRows) * s.batch * s.heads, streamed, stream, p, delta);
  }
  if (e == cudaSuccess && (p.dk.data || p.dv.data)) {
    e = start(dkv_kernel<T, kDim>, ceil_div(s.keys, kRows) * s.batch * s.heads, streamed + 4 * kStep * sizeof(float),
              stream, p, delta);
  }
  if (e == cudaSuccess && p.dq.data) {
    e = start(dq_kernel<T, kDim, false>, ceil_div(s.queries, kRows) * s.batch * s.heads, streamed, stream, p, delta);
  }
  if (e == cudaSuccess && (p.dgain || p.dbias || p.dgate)) {
    const bool all = p.dbias || p.dgate || p.gate.data;
    e = start(all ? tables_kernel<T, kDim, true> : tables_kernel<T, kDim, false>,
              ceil_div(s.queries, kRows) * ceil_div(s.keys, kRows) * s.groups * s.heads,
              8 * kRows * kStride<kDim> * sizeof(T), stream, p, delta);
  }
  return e;
}

// One translation unit per head dimension defines these.
template <int kDim>
cudaError_t launch_forward(const AttentionForward& p, cudaStream_t stream);
template <int kDim>
cudaError_t launch_backward(const AttentionBackward& p, float* delta, cudaStream_t stream);

#define VIOLIN_ATTENTION_SM80(kDim)                                                                                 \
  template <>                                                                                                       \
  cudaError_t launch_forward<kDim>(const AttentionForward& p, cudaStream_t stream) {                                \
    return p.dtype == DType::kFloat16 ? forward<__half, kDim>(p, stream) : forward<__nv_bfloat16, kDim>(p, stream); \
  }                                                                                                                 \
  template <>                                                                                                       \
  cudaError_t launch_backward<kDim>(const AttentionBackward& p, float* delta, cudaStream_t stream) {                \
    return p.dtype == DType::kFloat16 ? backward<__half, kDim>(p, delta, stream)                                    \
                                      : backward<__nv_bfloat16, kDim>(p, delta, stream);                            \
  }

}  // namespace violin::kernels::cuda::sm80
