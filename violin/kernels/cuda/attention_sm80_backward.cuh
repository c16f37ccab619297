// dK, dV and dQ of the sm_80 kernels. dK and dV are summed on the transposed logits S^T = K Q^T, so that P^T and dA^T
// already lie in registers as dV = P^T dO and dK = dA^T Q want them.
#pragma once

#include "violin/kernels/cuda/attention_sm80_tiles.cuh"

namespace violin::kernels::cuda::sm80 {

constexpr int kQueryHalf = kTileBytes / 2 + 128;  // 32 queries of a record, and its range

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
  const auto [d, nq, nk, query_tiles, key_tiles] = Sizes(p.shape);
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
// 16 bits, which a gate of both signs, or a softmax that is all but one-hot, makes large beside the sum.
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
  const auto [d, nq, nk, query_tiles, key_tiles] = Sizes(p.shape);
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
  [[maybe_unused]] float rowsum[kM][2] = {}, mass[kM][2] = {};
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
          const float weight = power2(x[m][i] - lse[m][half]);
          if constexpr (kDelta) {
            rowsum[m][half] += weight * dx[m][i];
            mass[m][half] += weight;
          } else {
            dx[m][i] = weight * (dx[m][i] - dots[m][half]) * gain(i);
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
        // A log-sum-exp in float32 leaves weights that do not add up to 1: a mean over them does not mind.
        float x = rowsum[m][half], all = mass[m][half];
        for (int s = 1; s <= 2; s *= 2) {
          x += __shfl_xor_sync(0xffffffffu, x, s);
          all += __shfl_xor_sync(0xffffffffu, all, s);
        }
        const int i = row + kTile * m + 8 * half;
        if (lane % 4 == 0 && i < nq) delta[first_row + i] = all == 0 ? 0.0f : x / all;
      }
    } else {
      store<T, kDim>(dq[m], head_of<T>(p.dq, block.b, block.h), p.dq.token, row + kTile * m, nq, d, kLn2, kLn2,
                     is_wide(p.dq, d));
    }
  }
}

}  // namespace violin::kernels::cuda::sm80
