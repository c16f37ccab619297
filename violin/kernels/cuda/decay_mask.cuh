// What the decay mask's forward and backward kernels share.
//
// Per (curve, axis, head) the powers gamma^0 ... gamma^(N-1) are a row of N numbers, each 2^(k * log2 gamma) with log2
// gamma as a sum of two numbers so that only the last rounding of the exponent counts. Kernels gather from a head's
// rows in shared memory, where every 32 numbers are followed by an unused one: ranks of neighbours often differ by a
// multiple of 16 or 32, and would all be in one bank. Where the rows of several heads fit, they lie side by side, and
// one load serves them all: the distance is the same. A distance of N or more, which no curve of a grid has, is
// computed.
#pragma once

#include <algorithm>

#include "violin/kernels/cuda/common.cuh"
#include "violin/kernels/cuda/decay_mask.h"

namespace violin::kernels::cuda {

constexpr int kThreads = 256;
constexpr int kRows = 16;  // rows of M that a block takes at a time
// Rows of powers that are copied to shared memory, where a block can have so much; more are gathered from cache.
constexpr int kTableBytes = 160 * 1024;
constexpr int kSmallTableBytes = 40 * 1024;

// 2^x and the splitting of log2 gamma, per type.
__host__ __device__ __forceinline__ float power(float x) {
  return exp2f(x);
}
__host__ __device__ __forceinline__ double power(double x) {
  return exp2(x);
}

// log2 gamma = high + low.
template <class T>
struct Rate {
  T high;
  T low;
};
__device__ __forceinline__ Rate<float> make_rate(float log_decay) {
  const double x = static_cast<double>(log_decay) * 1.4426950408889634074;
  const float high = static_cast<float>(x);
  return {high, isinf(high) ? 0.0f : static_cast<float>(x - static_cast<double>(high))};
}
__device__ __forceinline__ Rate<double> make_rate(double log_decay) {
  const double high = log_decay * 1.4426950408889634074;
  if (isinf(high)) return {high, 0.0};
  return {high, fma(log_decay, 1.4426950408889634074, -high) + log_decay * 2.0355273740931033e-17};
}
template <class T>
__device__ __forceinline__ T exponent(const Rate<T>& rate, T distance) {
  return distance == T(0) ? T(0) : fma(distance, rate.high, distance * rate.low);
}

template <class T>
__device__ __forceinline__ T weight_of(const DecayMask& m, int c, int h) {
  return m.weight ? static_cast<const T*>(m.weight)[c * m.heads + h] : T(1) / static_cast<T>(m.curves);
}

__device__ __forceinline__ int distance(const std::int32_t* ranks, int i, int j) {
  return abs(ranks[i] - ranks[j]);
}

// The base-2 exponent of curve c for head h between patches i and j. Without a decay per axis the distances add first.
template <class T>
__device__ __forceinline__ T curve_exponent(const DecayMask& m, const std::int32_t* ranks, const Rate<T>* rates, int c,
                                            int rate_stride, int i, int j) {
  const int axes = static_cast<int>(m.axes);
  const std::int64_t n = m.tokens;
  if (m.decay_per_axis) {
    T x = 0;
    for (int a = 0; a < axes; ++a) {
      x += exponent(rates[(c * axes + a) * rate_stride], static_cast<T>(distance(ranks + (c * axes + a) * n, i, j)));
    }
    return x;
  }
  T sum = 0;
  for (int a = 0; a < axes; ++a) sum += static_cast<T>(distance(ranks + (c * axes + a) * n, i, j));
  return exponent(rates[c * rate_stride], sum);
}

// The sum of w_c 2^(x_c) over the curves as 2^top sum. `top` is the largest exponent of what is summed, weights
// included, and finite: nothing vanishes beside a curve of weight 0, and where all is 0 the sum is.
template <class T>
struct LogSum {
  T top, sum;

  // 2^(x - top); a curve of weight 0 may lie far above the others.
  __host__ __device__ __forceinline__ T relative(T x) const {
    constexpr T kHighest = sizeof(T) == 4 ? 64 : 900;
    const T above = x - top;
    return power(above > kHighest ? kHighest : above);
  }
};
// Weights and their logarithms in base 2 are `stride` apart.
template <class T, class Exponents>
__host__ __device__ __forceinline__ LogSum<T> log_sum(int curves, const T* weights, const T* log_weights, int stride,
                                                      const Exponents& exponents) {
  LogSum<T> result{sizeof(T) == 4 ? T(-1e30) : T(-1e300), 0};
  for (int c = 0; c < curves; ++c) {
    const T x = exponents(c) + log_weights[c * stride];
    result.top = x > result.top ? x : result.top;
  }
  for (int c = 0; c < curves; ++c) result.sum += weights[c * stride] * result.relative(exponents(c));
  return result;
}

template <class T>
__device__ __forceinline__ T prefix_value(const DecayMask& m, int h, bool diagonal) {
  const T x = m.prefix_decay && !diagonal ? static_cast<const T*>(m.prefix_decay)[h] : T(0);
  return m.log_space ? x : exp(x);
}

// What is gathered: gamma^k, or k gamma^k.
enum class Row { kPower, kSlope };
template <class T>
__device__ __forceinline__ T row_value(Row row, const Rate<T>& rate, T k) {
  const T x = power(exponent(rate, k));
  return row == Row::kPower ? x : k == T(0) ? T(0) : k * x;
}

// table [lane][head][N], where a lane is a (curve, axis) with its own decay.
template <class T, Row kRow>
__global__ void __launch_bounds__(kThreads) table_kernel(const __grid_constant__ DecayMask m, T* table) {
  const int n = static_cast<int>(m.tokens);
  const int k = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (k >= n) return;
  const Rate<T> rate = make_rate(static_cast<const T*>(m.log_decay)[blockIdx.y]);
  table[static_cast<std::int64_t>(blockIdx.y) * n + k] = row_value(kRow, rate, static_cast<T>(k));
}

// Of a distance that is not in the table; one below 0 was too large for 32 bits, and is some large one. Not inlined: it
// is hardly ever called.
template <class T, Row kRow>
__device__ __noinline__ T far_value(const DecayMask& m, int lane, int h, int far) {
  const T distance = far < 0 ? T(0x7fffffff) : static_cast<T>(far);
  return row_value(kRow, make_rate(static_cast<const T*>(m.log_decay)[lane * m.heads + h]), distance);
}

__host__ __device__ __forceinline__ int padded(int k) {
  return k + (k >> 5);
}

// The same number of kCount heads.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) PerHead {
  T of[kCount];
};

// The rows of `lanes` lanes of kCount heads from `head` on, in shared memory or, where they do not fit, in the cache.
// Past the last head the last one stands again.
template <class T, Row kRow, bool kCopied, int kCount>
struct HeadRows {
  using Value = PerHead<T, kCount>;

  const DecayMask& m;
  int lane0, h, n;
  const T* table;
  Value* copy;

  __device__ HeadRows(const DecayMask& mask, const T* rows, void* shared, int first_lane, int lanes, int head)
      : m(mask),
        lane0(first_lane),
        h(head),
        n(static_cast<int>(mask.tokens)),
        table(rows),
        copy(static_cast<Value*>(shared)) {
    if constexpr (kCopied) {
      for (int x = threadIdx.x; x < lanes * n; x += static_cast<int>(blockDim.x)) {
        copy[x / n * padded(n) + padded(x % n)] = read(x / n, x % n);
      }
    }
  }
  __device__ __forceinline__ int head_of(int k) const { return min(h + k, static_cast<int>(m.heads) - 1); }
  __device__ __forceinline__ Value read(int lane, int far) const {
    Value value;
#pragma unroll
    for (int k = 0; k < kCount; ++k) value.of[k] = table[((lane0 + lane) * m.heads + head_of(k)) * n + far];
    return value;
  }
  // `lane` counts from lane0; far < N.
  __device__ __forceinline__ Value near(int lane, int far) const {
    return kCopied ? copy[lane * padded(n) + padded(far)] : read(lane, far);
  }
  __device__ __forceinline__ Value operator()(int lane, int far) const {
    if (static_cast<unsigned>(far) < static_cast<unsigned>(n)) return near(lane, far);
    Value value;
#pragma unroll
    for (int k = 0; k < kCount; ++k) value.of[k] = far_value<T, kRow>(m, lane0 + lane, head_of(k), far);
    return value;
  }
};

// The ranks of kRows rows, beginning with patch `first`, of one curve and axis: [kRows] in shared memory, 16-byte
// aligned.
struct RowRanks {
  int of[kRows];
};
// Whether all of them are less than N, so that distances from others that are so have their places in the rows.
__device__ __forceinline__ bool copy_ranks(const std::int32_t* ranks, int count, int n, int first, RowRanks* to) {
  __syncthreads();
  bool inside = true;
  for (int x = threadIdx.x; x < count * kRows; x += static_cast<int>(blockDim.x)) {
    const int i = first + x % kRows;
    const int rank = i >= 0 && i < n ? ranks[x / kRows * n + i] : 0;
    inside = inside && static_cast<unsigned>(rank) < static_cast<unsigned>(n);
    to[x / kRows].of[x % kRows] = rank;
  }
  return __syncthreads_and(inside);
}
// Distances of the token with rank `rank` from kNumber of the rows, from row `begin` on.
template <int kNumber>
__device__ __forceinline__ void add_distances(const RowRanks& rows, int begin, int rank, int (&far)[kNumber]) {
#pragma unroll
  for (int r = 0; r < kNumber; r += 4) {
    const int4 four = *reinterpret_cast<const int4*>(rows.of + begin + r);
    far[r] += abs(four.x - rank);
    far[r + 1] += abs(four.y - rank);
    far[r + 2] += abs(four.z - rank);
    far[r + 3] += abs(four.w - rank);
  }
}

// use(r, value) for the rows begin + r, where value is gathered at the distance of patch j along curve c, all axes
// together.
template <int kNumber, class Rows, class Use>
__device__ __forceinline__ void visit_rows(const Rows& gather, const RowRanks* own, int begin, bool inside,
                                           const std::int32_t* ranks, int axes, int c, int j, const Use& use) {
  int far[kNumber] = {};
  if (axes == 1) {
    const int rank = ranks[c * gather.n + j];
    add_distances(own[c], begin, rank, far);
    if (inside && static_cast<unsigned>(rank) < static_cast<unsigned>(gather.n)) {
#pragma unroll
      for (int r = 0; r < kNumber; ++r) use(r, gather.near(c, far[r]));
      return;
    }
  } else {
    for (int x = c * axes; x < (c + 1) * axes; ++x) add_distances(own[x], begin, ranks[x * gather.n + j], far);
  }
#pragma unroll
  for (int r = 0; r < kNumber; ++r) use(r, gather(c, far[r]));
}

inline std::int64_t lanes_of(const DecayMask& m) {
  return m.curves * (m.decay_per_axis ? m.axes : 1);
}

inline std::size_t table_bytes(const DecayMask& m) {
  return align256(static_cast<std::size_t>(lanes_of(m) * m.heads * m.tokens) * (m.dtype == DType::kFloat64 ? 8 : 4));
}

template <class T, Row kRow>
cudaError_t make_table(const DecayMask& m, T* table, cudaStream_t stream) {
  const std::int64_t rows = lanes_of(m) * m.heads;
  if (rows == 0 || m.tokens == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(m.tokens, kThreads)), static_cast<unsigned>(rows));
  table_kernel<T, kRow><<<grid, kThreads, 0, stream>>>(m, table);
  return cudaGetLastError();
}

constexpr std::size_t kOtherShared = 1024;  // bytes, at most, that kernels have beside what launches give them

// How the rows of `lanes` lanes are gathered from: for how many heads at a time (kCount or 1), copied or not, by large
// blocks or small ones, shared memory of it all.
struct GatherPlan {
  int heads;
  bool copied, large;
  std::size_t shared;
};
template <class T, int kCount>
GatherPlan plan_gather(const DecayMask& m, std::int64_t lanes) {
  const std::size_t ranks = static_cast<std::size_t>(m.curves * m.axes) * sizeof(RowRanks);
  const std::size_t most =
      std::min<std::size_t>(kTableBytes, most_shared() - std::min(most_shared(), ranks + kOtherShared));
  std::size_t bytes = static_cast<std::size_t>(lanes * padded(static_cast<int>(m.tokens))) * sizeof(T);
  const int heads = m.heads > 1 && !m.decay_per_axis && kCount * bytes <= most ? kCount : 1;
  bytes *= heads;
  const bool copied = bytes <= most;
  // Small rows: many small blocks. Large ones leave room for one block on a multiprocessor, which is then large and
  // takes many rows.
  return {heads, copied, copied && bytes > kSmallTableBytes, (copied ? bytes : 0) + ranks};
}

// How many blocks share the chunks of a head, so that those of all heads fill the device and end at about the same
// time. A block's own preparations count as half a chunk.
template <class Kernel>
std::int64_t share_chunks(Kernel kernel, int threads, std::size_t shared, std::int64_t chunks, std::int64_t heads,
                          std::int64_t most) {
  int per_processor = 0;
  if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, shared) != cudaSuccess ||
      per_processor == 0) {
    per_processor = 1;
  }
  const std::int64_t resident = static_cast<std::int64_t>(per_processor) * processors();
  std::int64_t best = 1;
  std::int64_t least = 0;
  for (std::int64_t blocks = 1; blocks <= chunks && blocks <= most; ++blocks) {
    const std::int64_t cost = ceil_div(blocks * heads, resident) * (2 * ceil_div(chunks, blocks) + 1);
    if (blocks == 1 || cost < least) {
      best = blocks;
      least = cost;
    }
  }
  return best;
}

}  // namespace violin::kernels::cuda
