// Gradients of the tables in the sm_80 kernels: a block owns one tile and walks over the images in order; every 16
// images the partial sums go to the output. No atomics.
#pragma once

#include "violin/kernels/cuda/attention_sm80_plan.cuh"
#include "violin/kernels/cuda/attention_sm80_tiles.cuh"

namespace violin::kernels::cuda::sm80 {

constexpr int kImagesPerSum = 16;

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
  const auto [d, nq, nk, query_tiles, key_tiles] = Sizes(p.shape);
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

}  // namespace violin::kernels::cuda::sm80
