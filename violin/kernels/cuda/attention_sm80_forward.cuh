// Forward pass of the sm_80 kernels. The weights that a warp just computed are the left side of the product with V.
#pragma once

#include "violin/kernels/cuda/attention_sm80_tiles.cuh"

namespace violin::kernels::cuda::sm80 {

constexpr float kSlack = 8;  // in powers of two

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
      inverse[half] = x == 0 ? 0.0f : 1.0f / x;  // and not a number where x is none
      const int i = row + kTile * m + 8 * half;
      if (lane % 4 == 0 && i < nq) {
        static_cast<float*>(p.lse)[(block.b * p.shape.heads + block.h) * nq + i] =
            x == 0 ? -INFINITY : (maximum[m][half] + log2f(x)) * kLn2;
      }
    }
    store<T, kDim>(sum[m], head_of<T>(p.out, block.b, block.h), p.out.token, row + kTile * m, nq, d, inverse[0],
                   inverse[1], is_wide(p.out, d));
  }
}

}  // namespace violin::kernels::cuda::sm80
