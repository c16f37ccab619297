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

#include "violin/kernels/cuda/attention_sm80_tiles.cuh"

namespace violin::kernels::cuda::sm80 {

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
