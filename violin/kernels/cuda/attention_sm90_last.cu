// The last step of the gain's gradient on Hopper: what the clusters of dQ have left for a unit becomes one, and so do
// the images' shares in the rows of a tail.
#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kStripRows = 4;  // of a unit, for a block

// The table's gradient: sums plus the strips of the blocks that started inside a unit, in the order of the blocks.
template <bool kAdds>
__device__ void add_strips(int block, float* dgain, const TableSums& sums, const float* strips,
                           const Schedule& schedule, int nq, int nk, int walked_tiles) {
  const int tile = block / (kTile / kStripRows) % walked_tiles;
  const std::int64_t slice = block / (kTile / kStripRows) / walked_tiles;
  const int local = block % (kTile / kStripRows) * kStripRows;
  const std::int64_t pairs = (walked_tiles + kTilesPerUnit - 1) / kTilesPerUnit;
  const Strips left = strips_of(schedule, static_cast<int>(slice * pairs + tile / kTilesPerUnit));
  const int rows = min(kStripRows, nq - tile * kTile - local);
  if (left.count() == 0 && sums.data == dgain) return;
  const std::int64_t stride = sums.stride;
  const float* first = sums.data + (slice * sums.rows + tile * kTile + local) * stride;
  const float* from = strips + (static_cast<std::int64_t>(tile % kTilesPerUnit) * kTile + local) * stride;
  const std::int64_t step = kTilesPerUnit * kTile * stride;
  float* to = dgain + (slice * nq + tile * kTile + local) * nk;
  const int quads = static_cast<int>(stride / 4);
  const int all = rows * quads;
  // Several numbers of a thread are on their way at a time: one after the other, each would wait for the last.
  constexpr int kAtOnce = 4;
  for (int begin = threadIdx.x; begin < all; begin += kAtOnce * kThreads) {
    float4 sum[kAtOnce];
    const auto each = [&](auto&& act) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int x = begin + u * kThreads;
        if (x < all) act(u, x);
      }
    };
    each([&](int u, int x) { sum[u] = reinterpret_cast<const float4*>(first)[x]; });
    for (int n = 0; n < left.count(); ++n) {
      const float4* strip = reinterpret_cast<const float4*>(from + strip_of(schedule, left.cluster(n)) * step);
      float4 more[kAtOnce];
      each([&](int u, int x) { more[u] = __ldcs(strip + x); });
      each([&](int u, int) {
        sum[u] = make_float4(sum[u].x + more[u].x, sum[u].y + more[u].y, sum[u].z + more[u].z, sum[u].w + more[u].w);
      });
    }
    each([&](int u, int x) {
      const int column = x % quads * 4;
      float* row = to + static_cast<std::int64_t>(x / quads) * nk + column;
      if (nk % 4 == 0) {
        if (column >= nk) return;
        float4 result = sum[u];
        if constexpr (kAdds) {
          const float4 old = *reinterpret_cast<const float4*>(row);
          result = make_float4(old.x + result.x, old.y + result.y, old.z + result.z, old.w + result.w);
        }
        *reinterpret_cast<float4*>(row) = result;
        return;
      }
      const float numbers[4] = {sum[u].x, sum[u].y, sum[u].z, sum[u].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (column + e < nk) row[e] = kAdds ? row[e] + numbers[e] : numbers[e];
      }
    });
  }
}

// A row of a tail, 32 keys to a block: each warp sums over every eighth image.
template <bool kAdds>
__device__ void add_shares(int block, const AttentionShape& s, const Tail& tail, float* dgain) {
  __shared__ float sums[kThreads / 32][32];
  const int key_blocks = static_cast<int>((s.keys + 31) / 32);
  const int key = block % key_blocks * 32 + threadIdx.x % 32;
  const int number = block / key_blocks % tail.queries;
  const std::int64_t slice = block / key_blocks / tail.queries;  // of groups and heads
  const int warp = threadIdx.x / 32;
  float sum = 0;
  if (key < s.keys) {
#pragma unroll 8
    for (std::int64_t image = warp; image < s.batch / s.groups; image += kThreads / 32) {
      const std::int64_t head = image * s.groups * s.heads + slice;
      sum += tail.shares[(head * tail.queries + number) * s.keys + key];
    }
  }
  sums[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp > 0 || key >= s.keys) return;
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) sum += sums[w][threadIdx.x];
  float& to = dgain[(slice * s.queries + s.queries - tail.queries + number) * s.keys + key];
  to = kAdds ? to + sum : sum;
}

template <bool kAdds>
__global__ void __launch_bounds__(kThreads)
    last_kernel(const AttentionShape s, float* dgain, const TableSums sums, const float* strips,
                const Schedule schedule, const Tail tail, int tail_blocks, int walked_tiles) {
  const int block = static_cast<int>(blockIdx.x);
  if (block < tail_blocks) {
    add_shares<kAdds>(block, s, tail, dgain);
  } else {
    add_strips<kAdds>(block - tail_blocks, dgain, sums, strips, schedule, static_cast<int>(s.queries),
                      static_cast<int>(s.keys), walked_tiles);
  }
}

}  // namespace

cudaError_t start_last(const AttentionBackward& p, bool adds, const Work& work, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const std::int64_t slices = s.groups * s.heads;
  const std::int64_t walked_tiles = ceil_div(s.queries - work.tail.queries, kTile);
  const std::int64_t tail_blocks = slices * work.tail.queries * ceil_div(s.keys, 32);
  const std::int64_t blocks = tail_blocks + slices * walked_tiles * (kTile / kStripRows);
  const auto kernel = adds ? last_kernel<true> : last_kernel<false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      s, static_cast<float*>(p.dgain), work.sums, work.strips, work.schedule, work.tail, static_cast<int>(tail_blocks),
      static_cast<int>(walked_tiles));
  return cudaGetLastError();
}

}  // namespace violin::kernels::cuda::sm90
