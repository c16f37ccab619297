// What the Hopper attention kernels share.
//
// Head dimensions up to 128, tiles of 64 x 64 logits per warpgroup, float16 and bfloat16, a gain table or none, which
// comes as records (records.cuh). Kernels are made for heads of kSteps times 16 columns, to which bulk copies pad them:
// 4, or in two parts 4 + 1, 4 + 2 or 4 + 4. A part is a tile of 64 columns in shared memory; the parts of a row lie one
// after the other.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "violin/kernels/cuda/common.cuh"
#include "violin/kernels/cuda/records.cuh"
#include "violin/kernels/cuda/schedule.h"
#include "violin/kernels/cuda/sm90.cuh"

namespace violin::kernels::cuda::sm90 {

constexpr int kWarpgroup = 128;
__host__ __device__ constexpr int parts_of(int steps) {
  return (steps + 3) / 4;
}
template <int kSteps>
constexpr int kPartsOf = parts_of(kSteps);
// Columns of the last part that are computed.
template <int kSteps>
constexpr int kLastColumns = 16 * (kSteps - 4 * (kPartsOf<kSteps> - 1));
inline int steps_of(const AttentionShape& s) {
  return s.dim <= 64 ? 4 : s.dim <= 80 ? 5 : s.dim <= 96 ? 6 : 8;
}
// Calls start with the kSteps of this shape.
template <class Start>
cudaError_t with_steps(const AttentionShape& s, const Start& start) {
  switch (steps_of(s)) {
    case 4:
      return start(std::integral_constant<int, 4>());
    case 5:
      return start(std::integral_constant<int, 5>());
    case 6:
      return start(std::integral_constant<int, 6>());
    default:
      return start(std::integral_constant<int, 8>());
  }
}
// Per 64 queries: their log-sum-exp in base 2 (+inf past the end: the weight is then 0) and their D, in the order of
// the columns of a thread's accumulators: queries 8 n + 2 c and 8 n + 2 c + 1 have their four numbers at 16 n + 4 c.
constexpr int kStatisticsFloats = 2 * kTile;
__host__ __device__ __forceinline__ int statistics_at(int query) {
  return query / 8 * 16 + query % 8 / 2 * 4 + query % 2;
}

// Images that dQ's kernel has at a time: two tiles of a head, of different images or the parts of one, per warpgroup.
__host__ __device__ constexpr int images_per_item(int parts) {
  return 4 / parts;
}
constexpr int kTilesPerUnit = 2;
constexpr int kShortWalk = 2048;  // tokens up to which a persistent grid pays
// Where the last tile has no more columns than this, kernels with kNarrow do what they do element by element on these
// alone: a class token makes 197 tokens of 196, three tiles and five columns.
constexpr int kNarrowColumns = 16;
inline bool ends_narrow(std::int64_t columns) {
  return columns % kTile != 0 && columns % kTile <= kNarrowColumns;
}

// A last tile of few queries, such as a class token makes, costs dQ's kernel as much as a whole one, and as much as two
// where it would be the odd one: tiles come in pairs. Such a tail gets its dQ and its rows of the table's gradient with
// ordinary arithmetic, beside the statistics.
constexpr int kMostTailQueries = 2;
struct Tail {
  int queries = 0;
  float* shares = nullptr;  // [B, h, queries, keys], in the table's gradient; none where that is not wanted
};
inline int tail_queries(const AttentionBackward& p) {
  const AttentionShape& s = p.shape;
  const std::int64_t queries = s.queries % kTile;
  const bool odd = s.queries / kTile % kTilesPerUnit == 0;
  return (p.dq.data || p.dgain) && odd && s.dim <= kTile && s.queries > kTile && queries <= kMostTailQueries
             ? static_cast<int>(queries)
             : 0;
}

// The number of this thread's warpgroup, in a form of which the compiler knows that a warp agrees about it.
__device__ __forceinline__ int warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
}

// 64 rows of a head into shared memory, and from there.
template <int kParts>
__device__ __forceinline__ void copy_parts(unsigned char* to, const CUtensorMap* map, Barrier b, int row, int head,
                                           int image) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) copy_box(to + part * kTileBytes, map, b, part * kTile, row, head, image);
}
template <int kParts>
__device__ __forceinline__ void store_parts(const CUtensorMap* map, const unsigned char* from, int row, int head,
                                            int image) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) store_box(map, from + part * kTileBytes, part * kTile, row, head, image);
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

// Where a thread's part of 16 columns of a tile in shared memory lies: rows by warps and lanes, pieces swapped.
__device__ __forceinline__ std::uint32_t fragment_address(const unsigned char* tile, int k) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
  return shared_address(tile) + row * 128 + ((2 * k + lane / 16) ^ (row % 8)) * 16;
}
// Rows of a tile in shared memory as left sides.
__device__ __forceinline__ void load_fragments(Fragments& to, const unsigned char* tile) {
#pragma unroll
  for (int k = 0; k < 4; ++k) load_matrices<false>(to[k], fragment_address(tile, k));
}
// A warpgroup's accumulator, times a factor for rows 0-7 and one for rows 8-15 of each warp, as a tile in shared memory
// that a bulk store can read once all have passed fence_stores and a barrier.
template <class T, int kColumns>
__device__ __forceinline__ void leave_tile(unsigned char* tile, const float (&c)[32], float factor0, float factor1) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    std::uint32_t part[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float factor = e % 2 ? factor1 : factor0;
      part[e] = pack<T>(c[8 * k + 2 * e] * factor, c[8 * k + 2 * e + 1] * factor);
    }
    store_matrices(fragment_address(tile, k), part);
  }
}

// A thread's part of a record: the numbers of accumulators 8 q + 2 e and 8 q + 2 e + 1 in parts[q][e]. While products
// run, a load from shared memory takes hundreds of clocks, so that a part is fetched long before its use, in two
// halves.
struct RecordPart {
  std::uint32_t parts[4][4];
  float base, slope;
  float next_base, next_slope;
};

__device__ __forceinline__ void load_record_range(RecordPart& to, std::uint32_t range) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to.next_base), "=f"(to.next_slope) : "r"(range));
}
template <bool kTransposed>
__device__ __forceinline__ void load_record_quarter(RecordPart& to, int q, std::uint32_t record, std::uint32_t offset) {
  // Records are aligned to 128 bytes, so that steps of two pieces can be exclusive ors.
  load_matrices<kTransposed>(to.parts[q], kTransposed ? record + offset + q * 2048 : (record + offset) ^ (q * 32));
}
template <bool kTransposed, int kHalf>
__device__ __forceinline__ void load_record_half(RecordPart& to, std::uint32_t record, std::uint32_t offset) {
#pragma unroll
  for (int q = 2 * kHalf; q < 2 * kHalf + 2; ++q) load_record_quarter<kTransposed>(to, q, record, offset);
}
// The range that the record now in use has, multiplied by `factor`.
__device__ __forceinline__ void start_record(RecordPart& record, float factor) {
  record.base = record.next_base * factor;
  record.slope = record.next_slope * factor;
}
// The number v of accumulator 8 q + e. T: the type of q, k, v.
template <class T>
__device__ __forceinline__ float unpack(const RecordPart& record, int q, int e) {
  return widen<T>(record.parts[q][e / 2], e % 2);
}

// The first kCount numbers of z become z o gain up to a factor, which is returned: beside bfloat16, slope = -base and
// one operation per number is enough.
template <class T, int kCount>
__device__ __forceinline__ float apply_record(float (&z)[32], const RecordPart& record) {
  constexpr bool kFine = std::is_same_v<T, __half>;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float v = unpack<T>(record, i / 8, i % 8);
    z[i] = kFine ? z[i] * fmaf(v, record.slope, record.base) : fmaf(-v, z[i], z[i]);
  }
  return kFine ? 1.0f : record.base;
}

// c = A B^T (+ c when add) over kSteps times 16 columns; tiles have rows of 64 numbers, are given by their low
// descriptors and lie one after the other.
constexpr std::uint32_t kTileStep = kTileBytes >> 4;
template <class T, int kSteps>
__device__ __forceinline__ void multiply_rows(float (&c)[32], std::uint32_t a, std::uint32_t b, bool add = false) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const std::uint32_t at = k / 4 * kTileStep + k % 4 * kColumnStep;
    wgmma<T, 0>(c, descriptor(a + at), descriptor(b + at), add || k > 0);
  }
}
template <class T>
__device__ __forceinline__ void multiply_rows(float (&c)[32], const Fragments& a, std::uint32_t b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<T, 0>(c, a[k], descriptor(b + k * kColumnStep), k > 0);
}
// c += A B: the rows of B, of which the first kColumns numbers count, are summed over.
template <class T, int kColumns>
__device__ __forceinline__ void multiply_add(float (&c)[32], const Fragments& a, std::uint32_t b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (kColumns == kTile) {
      wgmma<T, 1>(c, a[k], descriptor(b + k * kRowStep), true);
    } else {
      wgmma_narrow<T, 1, kColumns>(c, a[k], descriptor(b + k * kRowStep));
    }
  }
}

// Sums for all columns of a head, by parts; of the last part only the first kLastColumns are ever touched.
template <int kSteps>
using HeadSums = float[kPartsOf<kSteps>][32];
template <class T, int kSteps>
__device__ __forceinline__ void multiply_add_head(HeadSums<kSteps>& c, const Fragments& a, std::uint32_t b) {
  multiply_add<T, kTile>(c[0], a, b);
  if constexpr (kPartsOf<kSteps> == 2) multiply_add<T, kLastColumns<kSteps>>(c[1], a, b + kTileStep);
}
template <int kSteps>
__device__ __forceinline__ void pin_head(HeadSums<kSteps>& c) {
  pin(c[0]);
  if constexpr (kPartsOf<kSteps> == 2) pin_first<kLastColumns<kSteps> / 2>(c[1]);
}
template <class T, int kSteps>
__device__ __forceinline__ void leave_head(unsigned char* tiles, const HeadSums<kSteps>& c, float factor0,
                                           float factor1) {
  leave_tile<T, kTile>(tiles, c[0], factor0, factor1);
  if constexpr (kPartsOf<kSteps> == 2) {
    leave_tile<T, kLastColumns<kSteps>>(tiles + kTileBytes, c[1], factor0, factor1);
  }
}

// Where a persistent block is among all items, in the order (image of a chunk, block of tiles, chunk of images, head),
// images fastest: neighbours in time share a table tile, and a chunk's other side stays in L2 while its blocks pass.
// Going on by the size of the grid takes no division.
class Place {
 public:
  __device__ __forceinline__ Place(int batch, int chunk, int blocks, int first, int step) {
    const int sizes[kDigits] = {chunk, blocks, batch / chunk, 1 << 30};
#pragma unroll
    for (int i = 0; i < kDigits; ++i) {
      size_[i] = sizes[i];
      at_[i] = first % sizes[i];
      step_[i] = step % sizes[i];
      first /= sizes[i];
      step /= sizes[i];
    }
  }
  __device__ __forceinline__ int b() const { return at_[2] * size_[0] + at_[0]; }
  __device__ __forceinline__ int block() const { return at_[1]; }
  __device__ __forceinline__ int h() const { return at_[3]; }
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < kDigits; ++i) {
      at_[i] += step_[i];
      if (i + 1 < kDigits && at_[i] >= size_[i]) {
        at_[i] -= size_[i];
        ++at_[i + 1];
      }
    }
  }

 private:
  static constexpr int kDigits = 4;
  int size_[kDigits], at_[kDigits], step_[kDigits];
};

// How many images make a chunk: K and V (or Q and dO) of a head of so many take at most kChunkBytes, 32 images of 1025
// tokens and 64 numbers. A divisor of the batch, or all of it where no divisor comes near.
constexpr std::int64_t kChunkBytes = std::int64_t{9} << 20;
inline int images_per_chunk(std::int64_t batch, std::int64_t tokens, int parts) {
  const std::int64_t most = std::max<std::int64_t>(1, kChunkBytes / (tokens * 2 * parts * kTile * 2));
  if (batch <= most) return static_cast<int>(batch);
  for (std::int64_t n = most; 2 * n > most; --n) {
    if (batch % n == 0) return static_cast<int>(n);
  }
  return static_cast<int>(batch);
}

constexpr int kFloatsRow = kTile + 8;
struct Maps {
  CUtensorMap q, k, v, out;  // out: of the forward pass
  CUtensorMap dout, dk, dv;  // of the backward pass; without a gradient the map is empty
  CUtensorMap gain;          // of a forward pass that reads the table as it is: boxes of 64 rows of kFloatsRow
};

// Sums for the gain's gradient, [G, h, rows, stride], rows padded to tiles and columns to eights so that no row needs a
// test and pieces of four are aligned: the gradient itself where it has this shape, or else scratch.
struct TableSums {
  float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t stride = 0;
};

// What the kernels of a backward pass share. Nothing here is owned.
struct Work {
  Records records;
  float* statistics = nullptr;  // kStatisticsFloats for each tile of queries
  Schedule schedule;            // of dQ and the table's gradient
  TableSums sums;
  float* strips = nullptr;
  Tail tail;
};

cudaError_t start_forward(const AttentionForward& p, const Maps& maps, const Records& records, cudaStream_t stream);
// The same with maps.gain instead of records: one table for all images, heads of one part.
cudaError_t start_forward_floats(const AttentionForward& p, const Maps& maps, cudaStream_t stream);
// Statistics of all queries, and what there is to do for a tail but the sum of its shares.
cudaError_t start_statistics(const AttentionBackward& p, const Work& work, cudaStream_t stream);
cudaError_t start_dkv(const AttentionBackward& p, const Maps& maps, const Work& work, cudaStream_t stream);
// after_dkv: the kernel before is dK and dV's, and the two may overlap.
cudaError_t start_dq(const AttentionBackward& p, const Maps& maps, const Work& work, bool after_dkv,
                     cudaStream_t stream);
// The gain's gradient from the sums and the strips that start_dq leaves, and from the shares of a tail; adds: to what
// it is.
cudaError_t start_last(const AttentionBackward& p, bool adds, const Work& work, cudaStream_t stream);

}  // namespace violin::kernels::cuda::sm90
