// What the Hopper attention kernels share.
//
// Head dimensions up to 64 (padded by the bulk copies), tiles of 64 x 64 logits per warpgroup, float16 and bfloat16, a
// gain table or none. The table is brought once per call into records: a record holds one 64 x 64 tile in the order in
// which the threads of a warpgroup hold their accumulators, so that a thread reads eight values with one 16-byte load.
// gain = base + slope * v, with base and slope of the tile in float32 at the end of the record and v a number of 16
// bits:
//   beside bfloat16, v in [0, 1] is a float16 (cheapest to widen); gains are within 2.5e-4 of the tile's range and,
//   close to the tile's largest gain, far more exact; beside float16, v in [0.5, 2) is the middle of a float, 16 bits
//   that go behind 0x3f and in front of 0x00; gains are within 1e-5 of the tile's range.
// Either way the largest gain of a tile keeps all its bits and a constant tile is exact: masks close to 1 are resolved.
#pragma once

#include <cuda.h>

#include "violin/kernels/cuda/common.cuh"
#include "violin/kernels/cuda/sm90.cuh"

namespace violin::kernels::cuda::sm90 {

constexpr int kTile = 64;
constexpr int kTileBytes = kTile * kTile * 2;
constexpr int kRecordBytes = kTileBytes + 128;
constexpr int kWarpgroup = 128;
// Per 64 queries: their log-sum-exp in base 2 (+inf past the end: the weight is then 0), then their D.
constexpr int kStatisticsFloats = 2 * kTile;

constexpr int kImagesPerItem = 4;
constexpr int kTilesPerUnit = 2;
constexpr int kShortWalk = 512;  // tokens up to which a persistent grid pays

// Everything the kernels need beside the tensor maps. Nothing here is owned.
struct Records {
  const unsigned char* rows = nullptr;     // [G, h or 1, key tile, query tile]: rows are queries
  const unsigned char* columns = nullptr;  // [G, h or 1, query tile, key tile]: rows are keys
  int heads = 0;                           // 1 where the table has no heads

  __device__ __forceinline__ const unsigned char* row_record(std::int64_t g, int h, int query_tiles, int key_tiles,
                                                             int query_tile, int key_tile) const {
    const std::int64_t slice = g * heads + (heads == 1 ? 0 : h);
    return rows + ((slice * key_tiles + key_tile) * query_tiles + query_tile) * kRecordBytes;
  }
  __device__ __forceinline__ const unsigned char* column_record(std::int64_t g, int h, int query_tiles, int key_tiles,
                                                                int query_tile, int key_tile) const {
    const std::int64_t slice = g * heads + (heads == 1 ? 0 : h);
    return columns + ((slice * query_tiles + query_tile) * key_tiles + key_tile) * kRecordBytes;
  }
};

template <class T>
__device__ __forceinline__ std::uint32_t pack(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(v);
  }
}

// A 64 x 64 tile of 16-bit numbers as the left side of four products over 16.
using Fragments = std::uint32_t[4][4];

template <class T>
__device__ __forceinline__ void pack_tile(Fragments& to, const float (&x)[32]) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) to[k][e] = pack<T>(x[8 * k + 2 * e], x[8 * k + 2 * e + 1]);
}

// The eight numbers v of piece 0 <= q < 4 of a thread's record: accumulators 8 q ... 8 q + 7. T: the type of q, k, v.
template <class T>
__device__ __forceinline__ void unpack_record(float (&v)[8], const unsigned char* record, int q) {
  const uint4 raw = *reinterpret_cast<const uint4*>(record + (q * kWarpgroup + threadIdx.x % kWarpgroup) * 16);
  const std::uint32_t parts[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (std::is_same_v<T, __half>) {
      v[2 * e] = __uint_as_float(__byte_perm(parts[e], 0x3f000000u, 0x7104));
      v[2 * e + 1] = __uint_as_float(__byte_perm(parts[e], 0x3f000000u, 0x7324));
    } else {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(parts[e]));
      v[2 * e] = pair.x;
      v[2 * e + 1] = pair.y;
    }
  }
}
struct RecordScale {
  float base;
  float slope;
};
__device__ __forceinline__ RecordScale record_scale(const unsigned char* record) {
  const float2 pair = *reinterpret_cast<const float2*>(record + kTileBytes);
  return {pair.x, pair.y};
}

// c (+)= A B^T over 64 columns; both tiles have rows of 64 numbers.
template <class T>
__device__ __forceinline__ void multiply_rows(float (&c)[32], std::uint64_t a, std::uint64_t b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<T, 0>(c, a + k * kColumnStep, b + k * kColumnStep, k > 0);
}
template <class T>
__device__ __forceinline__ void multiply_rows(float (&c)[32], const Fragments& a, std::uint64_t b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<T, 0>(c, a[k], b + k * kColumnStep, k > 0);
}
// c += A B: the rows of B are summed over.
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[32], const Fragments& a, std::uint64_t b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<T, 1>(c, a[k], b + k * kRowStep, true);
}

// Rows row and row + 8 of a warpgroup's accumulator to a head.
template <class T>
__device__ __forceinline__ void store_rows(const float (&c)[32], T* to, std::int64_t stride, int row, int rows, int d,
                                           float factor0, float factor1) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    const float factor = half ? factor1 : factor0;
    if (r >= rows) continue;
    T* at = to + r * stride + column;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (8 * n < d) {
        *reinterpret_cast<std::uint32_t*>(at + 8 * n) =
            pack<T>(c[4 * n + 2 * half] * factor, c[4 * n + 2 * half + 1] * factor);
      }
    }
  }
}

// Multiprocessors of the current device: the persistent kernels start one block on each.
inline int processors() {
  int device = 0;
  int count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 132;
  }
  return count;
}

struct Maps {
  CUtensorMap q, k, v, dout;
};

// How the queries' side is cut for dQ and the gain's gradient: units of (group, head, two query tiles), each with
// items_per_unit items of four images; a cluster of two blocks, one per query tile, takes a contiguous range of items.
struct Schedule {
  int clusters = 0;
  int items_per_unit = 0;
  std::int64_t items = 0;

  __host__ __device__ std::int64_t first(int cluster) const { return items * cluster / clusters; }
};

cudaError_t start_forward(const AttentionForward& p, const Maps& maps, const Records& records, cudaStream_t stream);
cudaError_t start_dkv(const AttentionBackward& p, const Maps& maps, const Records& records, const float* statistics,
                      cudaStream_t stream);
cudaError_t start_dq(const AttentionBackward& p, const Maps& maps, const Records& records, const float* statistics,
                     const Schedule& schedule, float* strips, cudaStream_t stream);

}  // namespace violin::kernels::cuda::sm90
