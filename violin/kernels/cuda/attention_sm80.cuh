// Attention in float16 and bfloat16 on the tensor cores of sm_80 and later: mma.sync m16n8k16 with float32 sums.
//
// Four warps work on 128 or 64 rows and stream steps of the other side's rows through two buffers that cp.async fills
// one step ahead. A warp with two tiles of 16 rows uses every matrix of the other side twice: shared memory is what
// these kernels wait for first. The head dimension is padded to kDim in shared memory only. Every sum takes its left
// side from registers: the forward pass reuses the weights it just computed; dK and dV are summed on the transposed
// logits S^T = K Q^T, so that P^T and dA^T already lie in registers as dV = P^T dO and dK = dA^T Q want them. The gain
// comes as records through the same buffers; bias and gate are read from global memory in float32, where they stay in
// L2. The tables' gradients have a kernel of their own: a block owns one tile and walks over the images in order; every
// 16 images the partial sums go to the output. No atomics. Nothing takes more than 99 KiB of shared memory, which is
// what the smaller devices have.
#pragma once

#include "violin/kernels/cuda/attention_sm80_plan.cuh"
#include "violin/kernels/cuda/attention_sm80_tiles.cuh"

namespace violin::kernels::cuda::sm80 {

constexpr std::size_t kMostShared = 99 * 1024;
constexpr float kSlack = 8;  // in powers of two
constexpr int kImagesPerSum = 16;
constexpr int kQueryHalf = kTileBytes / 2 + 128;  // 32 queries of a record, and its range

template <int kDim>
constexpr int kForwardStep = kDim <= 64 ? 64 : 32;
constexpr int kForwardTiles = 2;
template <int kDim>
constexpr std::size_t kForwardShared =
    (kForwardTiles * kTile + 4 * kForwardStep<kDim>)*Rows<kDim>::kBytes + 2 * kForwardTiles * kRecordBytes;

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ AttentionForward p, const Records records) {
  constexpr int kM = kForwardTiles;
  constexpr int kStep = kForwardStep<kDim>;
  constexpr int kStepBytes = kStep * Rows<kDim>::kBytes;
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t q_tiles = shared_address(shared);
  const std::uint32_t k_tiles = q_tiles + kM * kTile * Rows<kDim>::kBytes;
  const std::uint32_t v_tiles = k_tiles + 2 * kStepBytes;
  const std::uint32_t table = v_tiles + 2 * kStepBytes;  // [2][kM]
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const Block block(p.shape, kM * kTile, nq);
  const T* k = head_of<T>(p.k, block.b, block.h);
  const T* v = head_of<T>(p.v, block.b, block.h);
  const bool k_wide = is_wide(p.k, d);
  const bool v_wide = is_wide(p.v, d);
  const int lane = threadIdx.x % 32;
  const int row = block.first + threadIdx.x / 32 * 16 + lane / 4;
  const bool has_gain = records.data != nullptr;
  const TableView bias{slice_of<float>(p.bias, block.g, block.h), p.bias.row, 1, row, nq, nk};
  const TableView gate{slice_of<float>(p.gate, block.g, block.h), p.gate.row, 1, row, nq, nk};

  const auto load_step = [&](int step) {
    const int j0 = step * kStep;
    load_rows<T, kDim, kStep>(k_tiles + step % 2 * kStepBytes, k, p.k.token, j0, nk, d, k_wide);
    load_rows<T, kDim, kStep>(v_tiles + step % 2 * kStepBytes, v, p.v.token, j0, nk, d, v_wide);
    if (has_gain && j0 % kTile == 0) {
      load_records<kM>(table + j0 / kTile % 2 * kM * kRecordBytes, records, block.g, block.h, query_tiles, key_tiles,
                       block.first / kTile, j0 / kTile);
    }
  };
  const int steps = (nk + kStep - 1) / kStep;
  load_rows<T, kDim, kM * kTile>(q_tiles, head_of<T>(p.q, block.b, block.h), p.q.token, block.first, nq, d,
                                 is_wide(p.q, d));
  if (steps > 0) load_step(0);
  commit();

  float sum[kM][kDim / 2] = {};
  float maximum[kM][2], total[kM][2] = {};
#pragma unroll
  for (int m = 0; m < kM; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;
  const float factor = static_cast<float>(p.scale) * kLog2e;
  const float slack = std::is_same_v<T, __half> && gate ? 0.0f : kSlack;  // a gate has the rest of float16's range
  const std::uint32_t offset = record_offset<false>();
  for (int step = 0; step < steps; ++step) {
    wait<0>();
    __syncthreads();
    if (step + 1 < steps) load_step(step + 1);
    commit();
    const int j0 = step * kStep;
    float z[kM][kStep / 2];
    product<T, kDim, kM, kStep>(z, q_tiles, k_tiles + step % 2 * kStepBytes);
    float top[kM][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if (has_gain) {
        const std::uint32_t record = table + (j0 / kTile % 2 * kM + m) * kRecordBytes;
        const Gains<T, false, kStep> gains(record, offset, j0 % kTile, record + kTileBytes, factor);
#pragma unroll
        for (int i = 0; i < kStep / 2; ++i) z[m][i] *= gains[i];
      } else {
#pragma unroll
        for (int i = 0; i < kStep / 2; ++i) z[m][i] *= factor;
      }
      if (bias) {
        bias.each<kStep>(kTile * m, j0, [&](int i, float x) { z[m][i] = fmaf(kLog2e, x, z[m][i]); });
      }
      fill_past<kStep>(z[m], j0, nk, -INFINITY);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < kStep / 8; ++n) x = fmaxf(x, fmaxf(z[m][4 * n + 2 * half], z[m][4 * n + 2 * half + 1]));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        top[m][half] = x;
        grown = grown || x > maximum[m][half] + slack;
      }
    }
    // Weights may grow to 2^8 before the sums so far are scaled down: the quotient in the end is the same.
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float larger = fmaxf(maximum[m][half], top[m][half]);
          const float decay = larger == -INFINITY ? 1.0f : power2(maximum[m][half] - larger);
          maximum[m][half] = larger;
          total[m][half] *= decay;
#pragma unroll
          for (int n = 0; n < kDim / 8; ++n) {
            sum[m][4 * n + 2 * half] *= decay;
            sum[m][4 * n + 2 * half + 1] *= decay;
          }
        }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = maximum[m][half] == -INFINITY ? 0.0f : maximum[m][half];
        float part = 0;
#pragma unroll
        for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
          for (int e = 4 * n + 2 * half; e < 4 * n + 2 * half + 2; ++e) {
            z[m][e] = power2(z[m][e] - shift);
            part += z[m][e];
          }
        total[m][half] += part;
      }
      if (gate) gate.each<kStep>(kTile * m, j0, [&](int i, float x) { z[m][i] *= x; });
    }
    accumulate<T, kDim, kM, kStep>(sum, z, v_tiles + step % 2 * kStepBytes);
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = total[m][half];
      x += __shfl_xor_sync(0xffffffffu, x, 1);
      x += __shfl_xor_sync(0xffffffffu, x, 2);
      inverse[half] = x > 0 ? 1.0f / x : 0.0f;
      const int i = row + kTile * m + 8 * half;
      if (lane % 4 == 0 && i < nq) {
        static_cast<float*>(p.lse)[(block.b * p.shape.heads + block.h) * nq + i] =
            x > 0 ? (maximum[m][half] + log2f(x)) * kLn2 : -INFINITY;
      }
    }
    store<T, kDim>(sum[m], head_of<T>(p.out, block.b, block.h), p.out.token, row + kTile * m, nq, d, inverse[0],
                   inverse[1], is_wide(p.out, d));
  }
}

// Tiles of 64 own rows, and rows of the other side per step, in the kernels for dK, dV and for dQ.
template <int kDim>
constexpr int kBackwardTiles = kDim <= 64 ? 2 : 1;
constexpr int kBackwardStep = 32;
template <int kDim>
constexpr std::size_t kRowsShared = (2 * kBackwardTiles<kDim> * kTile + 4 * kBackwardStep) * Rows<kDim>::kBytes;
template <int kDim>
constexpr std::size_t kDkvShared =
    kRowsShared<kDim> + 2 * kBackwardTiles<kDim> * kQueryHalf + 4 * kBackwardStep * sizeof(float);
template <int kDim>
constexpr std::size_t kDqShared = kRowsShared<kDim> + 2 * kBackwardTiles<kDim> * kRecordBytes;

// dK and dV: a warp's rows are keys, its columns queries.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    dkv_kernel(const __grid_constant__ AttentionBackward p, const Records records, const float* delta) {
  constexpr int kM = kBackwardTiles<kDim>;
  constexpr int kStep = kBackwardStep;
  constexpr int kStepBytes = kStep * Rows<kDim>::kBytes;
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t k_tiles = shared_address(shared);
  const std::uint32_t v_tiles = k_tiles + kM * kTile * Rows<kDim>::kBytes;
  const std::uint32_t q_tiles = v_tiles + kM * kTile * Rows<kDim>::kBytes;
  const std::uint32_t g_tiles = q_tiles + 2 * kStepBytes;
  const std::uint32_t table = g_tiles + 2 * kStepBytes;  // [2][kM]
  float* statistics =
      reinterpret_cast<float*>(shared + kRowsShared<kDim> + 2 * kM * kQueryHalf);  // [2][2][kStep]: lse, delta
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const Block block(p.shape, kM * kTile, nk);
  const std::int64_t first_row = (block.b * p.shape.heads + block.h) * nq;
  const T* q = head_of<T>(p.q, block.b, block.h);
  const T* dout = head_of<T>(p.dout, block.b, block.h);
  const bool q_wide = is_wide(p.q, d);
  const bool g_wide = is_wide(p.dout, d);
  const int lane = threadIdx.x % 32;
  const int row = block.first + threadIdx.x / 32 * 16 + lane / 4;
  const bool has_gain = records.data != nullptr;
  const TableView bias{slice_of<float>(p.bias, block.g, block.h), 1, p.bias.row, row, nk, nq};
  const TableView gate{slice_of<float>(p.gate, block.g, block.h), 1, p.gate.row, row, nk, nq};

  const auto load_step = [&](int step) {
    const int i0 = step * kStep;
    load_rows<T, kDim, kStep>(q_tiles + step % 2 * kStepBytes, q, p.q.token, i0, nq, d, q_wide);
    load_rows<T, kDim, kStep>(g_tiles + step % 2 * kStepBytes, dout, p.dout.token, i0, nq, d, g_wide);
    if (has_gain) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int tile = min(block.first / kTile + m, key_tiles - 1);
        const unsigned char* record = records.at(block.g, block.h, query_tiles, key_tiles, i0 / kTile, tile);
        const std::uint32_t to = table + (step % 2 * kM + m) * kQueryHalf;
        load_bytes(to, record + i0 % kTile * 128, kTileBytes / 2);
        if (threadIdx.x == 0) copy_async(to + kTileBytes / 2, record + kTileBytes, true);
      }
    }
    if (threadIdx.x < kStep) {
      const int i = i0 + static_cast<int>(threadIdx.x);
      float* at = statistics + step % 2 * 2 * kStep + threadIdx.x;
      at[0] = base2_lse(p.lse, first_row + i, i < nq);
      at[kStep] = i < nq ? delta[first_row + i] : 0.0f;
    }
  };
  const int steps = (nq + kStep - 1) / kStep;
  load_rows<T, kDim, kM * kTile>(k_tiles, head_of<T>(p.k, block.b, block.h), p.k.token, block.first, nk, d,
                                 is_wide(p.k, d));
  load_rows<T, kDim, kM * kTile>(v_tiles, head_of<T>(p.v, block.b, block.h), p.v.token, block.first, nk, d,
                                 is_wide(p.v, d));
  load_step(0);
  commit();

  float dk[kM][kDim / 2] = {};
  float dv[kM][kDim / 2] = {};
  const float scale = static_cast<float>(p.scale);
  const float factor = scale * kLog2e;
  const std::uint32_t offset = record_offset<true>();
  for (int step = 0; step < steps; ++step) {
    wait<0>();
    __syncthreads();
    if (step + 1 < steps) load_step(step + 1);
    commit();
    const std::uint32_t q_tile = q_tiles + step % 2 * kStepBytes;
    const std::uint32_t g_tile = g_tiles + step % 2 * kStepBytes;
    const float* at = statistics + step % 2 * 2 * kStep;
    float x[kM][kStep / 2];   // logits, weights, their part of dV
    float dx[kM][kStep / 2];  // dO V^T, gradients of the products
    product<T, kDim, kM, kStep>(x, k_tiles, q_tile);
    product<T, kDim, kM, kStep>(dx, v_tiles, g_tile);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const auto finish = [&](const auto& gain) {
        float weights[kStep / 2];
#pragma unroll
        for (int i = 0; i < kStep / 2; ++i) weights[i] = x[m][i] * gain(i);
        if (bias) {
          bias.each<kStep>(kTile * m, step * kStep, [&](int i, float t) { weights[i] = fmaf(kLog2e, t, weights[i]); });
        }
        if (gate) gate.each<kStep>(kTile * m, step * kStep, [&](int i, float t) { dx[m][i] *= t; });
#pragma unroll
        for (int n = 0; n < kStep / 8; ++n) {
          const int column = 8 * n + lane % 4 * 2;
          const float2 lse = *reinterpret_cast<const float2*>(at + column);
          const float2 dot = *reinterpret_cast<const float2*>(at + kStep + column);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = 4 * n + e;
            weights[i] = power2(weights[i] - (e % 2 ? lse.y : lse.x));
            dx[m][i] = weights[i] * (dx[m][i] - (e % 2 ? dot.y : dot.x)) * gain(i);
          }
        }
        if (gate) gate.each<kStep>(kTile * m, step * kStep, [&](int i, float t) { weights[i] *= t; });
#pragma unroll
        for (int i = 0; i < kStep / 2; ++i) x[m][i] = weights[i];
      };
      if (has_gain) {
        const std::uint32_t record = table + (step % 2 * kM + m) * kQueryHalf;
        const Gains<T, true, kStep> gains(record, offset, 0, record + kTileBytes / 2, factor);
        finish([&](int i) { return gains[i]; });
      } else {
        finish([&](int) { return factor; });
      }
    }
    accumulate<T, kDim, kM, kStep>(dv, x, g_tile);
    accumulate<T, kDim, kM, kStep>(dk, dx, q_tile);
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    // Gains, or 1 in their place, were multiplied by scale * log2(e).
    if (p.dk.data) {
      store<T, kDim>(dk[m], head_of<T>(p.dk, block.b, block.h), p.dk.token, row + kTile * m, nk, d, kLn2, kLn2,
                     is_wide(p.dk, d));
    }
    if (p.dv.data) {
      store<T, kDim>(dv[m], head_of<T>(p.dv, block.b, block.h), p.dv.token, row + kTile * m, nk, d, 1.0f, 1.0f,
                     is_wide(p.dv, d));
    }
  }
}

// dQ. kDelta: instead, D = rowsum(P o gate o dO V^T) itself. rowsum(dO o O) is the same but for the roundings of O in
// 16 bits, which a gate of both signs makes large beside the sum.
template <class T, int kDim, bool kDelta>
__global__ void __launch_bounds__(kThreads, 2)
    dq_kernel(const __grid_constant__ AttentionBackward p, const Records records, float* delta) {
  constexpr int kM = kBackwardTiles<kDim>;
  constexpr int kStep = kBackwardStep;
  constexpr int kStepBytes = kStep * Rows<kDim>::kBytes;
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t q_tiles = shared_address(shared);
  const std::uint32_t g_tiles = q_tiles + kM * kTile * Rows<kDim>::kBytes;
  const std::uint32_t k_tiles = g_tiles + kM * kTile * Rows<kDim>::kBytes;
  const std::uint32_t v_tiles = k_tiles + 2 * kStepBytes;
  const std::uint32_t table = v_tiles + 2 * kStepBytes;  // [2][kM]
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const Block block(p.shape, kM * kTile, nq);
  const T* k = head_of<T>(p.k, block.b, block.h);
  const T* v = head_of<T>(p.v, block.b, block.h);
  const bool k_wide = is_wide(p.k, d);
  const bool v_wide = is_wide(p.v, d);
  const int lane = threadIdx.x % 32;
  const int row = block.first + threadIdx.x / 32 * 16 + lane / 4;
  const bool has_gain = records.data != nullptr;
  const TableView bias{slice_of<float>(p.bias, block.g, block.h), p.bias.row, 1, row, nq, nk};
  const TableView gate{slice_of<float>(p.gate, block.g, block.h), p.gate.row, 1, row, nq, nk};
  const std::int64_t first_row = (block.b * p.shape.heads + block.h) * nq;
  float lse[kM][2], dots[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + kTile * m + 8 * half;
      lse[m][half] = base2_lse(p.lse, first_row + i, i < nq);
      dots[m][half] = i < nq && !kDelta ? delta[first_row + i] : 0.0f;
    }

  const auto load_step = [&](int step) {
    const int j0 = step * kStep;
    load_rows<T, kDim, kStep>(k_tiles + step % 2 * kStepBytes, k, p.k.token, j0, nk, d, k_wide);
    load_rows<T, kDim, kStep>(v_tiles + step % 2 * kStepBytes, v, p.v.token, j0, nk, d, v_wide);
    if (has_gain && j0 % kTile == 0) {
      load_records<kM>(table + j0 / kTile % 2 * kM * kRecordBytes, records, block.g, block.h, query_tiles, key_tiles,
                       block.first / kTile, j0 / kTile);
    }
  };
  const int steps = (nk + kStep - 1) / kStep;
  load_rows<T, kDim, kM * kTile>(q_tiles, head_of<T>(p.q, block.b, block.h), p.q.token, block.first, nq, d,
                                 is_wide(p.q, d));
  load_rows<T, kDim, kM * kTile>(g_tiles, head_of<T>(p.dout, block.b, block.h), p.dout.token, block.first, nq, d,
                                 is_wide(p.dout, d));
  if (steps > 0) load_step(0);
  commit();

  float dq[kM][kDim / 2] = {};
  [[maybe_unused]] float rowsum[kM][2] = {};
  const float factor = static_cast<float>(p.scale) * kLog2e;
  const std::uint32_t offset = record_offset<false>();
  for (int step = 0; step < steps; ++step) {
    wait<0>();
    __syncthreads();
    if (step + 1 < steps) load_step(step + 1);
    commit();
    const int j0 = step * kStep;
    const std::uint32_t k_tile = k_tiles + step % 2 * kStepBytes;
    float x[kM][kStep / 2];
    float dx[kM][kStep / 2];
    product<T, kDim, kM, kStep>(x, q_tiles, k_tile);
    product<T, kDim, kM, kStep>(dx, g_tiles, v_tiles + step % 2 * kStepBytes);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const auto finish = [&](const auto& gain) {
#pragma unroll
        for (int i = 0; i < kStep / 2; ++i) x[m][i] *= gain(i);
        if (bias) bias.each<kStep>(kTile * m, j0, [&](int i, float t) { x[m][i] = fmaf(kLog2e, t, x[m][i]); });
        fill_past<kStep>(x[m], j0, nk, -INFINITY);
        if (gate) gate.each<kStep>(kTile * m, j0, [&](int i, float t) { dx[m][i] *= t; });
#pragma unroll
        for (int i = 0; i < kStep / 2; ++i) {
          const int half = i % 4 / 2;
          dx[m][i] = power2(x[m][i] - lse[m][half]) * (dx[m][i] - dots[m][half]);
          if constexpr (kDelta) {
            rowsum[m][half] += dx[m][i];
          } else {
            dx[m][i] *= gain(i);
          }
        }
      };
      if (has_gain) {
        const std::uint32_t record = table + (j0 / kTile % 2 * kM + m) * kRecordBytes;
        const Gains<T, false, kStep> gains(record, offset, j0 % kTile, record + kTileBytes, factor);
        finish([&](int i) { return gains[i]; });
      } else {
        finish([&](int) { return factor; });
      }
    }
    if constexpr (!kDelta) accumulate<T, kDim, kM, kStep>(dq, dx, k_tile);
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    if constexpr (kDelta) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = rowsum[m][half];
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        x += __shfl_xor_sync(0xffffffffu, x, 2);
        const int i = row + kTile * m + 8 * half;
        if (lane % 4 == 0 && i < nq) delta[first_row + i] = x;
      }
    } else {
      store<T, kDim>(dq[m], head_of<T>(p.dq, block.b, block.h), p.dq.token, row + kTile * m, nq, d, kLn2, kLn2,
                     is_wide(p.dq, d));
    }
  }
}

// Adds a tile of partial sums to a gradient [.., Nq, Nk] and clears it; the first time it writes.
__device__ __forceinline__ void fold(float (&part)[kTile / 2], float* gradient, int row, int column, int nq, int nk,
                                     float factor, bool first) {
  asm volatile("" : "+r"(row), "+r"(column));  // 32 addresses must not be kept over the walk
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) {
    const int y = row + i % 4 / 2 * 8;
    const int x = column + i / 4 * 8 + i % 2;
    if (gradient != nullptr && y < nq && x < nk) {
      float* at = gradient + static_cast<std::int64_t>(y) * nk + x;
      *at = part[i] * factor + (first ? 0.0f : *at);
    }
    part[i] = 0;
  }
}

template <int kDim, bool kAll>
constexpr std::size_t kTablesShared =
    (2 * tables_tiles(kDim, kAll) + 2) * kTile * Rows<kDim>::kBytes + tables_tiles(kDim, kAll) * kRecordBytes;

// kAll: of all three tables; otherwise of the gain alone, without bias and gate. blockIdx.y: the part of the images.
// The next image is loaded while the elements of this one are worked on.
template <class T, int kDim, bool kAll>
__global__ void __launch_bounds__(kThreads, 2)
    tables_kernel(const __grid_constant__ AttentionBackward p, const Records records, const float* delta,
                  const TableGradients to) {
  constexpr int kM = tables_tiles(kDim, kAll);
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t q_tiles = shared_address(shared);
  const std::uint32_t g_tiles = q_tiles + kM * kTile * Rows<kDim>::kBytes;
  const std::uint32_t k_tile = g_tiles + kM * kTile * Rows<kDim>::kBytes;
  const std::uint32_t v_tile = k_tile + kTile * Rows<kDim>::kBytes;
  const std::uint32_t table = v_tile + kTile * Rows<kDim>::kBytes;  // [kM]
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int query_blocks = (query_tiles + kM - 1) / kM;
  const int j0 = static_cast<int>(blockIdx.x) % key_tiles * kTile;
  const int i0 = static_cast<int>(blockIdx.x) / key_tiles % query_blocks * kM * kTile;
  const int gh = static_cast<int>(blockIdx.x) / key_tiles / query_blocks;
  const int h = gh % static_cast<int>(p.shape.heads);
  const int g = gh / static_cast<int>(p.shape.heads);
  const float factor = static_cast<float>(p.scale) * kLog2e;
  const bool q_wide = is_wide(p.q, d);
  const bool g_wide = is_wide(p.dout, d);
  const bool k_wide = is_wide(p.k, d);
  const bool v_wide = is_wide(p.v, d);
  const int lane = threadIdx.x % 32;
  const int row = i0 + threadIdx.x / 32 * 16 + lane / 4;
  const int column = j0 + lane % 4 * 2;
  const bool has_gain = records.data != nullptr;
  const TableView bias{slice_of<float>(p.bias, g, h), p.bias.row, 1, row, nq, nk};
  const TableView gate{slice_of<float>(p.gate, g, h), p.gate.row, 1, row, nq, nk};
  const int split = static_cast<int>(blockIdx.y);
  const std::int64_t at = split * to.size + static_cast<std::int64_t>(gh) * nq * nk;
  const auto slice = [&](float* gradient) { return gradient ? gradient + at : nullptr; };
  float* dgain = slice(to.gain);
  float* dbias = slice(to.bias);
  float* dgate = slice(to.gate);

  const int groups = static_cast<int>(p.shape.groups);
  const int images = static_cast<int>(p.shape.batch) / groups;
  const int first_image = images * split / to.splits;
  const int last_image = images * (split + 1) / to.splits;
  const auto load_image = [&](int x) {
    const int b = g + x * groups;
    load_rows<T, kDim, kM * kTile>(q_tiles, head_of<T>(p.q, b, h), p.q.token, i0, nq, d, q_wide);
    load_rows<T, kDim, kM * kTile>(g_tiles, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d, g_wide);
    load_rows<T, kDim, kTile>(k_tile, head_of<T>(p.k, b, h), p.k.token, j0, nk, d, k_wide);
    load_rows<T, kDim, kTile>(v_tile, head_of<T>(p.v, b, h), p.v.token, j0, nk, d, v_wide);
  };
  if (has_gain) {
    load_records<kM>(table, records, g, h, query_tiles, key_tiles, i0 / kTile, j0 / kTile);
  }
  load_image(first_image);
  commit();
  float part_gain[kM][kTile / 2] = {};
  [[maybe_unused]] float part_bias[kTile / 2] = {}, part_gate[kTile / 2] = {};
  const std::uint32_t offset = record_offset<false>();
  for (int image = first_image; image < last_image; ++image) {
    wait<0>();
    __syncthreads();
    const std::int64_t first_row = ((g + image * groups) * p.shape.heads + h) * nq;
    float lse[kM][2], dots[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + kTile * m + 8 * half;
        lse[m][half] = base2_lse(p.lse, first_row + i, i < nq);
        dots[m][half] = i < nq ? delta[first_row + i] : 0.0f;
      }
    float x[kM][kTile / 2];
    float dx[kM][kTile / 2];
    product<T, kDim, kM, kTile>(x, q_tiles, k_tile);
    product<T, kDim, kM, kTile>(dx, g_tiles, v_tile);
    __syncthreads();
    if (image + 1 < last_image) load_image(image + 1);
    commit();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const auto finish = [&](const auto& gain) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {  // 16 columns at a time
          float weights[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) weights[i] = x[m][8 * c + i] * gain(8 * c + i);
          if constexpr (kAll) {
            if (bias)
              bias.each<16>(kTile * m, j0 + 16 * c, [&](int i, float t) { weights[i] = fmaf(kLog2e, t, weights[i]); });
          }
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            weights[i] = power2(weights[i] - lse[m][i % 4 / 2]);
            if constexpr (kAll) part_gate[8 * c + i] = fmaf(weights[i], dx[m][8 * c + i], part_gate[8 * c + i]);
          }
          if constexpr (kAll) {
            if (gate) gate.each<16>(kTile * m, j0 + 16 * c, [&](int i, float t) { dx[m][8 * c + i] *= t; });
          }
#pragma unroll
          for (int i = 8 * c; i < 8 * c + 8; ++i) {
            const float dlogit = weights[i % 8] * (dx[m][i] - dots[m][i % 4 / 2]);
            part_gain[m][i] = fmaf(dlogit, x[m][i], part_gain[m][i]);
            if constexpr (kAll) part_bias[i] += dlogit;
          }
        }
      };
      if (has_gain) {
        const std::uint32_t record = table + m * kRecordBytes;
        const Gains<T, false, kTile> gains(record, offset, 0, record + kTileBytes, factor);
        finish([&](int i) { return gains[i]; });
      } else {
        finish([&](int) { return factor; });
      }
    }
    const int done = image + 1 - first_image;
    if (done % kImagesPerSum == 0 || image + 1 == last_image) {
      const bool first = done <= kImagesPerSum;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        fold(part_gain[m], dgain, row + kTile * m, column, nq, nk, static_cast<float>(p.scale), first);
      }
      if constexpr (kAll) {
        fold(part_bias, dbias, row, column, nq, nk, 1.0f, first);
        fold(part_gate, dgate, row, column, nq, nk, 1.0f, first);
      }
    }
  }
}

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
  if (p.gate.data) {
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
