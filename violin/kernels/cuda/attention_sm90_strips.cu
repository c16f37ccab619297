// The last step of the gain's gradient on Hopper: what the clusters of dQ have left for a unit becomes one.
#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

// The table's gradient: sums plus the strips of the blocks that started inside a unit, in the order of the blocks. A
// block does four rows of a unit.
constexpr int kStripRows = 4;
__global__ void __launch_bounds__(256) strips_kernel(float* dgain, const TableSums sums, const float* strips,
                                                     const Schedule schedule, int nq, int nk, int query_tiles) {
  const int tile = blockIdx.x / (kTile / kStripRows) % query_tiles;
  const std::int64_t slice = blockIdx.x / (kTile / kStripRows) / query_tiles;
  const int local = blockIdx.x % (kTile / kStripRows) * kStripRows;
  const std::int64_t pairs = (query_tiles + kTilesPerUnit - 1) / kTilesPerUnit;
  const Strips left = strips_of(schedule, static_cast<int>(slice * pairs + tile / kTilesPerUnit));
  const int rows = min(kStripRows, nq - tile * kTile - local);
  if (left.count() == 0 && sums.data == dgain) return;
  const std::int64_t stride = sums.stride;
  const float* first = sums.data + (slice * sums.rows + tile * kTile + local) * stride;
  const float* from = strips + (static_cast<std::int64_t>(tile % kTilesPerUnit) * kTile + local) * stride;
  const std::int64_t step = kTilesPerUnit * kTile * stride;
  float* to = dgain + (slice * nq + tile * kTile + local) * nk;
  const int quads = static_cast<int>(stride / 4);
#pragma unroll 4
  for (int x = threadIdx.x; x < rows * quads; x += blockDim.x) {
    const int r = x / quads;
    const int column = x % quads * 4;
    const std::int64_t at = r * stride + column;
    float4 sum = *reinterpret_cast<const float4*>(first + at);
    for (int n = 0; n < left.count(); ++n) {
      const float4 more =
          __ldcs(reinterpret_cast<const float4*>(from + strip_of(schedule, left.cluster(n)) * step + at));
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    float* row = to + static_cast<std::int64_t>(r) * nk + column;
    if (nk % 4 == 0) {
      if (column < nk) *reinterpret_cast<float4*>(row) = sum;
      continue;
    }
    const float numbers[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + e < nk) row[e] = numbers[e];
    }
  }
}

}  // namespace

cudaError_t start_strips(const AttentionShape& s, const Schedule& schedule, const TableSums& sums, const float* strips,
                         float* dgain, cudaStream_t stream) {
  const std::int64_t query_tiles = ceil_div(s.queries, kTile);
  const std::int64_t blocks = s.groups * s.heads * query_tiles * (kTile / kStripRows);
  strips_kernel<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
      dgain, sums, strips, schedule, static_cast<int>(s.queries), static_cast<int>(s.keys),
      static_cast<int>(query_tiles));
  return cudaGetLastError();
}

}  // namespace violin::kernels::cuda::sm90
