// How the table's gradient leaves dQ's kernel. Two warpgroups leave a tile of sums each in shared memory, in places in
// turns; three warps collect both and add them to global memory, each number by the very thread that added to it
// before.
#pragma once

#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda::sm90 {

constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kCollectors = kWarpgroup - 32;
// A tile of sums in shared memory: rows of 64 floats, with the 16-byte pieces of row r swapped by exclusive or with
// r % 4 * 2, so that neither side has bank conflicts: half a warp leaves two pieces of four rows, a quarter of a warp
// collects eight of one. A warpgroup leaves them in two places in turns, or in one.
constexpr int kSumsRow = kTile * 4;
constexpr int kSumsBytes = kTile * kSumsRow;
template <int kParts>
constexpr int kSumsPlacesOf = kParts == 1 ? 2 : 1;
// How those who leave sums and those who collect them take turns: both warpgroups have left theirs in a place; those of
// a warpgroup there have been read. Named barriers of the hardware, which need no memory and no phases; but racecheck
// does not follow who only arrives at one, so that its kernels have barriers in shared memory.
constexpr int kSumsBarriers = kSpeakers > 1 ? 6 : 0;
template <int kPlaces>
class SumsTurns {
 public:
  __device__ __forceinline__ explicit SumsTurns(Barrier first) : barriers_(first) {}
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kSumsBarriers; ++i) init(barriers_ + i, i < 2 ? kConsumers : kCollectors);
  }
  __device__ __forceinline__ void announce(std::uint32_t step) const {
    if constexpr (kSumsBarriers == 0) {
      named_arrive(full(step), kConsumers + kCollectors);
    } else {
      arrive(barriers_ + (full(step) - 1));
    }
  }
  __device__ __forceinline__ void await_sums(std::uint32_t step) const {
    if constexpr (kSumsBarriers == 0) {
      named_sync(full(step), kConsumers + kCollectors);
    } else {
      wait(barriers_ + (full(step) - 1), step / kPlaces % 2);
    }
  }
  __device__ __forceinline__ void release_place(std::uint32_t step) const {
    for (int group = 0; group < 2; ++group) {
      if constexpr (kSumsBarriers == 0) {
        named_arrive(empty(step, group), kWarpgroup + kCollectors);
      } else {
        arrive(barriers_ + (empty(step, group) - 1));
      }
    }
  }
  __device__ __forceinline__ void await_place(std::uint32_t step, int group) const {
    if (step < kPlaces) return;
    if constexpr (kSumsBarriers == 0) {
      named_sync(empty(step, group), kWarpgroup + kCollectors);
    } else {
      wait(barriers_ + (empty(step, group) - 1), (step / kPlaces - 1) % 2);
    }
  }

 private:
  static __device__ __forceinline__ int full(std::uint32_t step) { return 1 + step % kPlaces; }
  static __device__ __forceinline__ int empty(std::uint32_t step, int group) {
    return 3 + 2 * (step % kPlaces) + group;
  }
  Barrier barriers_;
};

// An addition in L2 without a reply. Those of one thread to one address happen in its order.
__device__ __forceinline__ void add_four(float* at, const float4& x) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_four(float* at, const float4& x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ __forceinline__ float4 load_four(std::uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

// The address of a thread's first pair of a tile of sums, in the order of a warpgroup's accumulators, and its n-th
// pair.
__device__ __forceinline__ std::uint32_t left_pair(std::uint32_t tile, int row) {
  const int lane = threadIdx.x % 32;
  return tile + row * kSumsRow + (lane % 4 / 2 ^ row % 4 * 2) * 16 + lane % 2 * 8;
}
__device__ __forceinline__ void leave_sums(std::uint32_t first, int n, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"((first ^ n / 2 % 4 * 32) + n / 8 * 128 + n % 2 * 8 * kSumsRow),
               "f"(x), "f"(y)
               : "memory");
}

// The address of a lane's first piece of a place of sums: two rows of 16 pieces for a warp.
__device__ __forceinline__ std::uint32_t collected_piece(std::uint32_t place) {
  const int lane = threadIdx.x % 32;
  return place + lane / 16 * kSumsRow + (lane % 16 ^ lane / 16 * 2) * 16;
}
// Both warpgroups' sums of a place, times factor where kScales, to rows of `stride` floats, or added to them. A warp
// takes every third group of eight rows. from, to: of this lane.
template <bool kFirst, bool kScales>
__device__ __forceinline__ void collect_sums(std::uint32_t from, float* to, int stride, float factor, int warp) {
#pragma unroll 1
  for (int rows = 8 * warp; rows < kTile; rows += 8 * (kCollectors / 32)) {
    const std::uint32_t at = from + rows * kSumsRow;
    float* row = to + rows * stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 x[2], y[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const std::uint32_t piece = (at ^ m * 64) + (2 * half + m) * 2 * kSumsRow;
        x[m] = load_four(piece);
        y[m] = load_four(piece + kSumsBytes);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float4 sum = make_float4(x[m].x + y[m].x, x[m].y + y[m].y, x[m].z + y[m].z, x[m].w + y[m].w);
        if constexpr (kScales) sum = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
        if constexpr (kFirst) {
          store_four(row, sum);
        } else {
          add_four(row, sum);
        }
        row += 2 * stride;
      }
    }
  }
}

}  // namespace violin::kernels::cuda::sm90
