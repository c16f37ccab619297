// Makes the records of a gain table.
#include "violin/kernels/cuda/records.cuh"

#include "violin/kernels/cuda/attention.h"

#include <cfloat>

namespace violin::kernels::cuda {
namespace {

constexpr int kThreads = 128;

// One block per 64 x 64 tile of the gain table: finds the tile's range and writes the record. A thread has four pieces
// of eight neighbours in a row. Past the edges stands the number that the range is measured from.
template <class T>
__global__ void __launch_bounds__(kThreads)
    records_kernel(const Table gain, std::int64_t slices_per_group, int nq, int nk, unsigned char* records) {
  __shared__ float extremes[2][4];
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int key_tile = static_cast<int>(blockIdx.x % key_tiles);
  const int query_tile = static_cast<int>(blockIdx.x / key_tiles % query_tiles);
  const std::int64_t slice = blockIdx.x / key_tiles / query_tiles;
  const float* from = static_cast<const float*>(gain.data) + slice / slices_per_group * gain.group +
                      slice % slices_per_group * gain.head;
  const int column = threadIdx.x % 8 * 8;
  const int j = key_tile * kTile + column;
  float values[4][8];
  float low = INFINITY;
  float high = -INFINITY;
  bool invalid = false;
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int i = query_tile * kTile + threadIdx.x / 8 + 16 * x;
    const float* at = from + i * gain.row + j;
    if (i < nq && j + 8 <= nk && reinterpret_cast<std::uintptr_t>(at) % 16 == 0) {
      *reinterpret_cast<float4*>(values[x]) = __ldcs(reinterpret_cast<const float4*>(at));
      *reinterpret_cast<float4*>(values[x] + 4) = __ldcs(reinterpret_cast<const float4*>(at) + 1);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) values[x][e] = i < nq && j + e < nk ? at[e] : INFINITY;
    }
  }
#pragma unroll
  for (int x = 0; x < 4; ++x)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const bool inside = query_tile * kTile + threadIdx.x / 8 + 16 * x < nq && j + e < nk;
      low = inside ? fminf(low, values[x][e]) : low;
      high = inside ? fmaxf(high, values[x][e]) : high;
      invalid = invalid || (inside && isnan(values[x][e]));
    }
  for (int s = 16; s > 0; s /= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, s));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, s));
  }
  if (threadIdx.x % 32 == 0) {
    extremes[0][threadIdx.x / 32] = low;
    extremes[1][threadIdx.x / 32] = high;
  }
  invalid = __syncthreads_or(invalid);
  for (int w = 0; w < 4; ++w) {
    low = fminf(low, extremes[0][w]);
    high = fmaxf(high, extremes[1][w]);
  }
  // gain = base + slope * v with v = (origin - gain) * inverse + first.
  constexpr bool kFine = std::is_same_v<T, __half>;
  const float origin = kFine || high >= -low ? high : low;
  const float range = kFine ? (high - low) / 1.499f : origin;
  // A range so small that its inverse is infinite (decays far from a token) is none: the tile is constant.
  const float inverse = fabsf(range) >= FLT_MIN ? 1 / range : 0.0f;
  constexpr float kFirst = kFine ? 0.5f : 0.0f;
  unsigned char* record = records + ((slice * key_tiles + key_tile) * query_tiles + query_tile) * kRecordBytes;
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int row = threadIdx.x / 8 + 16 * x;
    std::uint32_t parts[4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const bool inside = query_tile * kTile + row < nq && j + e < nk;
      const float v = fmaf(inside ? origin - values[x][e] : 0.0f, inverse, kFirst);
      const std::uint32_t bits =
          kFine ? (__float_as_uint(v) + 0x80u - 0x3f000000u) >> 8 : __half_as_ushort(__float2half_rn(v));
      parts[e / 2] |= bits << 16 * (e % 2);
    }
    *reinterpret_cast<uint4*>(record + row * 128 + (column / 8 ^ row % 8) * 16) =
        make_uint4(parts[0], parts[1], parts[2], parts[3]);
  }
  if (threadIdx.x < kRangeCopies) {
    // Beside float16, v has no form for what is not a number: then all of the tile is none.
    const float base = kFine && invalid ? NAN : fmaf(kFirst, range, origin);
    reinterpret_cast<float2*>(record + kTileBytes)[threadIdx.x] = make_float2(base, -range);
  }
}

std::int64_t record_groups(const Table& gain, const AttentionShape& s) {
  return gain.group == 0 ? 1 : s.groups;
}
std::int64_t record_heads(const Table& gain, const AttentionShape& s) {
  return gain.head == 0 ? 1 : s.heads;
}

}  // namespace

std::size_t record_bytes(const Table& gain, const AttentionShape& s) {
  if (gain.data == nullptr || gain.packed) return 0;
  return align256(static_cast<std::size_t>(record_groups(gain, s) * record_heads(gain, s) * ceil_div(s.queries, kTile) *
                                           ceil_div(s.keys, kTile)) *
                  kRecordBytes);
}

cudaError_t make_records(const Table& gain, const AttentionShape& s, DType dtype, void* data, Records& records,
                         cudaStream_t stream) {
  if (gain.data == nullptr || s.queries == 0 || s.keys == 0) return cudaSuccess;
  const std::int64_t groups = record_groups(gain, s);
  const std::int64_t heads = record_heads(gain, s);
  unsigned char* to = static_cast<unsigned char*>(data);
  records = {gain.packed ? static_cast<const unsigned char*>(gain.data) : to, static_cast<int>(groups),
             static_cast<int>(heads)};
  if (gain.packed) return cudaSuccess;
  const std::int64_t blocks = groups * heads * ceil_div(s.queries, kTile) * ceil_div(s.keys, kTile);
  const auto kernel = dtype == DType::kFloat16 ? records_kernel<__half> : records_kernel<__nv_bfloat16>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(gain, heads, static_cast<int>(s.queries),
                                                                 static_cast<int>(s.keys), to);
  return cudaGetLastError();
}

cudaError_t pack_gain(const Table& gain, const AttentionShape& s, DType dtype, void* to, cudaStream_t stream) {
  Records records;
  return make_records(gain, s, dtype, to, records, stream);
}

}  // namespace violin::kernels::cuda
