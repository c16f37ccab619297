// The gain table as the 16-bit kernels read it: once per call it is brought into records, each a 64 x 64 tile of 16-bit
// numbers as rows of 128 bytes, one per query, with the 16-byte pieces of row r swapped by exclusive or with r % 8.
// ldmatrix hands them out in the order of the accumulators of four warps with 16 rows each, by queries or, transposed,
// by keys. gain = base + slope * v, with base and slope of the tile in float32 at the end of the record and v a number
// of 16 bits:
//   beside bfloat16, v = 1 - gain / base in [0, 2] is a float16 (cheapest to widen), base the largest gain of the tile
//   by size and slope = -base; gains are within 5e-4 of base and, close to base, far more exact; beside float16, v in
//   [0.5, 2) is the middle of a float, 16 bits that go behind 0x3f and in front of 0x00; gains are within 1e-5 of the
//   tile's range.
// Either way the largest gain of a tile keeps all its bits and a constant tile is exact: masks close to 1 are resolved.
#pragma once

#include <cfloat>

#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda {

constexpr int kTile = 64;
constexpr int kTileBytes = kTile * kTile * 2;
constexpr int kRangeCopies = 16;  // of base and slope, so that a lane can have one for itself
constexpr int kRecordBytes = kTileBytes + 8 * kRangeCopies;
static_assert(kTile == kPackedTile && kRecordBytes == kPackedBytes);

// All records of a call. Nothing here is owned.
struct Records {
  const unsigned char* data = nullptr;  // [groups, heads, key tile, query tile]
  int groups = 0;                       // 1 where the table has none
  int heads = 0;                        // 1 where the table has none

  __device__ __forceinline__ const unsigned char* at(std::int64_t g, int h, int query_tiles, int key_tiles,
                                                     int query_tile, int key_tile) const {
    const std::int64_t slice = (groups == 1 ? 0 : g) * heads + (heads == 1 ? 0 : h);
    return data + ((slice * key_tiles + key_tile) * query_tiles + query_tile) * kRecordBytes;
  }
};

// Where a thread's part starts in a record, by queries or transposed. The compiler must not compute it again in every
// step.
template <bool kTransposed>
__device__ __forceinline__ std::uint32_t record_offset() {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int row = kTransposed ? lane / 16 * 8 + lane % 8 : 16 * warp + lane % 16;
  const int piece = (kTransposed ? 2 * warp + lane / 8 % 2 : lane / 16) ^ (row % 8);
  std::uint32_t offset = row * 128 + piece * 16;
  asm volatile("" : "+r"(offset));
  return offset;
}
// The number v in one half of a register. T: the type of q, k, v.
template <class T>
__device__ __forceinline__ float widen(std::uint32_t pair, bool upper) {
  if constexpr (std::is_same_v<T, __half>) {
    return __uint_as_float(__byte_perm(pair, 0x3f000000u, upper ? 0x7324 : 0x7104));
  } else {
    const __half2 both = reinterpret_cast<const __half2&>(pair);
    return upper ? __high2float(both) : __low2float(both);
  }
}

// Whoever makes a record has kRecordThreads threads, each with four pieces of eight neighbours in a row of the tile.
constexpr int kRecordThreads = 128;
__device__ __forceinline__ int piece_row(int x) {
  return static_cast<int>(threadIdx.x) / 8 + 16 * x;
}
__device__ __forceinline__ int piece_column() {
  return static_cast<int>(threadIdx.x) % 8 * 8;
}
// Finds the range of a tile of which `rows` x `columns` exist (kWhole: all of it) and brings a thread's pieces into 16
// bits. Where the tile does not exist, values are free and become the number that the range is measured from. Returns
// base and slope.
template <class T, bool kWhole>
__device__ __forceinline__ float2 encode_tile(const float (&values)[4][8], int rows, int columns, uint4 (&pieces)[4]) {
  __shared__ float extremes[2][4];
  float low = INFINITY;
  float high = -INFINITY;
  bool invalid = false;
  const auto inside = [&](int x, int e) { return kWhole || (piece_row(x) < rows && piece_column() + e < columns); };
#pragma unroll
  for (int x = 0; x < 4; ++x)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      low = inside(x, e) ? fminf(low, values[x][e]) : low;
      high = inside(x, e) ? fmaxf(high, values[x][e]) : high;
      invalid = invalid || (inside(x, e) && isnan(values[x][e]));
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
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    std::uint32_t parts[4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float v = fmaf(inside(x, e) ? origin - values[x][e] : 0.0f, inverse, kFirst);
      const std::uint32_t bits =
          kFine ? (__float_as_uint(v) + 0x80u - 0x3f000000u) >> 8 : __half_as_ushort(__float2half_rn(v));
      parts[e / 2] |= bits << 16 * (e % 2);
    }
    pieces[x] = make_uint4(parts[0], parts[1], parts[2], parts[3]);
  }
  // Beside float16, v has no form for what is not a number: then all of the tile is none.
  return make_float2(kFine && invalid ? NAN : fmaf(kFirst, range, origin), -range);
}
template <class T>
__device__ __forceinline__ float2 encode_tile(const float (&values)[4][8], int rows, int columns, uint4 (&pieces)[4]) {
  return rows >= kTile && columns >= kTile ? encode_tile<T, true>(values, rows, columns, pieces)
                                           : encode_tile<T, false>(values, rows, columns, pieces);
}
__device__ __forceinline__ void store_record(unsigned char* record, const uint4 (&pieces)[4], float2 range) {
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int row = piece_row(x);
    *reinterpret_cast<uint4*>(record + row * 128 + (piece_column() / 8 ^ row % 8) * 16) = pieces[x];
  }
  if (threadIdx.x < kRangeCopies) reinterpret_cast<float2*>(record + kTileBytes)[threadIdx.x] = range;
}

// Bytes that the records of a table take: 0 without one, or where the table is packed, which means that it consists of
// them.
std::size_t record_bytes(const Table& gain, const AttentionShape& s);
// Writes them to `data` and says where they are; without a table there are none.
cudaError_t make_records(const Table& gain, const AttentionShape& s, DType dtype, void* data, Records& records,
                         cudaStream_t stream);

}  // namespace violin::kernels::cuda
