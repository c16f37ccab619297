// A gain straight from the few numbers that a mask is made of, as records, and the gradient of those numbers.
//
// Powers are computed where they are needed, 2^(k log2 gamma) with the hardware's exponential, one per pair, curve and
// head: rows of powers to gather from would keep shared memory busy for longer, and 16 bits resolve no more. The mask
// is symmetric, so that a block computes a tile and writes it twice, or reads the gradients of both and computes once.
#include <algorithm>

#include "violin/kernels/cuda/decay_mask.h"
#include "violin/kernels/cuda/records.cuh"

namespace violin::kernels::cuda {
namespace {

constexpr int kMostCurves = 8;  // whose ranks and sums a block holds at a time

// Of the tiles (row, column) with row <= column, column by column, the one with this number.
struct TilePair {
  int row, column;
};
__device__ __forceinline__ TilePair tile_pair(int number) {
  int column = static_cast<int>((sqrtf(8.0f * static_cast<float>(number) + 1) - 1) / 2);
  while (column * (column + 1) / 2 > number) --column;
  while ((column + 1) * (column + 2) / 2 <= number) ++column;
  return {number - column * (column + 1) / 2, column};
}
std::int64_t pairs_of(const DecayMask& m) {
  const std::int64_t tiles = ceil_div(m.prefix + m.tokens, kTile);
  return tiles * (tiles + 1) / 2;
}

__device__ __forceinline__ float parameter(const void* of, int at) {
  return static_cast<const float*>(of)[at];
}
__device__ __forceinline__ float weight_of(const DecayMask& m, int c, int h) {
  return m.weight ? parameter(m.weight, c * static_cast<int>(m.heads) + h) : 1.0f / static_cast<float>(m.curves);
}
__device__ __forceinline__ float rate_of(const DecayMask& m, int c, int h) {
  // A decay to nothing at once would be 0 times infinity on the diagonal.
  const float rate = parameter(m.log_decay, c * static_cast<int>(m.heads) + h) * kLog2e;
  return rate < -FLT_MAX ? -FLT_MAX : rate;
}

// Ranks of the tokens of a pair of tiles, in shared memory: [curve][rows, columns]. As floats 2^23 + rank, which takes
// one operation, and whose differences are exact.
using Ranks = float[kMostCurves][2 * kTile];
static_assert(kRecordThreads == 2 * kTile);
__device__ __forceinline__ const std::int32_t* own_ranks(const DecayMask& m, const std::int32_t* ranks, TilePair tile) {
  const int at = static_cast<int>(threadIdx.x);
  const int token =
      (at < kTile ? tile.row * kTile + at : tile.column * kTile + at - kTile) - static_cast<int>(m.prefix);
  return ranks + min(max(token, 0), static_cast<int>(m.tokens) - 1);
}
__device__ __forceinline__ float as_float(std::int32_t rank) {
  return __int_as_float(0x4b000000 | rank);
}

// One block per pair of tiles, head and group.
template <class T>
__global__ void __launch_bounds__(kRecordThreads) forward_kernel(const __grid_constant__ DecayGainForward p) {
  const DecayMask& m = p.gain.mask;
  __shared__ __align__(16) Ranks ranks;
  __shared__ float2 factors[kMostCurves];                 // rate and weight
  __shared__ std::uint32_t turned[kTile][kTile / 2 + 1];  // 16-bit numbers on their way to the other tile
  const int prefix = static_cast<int>(m.prefix);
  const int size = prefix + static_cast<int>(m.tokens);
  const int heads = static_cast<int>(m.heads);
  const int curves = static_cast<int>(m.curves);
  const int tiles = (size + kTile - 1) / kTile;
  const TilePair tile = tile_pair(static_cast<int>(blockIdx.x));
  const int h = static_cast<int>(blockIdx.y);
  const std::int64_t g = blockIdx.z;
  float values[4][8] = {};
  for (int first = 0; first < curves && m.tokens > 0; first += kMostCurves) {
    const int count = min(kMostCurves, curves - first);
    const std::int32_t* own = own_ranks(m, m.ranks + (g * curves + first) * m.tokens, tile);
    if (first > 0) __syncthreads();
#pragma unroll
    for (int c = 0; c < kMostCurves; ++c) {
      if (c < count) ranks[c][threadIdx.x] = as_float(own[c * m.tokens]);
    }
    if (threadIdx.x < count) {
      const int c = first + static_cast<int>(threadIdx.x);
      factors[threadIdx.x] = make_float2(rate_of(m, c, h), weight_of(m, c, h));
    }
    __syncthreads();
    for (int c = 0; c < count; ++c) {
      const auto [rate, weight] = factors[c];
      const float* column_ranks = &ranks[c][kTile + piece_column()];
      float columns[8];
      *reinterpret_cast<float4*>(columns) = *reinterpret_cast<const float4*>(column_ranks);
      *reinterpret_cast<float4*>(columns + 4) = *reinterpret_cast<const float4*>(column_ranks + 4);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float row = ranks[c][piece_row(x)];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          values[x][e] = fmaf(weight, power2(fabsf(row - columns[e]) * rate), values[x][e]);
        }
      }
    }
  }
  const float alpha = p.gain.alpha ? p.gain.alpha[h] : 1.0f;
  if (tile.row * kTile < prefix) {  // a pair's columns come after its rows
    const float beside = m.prefix_decay ? expf(parameter(m.prefix_decay, h)) : 1.0f;
#pragma unroll
    for (int x = 0; x < 4; ++x)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = tile.row * kTile + piece_row(x);
        const int j = tile.column * kTile + piece_column() + e;
        if (i < prefix || j < prefix) values[x][e] = i == j ? 1.0f : beside;
      }
  }
#pragma unroll
  for (int x = 0; x < 4; ++x)
#pragma unroll
    for (int e = 0; e < 8; ++e) values[x][e] = fmaf(alpha, values[x][e], p.gain.offset);
  uint4 pieces[4];
  const float2 range = encode_tile<T>(values, size - tile.row * kTile, size - tile.column * kTile, pieces);
  unsigned char* records = static_cast<unsigned char*>(p.out) + (g * heads + h) * tiles * tiles * kRecordBytes;
  const auto record_at = [&](int query_tile, int key_tile) {
    return records + (static_cast<std::int64_t>(key_tile) * tiles + query_tile) * kRecordBytes;
  };
  store_record(record_at(tile.row, tile.column), pieces, range);
  if (tile.row == tile.column) return;
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    std::uint32_t* to = &turned[piece_row(x)][piece_column() / 2];
    to[0] = pieces[x].x;
    to[1] = pieces[x].y;
    to[2] = pieces[x].z;
    to[3] = pieces[x].w;
  }
  __syncthreads();
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    std::uint32_t parts[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::uint32_t low = turned[piece_column() + 2 * e][piece_row(x) / 2];
      const std::uint32_t high = turned[piece_column() + 2 * e + 1][piece_row(x) / 2];
      parts[e] = __byte_perm(low, high, piece_row(x) % 2 ? 0x7632 : 0x5410);
    }
    pieces[x] = make_uint4(parts[0], parts[1], parts[2], parts[3]);
  }
  store_record(record_at(tile.column, tile.row), pieces, range);
}

// Sums of a head that its gradients are made of: per curve, of dgain gamma^k and of dgain k gamma^k over the pairs of
// patches; of dgain beside the prefix; of dgain on the prefix' diagonal.
__host__ __device__ constexpr int sums_of(int curves) {
  return 2 * curves + 2;
}

constexpr int kThreads = 128;
constexpr int kRows = kTile * kTile / kThreads;  // of a column, for a thread

// A tile of dgain in shared memory, read by columns or by rows without bank conflicts.
using Tile = float[kTile][kTile + 1];
// What a pair of tiles needs; there are two, and one is filled while the other is in use.
struct Buffer {
  Tile tile, other;
  Ranks ranks;
};
constexpr int kSharedBytes = 2 * static_cast<int>(sizeof(Buffer));

// Four bytes on their way to shared memory, or zeros where there are none to read.
__device__ __forceinline__ void copy_or_clear(float* to, const float* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_tile(Tile& to, const float* dgain, int size, int first_row, int first_column) {
  const int column = static_cast<int>(threadIdx.x) % kTile;
  const int row = static_cast<int>(threadIdx.x) / kTile;
  const int j = first_column + column;
#pragma unroll
  for (int x = 0; x < kTile; x += kThreads / kTile) {
    const int i = first_row + row + x;
    const bool exists = i < size && j < size;
    copy_or_clear(&to[row + x][column], dgain + (exists ? static_cast<std::int64_t>(i) * size + j : 0), exists);
  }
}

// The sums of a share of a head's pairs of tiles, [head][group, block][sum]. Threads own half a column each.
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ DecayGainBackward p, double* sums) {
  const DecayMask& m = p.gain.mask;
  extern __shared__ __align__(16) unsigned char shared[];
  Buffer* buffers = reinterpret_cast<Buffer*>(shared);
  __shared__ float parts[kThreads / 32][2 * kMostCurves + 2];
  __shared__ float rates[kMostCurves];
  const int prefix = static_cast<int>(m.prefix);
  const int size = prefix + static_cast<int>(m.tokens);
  const int heads = static_cast<int>(m.heads);
  const int curves = static_cast<int>(m.curves);
  const int tiles = (size + kTile - 1) / kTile;
  const int pairs = tiles * (tiles + 1) / 2;
  const int h = static_cast<int>(blockIdx.y);
  const std::int64_t g = blockIdx.z;
  const int layer_heads = heads / p.layers;
  const float* dgain = p.dgain[h / layer_heads] + (g * layer_heads + h % layer_heads) * size * size;
  const int column = static_cast<int>(threadIdx.x) % kTile;
  const int first_row = static_cast<int>(threadIdx.x) / kTile * kRows;
  double* to = sums + ((h * static_cast<std::int64_t>(gridDim.z) + g) * gridDim.x + blockIdx.x) * sums_of(curves);
  for (int first = 0; first < curves; first += kMostCurves) {
    const int count = min(kMostCurves, curves - first);
    const std::int32_t* all_ranks = m.ranks + (g * curves + first) * m.tokens;
    float powers[kMostCurves] = {};
    float slopes[kMostCurves] = {};
    float beside = 0;
    float diagonal = 0;
    std::int32_t coming[kMostCurves] = {};  // ranks of the next pair
    const auto fetch = [&](int number, Buffer& buffer) {
      const TilePair tile = tile_pair(number);
      copy_tile(buffer.tile, dgain, size, tile.row * kTile, tile.column * kTile);
      if (tile.row != tile.column) copy_tile(buffer.other, dgain, size, tile.column * kTile, tile.row * kTile);
      asm volatile("cp.async.commit_group;" ::: "memory");
      const std::int32_t* own = own_ranks(m, all_ranks, tile);
#pragma unroll
      for (int c = 0; c < kMostCurves; ++c) {
        if (c < count && m.tokens > 0) coming[c] = own[c * m.tokens];
      }
    };
    const auto keep_ranks = [&](Buffer& buffer) {
#pragma unroll
      for (int c = 0; c < kMostCurves; ++c) buffer.ranks[c][threadIdx.x] = as_float(coming[c]);
    };
    __syncthreads();  // all have done with the last curves
    if (threadIdx.x < count) rates[threadIdx.x] = rate_of(m, first + static_cast<int>(threadIdx.x), h);
    fetch(static_cast<int>(blockIdx.x), buffers[0]);
    keep_ranks(buffers[0]);
    int step = 0;
    for (int number = static_cast<int>(blockIdx.x); number < pairs; number += static_cast<int>(gridDim.x), ++step) {
      const TilePair tile = tile_pair(number);
      Buffer& buffer = buffers[step % 2];
      Buffer& next = buffers[(step + 1) % 2];
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();  // this pair is there, and all have done with the one before
      const bool more = number + static_cast<int>(gridDim.x) < pairs;
      if (more) fetch(number + static_cast<int>(gridDim.x), next);
      float d[kRows];
#pragma unroll
      for (int x = 0; x < kRows; ++x) d[x] = buffer.tile[first_row + x][column];
      if (tile.row != tile.column) {
#pragma unroll
        for (int x = 0; x < kRows; ++x) d[x] += buffer.other[column][first_row + x];
      }
      if (tile.row * kTile < prefix) {  // a pair's columns come after its rows
#pragma unroll
        for (int x = 0; x < kRows; ++x) {
          const int i = tile.row * kTile + first_row + x;
          const int j = tile.column * kTile + column;
          if (i >= prefix && j >= prefix) continue;
          (i == j ? diagonal : beside) += d[x];
          d[x] = 0;
        }
      }
#pragma unroll
      for (int c = 0; c < kMostCurves; ++c) {
        if (c >= count) break;
        const float rate = rates[c];
        const float own = buffer.ranks[c][kTile + column];
        float power = 0;
        float slope = 0;
#pragma unroll
        for (int x = 0; x < kRows; x += 4) {
          const float4 four = *reinterpret_cast<const float4*>(&buffer.ranks[c][first_row + x]);
          const float rows[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float distance = fabsf(rows[e] - own);
            const float term = d[x + e] * power2(distance * rate);
            power += term;
            slope = fmaf(distance, term, slope);
          }
        }
        powers[c] += power;
        slopes[c] += slope;
      }
      if (more) keep_ranks(next);
    }
    const auto reduced = [](float x) {
      for (int s = 16; s > 0; s /= 2) x += __shfl_xor_sync(0xffffffffu, x, s);
      return x;
    };
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const bool writes = threadIdx.x % 32 == 0;
#pragma unroll
    for (int c = 0; c < kMostCurves; ++c) {
      const float power = reduced(powers[c]);
      const float slope = reduced(slopes[c]);
      if (writes) {
        parts[warp][2 * c] = power;
        parts[warp][2 * c + 1] = slope;
      }
    }
    beside = reduced(beside);
    diagonal = reduced(diagonal);
    if (writes) {
      parts[warp][2 * kMostCurves] = beside;
      parts[warp][2 * kMostCurves + 1] = diagonal;
    }
    __syncthreads();
    if (threadIdx.x < 2 * kMostCurves + 2) {
      double sum = 0;
      for (int w = 0; w < kThreads / 32; ++w) sum += static_cast<double>(parts[w][threadIdx.x]);
      const int at = static_cast<int>(threadIdx.x);
      if (at < 2 * count) to[2 * first + at] = sum;
      if (at >= 2 * kMostCurves && first == 0) to[2 * curves + at - 2 * kMostCurves] = sum;
    }
  }
}

// One block per head, a warp per sum: adds the shares in order and makes the gradients of them.
constexpr int kFinishThreads = 512;
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ DecayGainBackward p, const double* sums, int shares) {
  const DecayMask& m = p.gain.mask;
  extern __shared__ double total[];
  const int curves = static_cast<int>(m.curves);
  const int heads = static_cast<int>(m.heads);
  const int count = sums_of(curves);
  const int h = static_cast<int>(blockIdx.x);
  for (int s = static_cast<int>(threadIdx.x) / 32; s < count; s += kFinishThreads / 32) {
    double sum = 0;
    for (int x = static_cast<int>(threadIdx.x) % 32; x < shares; x += 32) {
      sum += sums[(static_cast<std::int64_t>(h) * shares + x) * count + s];
    }
    for (int w = 16; w > 0; w /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, w);
    if (threadIdx.x % 32 == 0) total[s] = sum;
  }
  __syncthreads();
  const double alpha = p.gain.alpha ? p.gain.alpha[h] : 1.0f;
  for (int c = static_cast<int>(threadIdx.x); c < curves; c += kFinishThreads) {
    const double weight = weight_of(m, c, h);
    if (p.dlog_decay) p.dlog_decay[c * heads + h] = static_cast<float>(alpha * weight * total[2 * c + 1]);
    if (p.dweight) p.dweight[c * heads + h] = static_cast<float>(alpha * total[2 * c]);
  }
  if (threadIdx.x == 0) {
    const double beside = m.prefix_decay ? exp(static_cast<double>(parameter(m.prefix_decay, h))) : 1.0;
    const double prefix = beside * total[2 * curves];
    if (p.dprefix_decay) p.dprefix_decay[h] = static_cast<float>(alpha * prefix);
    double mask = prefix + total[2 * curves + 1];
    for (int c = 0; c < curves; ++c) mask += weight_of(m, c, h) * total[2 * c];
    if (p.dalpha) p.dalpha[h] = static_cast<float>(mask);
  }
}

// Blocks of a head in one group: as many as run at once.
std::int64_t blocks_of(const DecayMask& m) {
  const std::int64_t enough = ceil_div(3 * std::int64_t{processors()}, m.heads * m.groups);
  return std::min(pairs_of(m), enough);
}

}  // namespace

cudaError_t launch(const DecayGainForward& p, cudaStream_t stream) {
  const DecayMask& m = p.gain.mask;
  if (m.groups * m.heads * pairs_of(m) == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(pairs_of(m)), static_cast<unsigned>(m.heads), static_cast<unsigned>(m.groups));
  const auto kernel = p.dtype == DType::kFloat16 ? forward_kernel<__half> : forward_kernel<__nv_bfloat16>;
  kernel<<<grid, kRecordThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

std::size_t scratch_bytes(const DecayGainBackward& p) {
  const DecayMask& m = p.gain.mask;
  return m.groups * m.heads == 0
             ? 0
             : static_cast<std::size_t>(m.groups * m.heads * blocks_of(m) * sums_of(static_cast<int>(m.curves))) *
                   sizeof(double);
}

cudaError_t launch(const DecayGainBackward& p, void* scratch, cudaStream_t stream) {
  const DecayMask& m = p.gain.mask;
  if (m.heads == 0) return cudaSuccess;
  const std::int64_t blocks = m.groups == 0 ? 0 : blocks_of(m);
  double* sums = static_cast<double*>(scratch);
  if (blocks > 0) {
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(m.heads), static_cast<unsigned>(m.groups));
    cudaError_t e = cudaFuncSetAttribute(backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (e == cudaSuccess) {
      backward_kernel<<<grid, kThreads, kSharedBytes, stream>>>(p, sums);
      e = cudaGetLastError();
    }
    if (e != cudaSuccess) return e;
  }
  finish_kernel<<<static_cast<unsigned>(m.heads), kFinishThreads, sizeof(double) * sums_of(static_cast<int>(m.curves)),
                  stream>>>(p, sums, static_cast<int>(blocks * m.groups));
  return cudaGetLastError();
}

}  // namespace violin::kernels::cuda
