// What the forward kernels on Hopper share: a warpgroup's softmax over tiles of 64 keys. Logits z are an accumulator of
// wgmma, of which a thread has two rows, `half` 0 and 1. Sums are relative to 2^maximum.
#pragma once

#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda::sm90 {

// Weights may grow to 2^8 before the sums so far are scaled down: the quotient in the end is the same.
constexpr float kSlack = 8;  // in powers of two

// Logits of keys that do not exist, in the tile from first_key on, become `nothing`.
__device__ __forceinline__ void cut_keys(float (&z)[32], int first_key, int keys, float nothing) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first_key + 8 * n + lane % 4 * 2 + e % 2 >= keys) z[4 * n + e] = nothing;
    }
}

// The largest, or by another choice the smallest, of a thread's logits in each row.
template <class Choose>
__device__ __forceinline__ void find_tops(float (&top)[2], const float (&z)[32], const Choose& choose) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = choose(z[2 * half], z[2 * half + 1]);
#pragma unroll
    for (int n = 1; n < 8; ++n) top[half] = choose(top[half], choose(z[4 * n + 2 * half], z[4 * n + 2 * half + 1]));
  }
}

// Scales sums down where logits have outgrown the maximum by more than the slack; the lanes of a row compare theirs
// only then.
template <int kSteps>
__device__ __forceinline__ void follow_maximum(float (&top)[2], float (&maximum)[2], float (&total)[2],
                                               HeadSums<kSteps>& sum) {
  if (!__any_sync(0xffffffffu, top[0] > maximum[0] + kSlack || top[1] > maximum[1] + kSlack)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
    const float larger = fmaxf(maximum[half], top[half]);
    const float decay = power2(maximum[half] - larger);
    maximum[half] = larger;
    total[half] *= decay;
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      sum[n / 8][n % 8 * 4 + 2 * half] *= decay;
      sum[n / 8][n % 8 * 4 + 2 * half + 1] *= decay;
    }
  }
}

// The first kColumns logits of each row become weights, and are added to the totals.
template <int kColumns>
__device__ __forceinline__ void weigh(float (&z)[32], float multiplier, const float (&maximum)[2], float (&total)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float part = 0;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 4 * n + 2 * half; e < 4 * n + 2 * half + 2; ++e) {
        z[e] = power2(fmaf(z[e], multiplier, -maximum[half]));
        part += z[e];
      }
    total[half] += part;
  }
}

// Ends a warpgroup's walk: writes the log-sum-exp of its queries, those from first_row on, to lse, where `rows` of them
// exist, and leaves the quotients in the tiles that its queries came in, for a bulk store of the first thread. The last
// product must be done.
template <class T, int kSteps>
__device__ __forceinline__ void leave_rows(unsigned char* tiles, const HeadSums<kSteps>& sum, const float (&maximum)[2],
                                           float (&total)[2], float* lse, int first_row, int rows, int barrier) {
  const int lane = threadIdx.x % 32;
  const int row = first_row + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    inverse[half] = 1.0f / total[half];
    if (lane % 4 == 0 && row + 8 * half < rows) {
      lse[row + 8 * half] = (maximum[half] + log2f(total[half])) * kLn2;
    }
  }
  named_sync(barrier, kWarpgroup);  // no warp's products read the queries any more
  leave_head<T, kSteps>(tiles, sum, inverse[0], inverse[1]);
  fence_stores();
  named_sync(barrier, kWarpgroup);
}

}  // namespace violin::kernels::cuda::sm90
