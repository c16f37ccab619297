// The decay mask and its gradient on the GPU.
//
// Per (curve, axis, head) the powers gamma^0 ... gamma^(N-1) are a row of N numbers, each 2^(k * log2 gamma) with log2
// gamma as a sum of two numbers so that only the last rounding of the exponent counts. The mask gathers from these rows
// in shared memory; a block has 16 rows of a head. A distance of N or more, which no curve of a grid has, is computed.
//
// Backward, where each curve's ranks are a permutation: the histogram of dM over distances. A thread owns distances k;
// of a row i it takes the two tokens whose rank is k away from i's, found through the inverse permutation, so that
// nothing is added to by two threads. Sums over 16 rows in float32, then contracted with the powers in double, block by
// block in order. Where ranks are something else (more axes, ties, gaps) each power is computed again: which of the two
// it is, is decided on the device. log M cannot be gathered and computes its powers too.
#include "violin/kernels/cuda/decay_mask.h"

#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 8;     // heads per block of the forward pass
constexpr int kLanes = 8;     // (curve, axis) pairs per block of the backward pass
constexpr int kShares = 256;  // row shares of the backward pass
constexpr int kTermsPerSum = 16;
constexpr int kRows = 16;                // rows per block of the gathering forward pass
constexpr int kBinThreads = 512;         // threads of a block that makes histograms
constexpr int kBinCurves = 4;            // curves per block there
constexpr int kMostTokens = 4096;        // up to which histograms fit into registers
constexpr int kTableBytes = 160 * 1024;  // powers that are copied to shared memory; more are gathered from cache
constexpr int kSmallTableBytes = 40 * 1024;
constexpr int kFewBlocks = 132;
constexpr int kManyBlocks = 1024;

// 2^x and the splitting of log2 gamma, per type.
__device__ __forceinline__ float power(float x) {
  return exp2f(x);
}
__device__ __forceinline__ double power(double x) {
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

template <class T>
__device__ __forceinline__ T prefix_value(const DecayMask& m, int h, bool diagonal) {
  const T x = m.prefix_decay && !diagonal ? static_cast<const T*>(m.prefix_decay)[h] : T(0);
  return m.log_space ? x : exp(x);
}

// The rows of powers: table [lane][head][N], where a lane is a (curve, axis) with its own decay.
template <class T>
__global__ void __launch_bounds__(kThreads) table_kernel(const __grid_constant__ DecayMask m, T* table) {
  const int n = static_cast<int>(m.tokens);
  const int k = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (k >= n) return;
  const Rate<T> rate = make_rate(static_cast<const T*>(m.log_decay)[blockIdx.y]);
  table[static_cast<std::int64_t>(blockIdx.y) * n + k] = power(exponent(rate, static_cast<T>(k)));
}

// The power of a distance that is not in the table. Not inlined: it is hardly ever called.
template <class T>
__device__ __noinline__ T far_power(const DecayMask& m, int lane, int h, int far) {
  return power(exponent(make_rate(static_cast<const T*>(m.log_decay)[lane * m.heads + h]), static_cast<T>(far)));
}

// M by gathering. A block has one head of one group and takes kRows rows after kRows rows, threads over j. Shared
// memory: this head's powers [lane][N] if they fit, the rows' ranks [curve * axes][kRows].
template <class T, int kGatherThreads, bool kCopied>
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ DecayMaskForward p, const T* table) {
  const DecayMask& m = p.mask;
  extern __shared__ __align__(16) unsigned char shared[];
  const int n = static_cast<int>(m.tokens);
  const int curves = static_cast<int>(m.curves);
  const int axes = static_cast<int>(m.axes);
  const int heads = static_cast<int>(m.heads);
  const int prefix = static_cast<int>(m.prefix);
  const int size = prefix + n;
  const int h = static_cast<int>(blockIdx.y);
  const std::int64_t g = blockIdx.z;
  const int lanes = curves * (m.decay_per_axis ? axes : 1);
  const std::int32_t* ranks = m.ranks + g * curves * axes * n;
  T* powers = reinterpret_cast<T*>(shared);
  int* own = reinterpret_cast<int*>(powers + (kCopied ? static_cast<std::int64_t>(lanes) * n : 0));
  const T* from = table + static_cast<std::int64_t>(h) * n;
  if constexpr (kCopied) {
    for (int x = threadIdx.x; x < lanes * n; x += kGatherThreads) {
      powers[x] = from[static_cast<std::int64_t>(x / n) * heads * n + x % n];
    }
  }
  const auto gather = [&](int lane, int far) {
    if (far >= n) return far_power<T>(m, lane, h, far);
    return kCopied ? powers[lane * n + far] : from[static_cast<std::int64_t>(lane) * heads * n + far];
  };
  for (int first = static_cast<int>(blockIdx.x) * kRows; first < size; first += static_cast<int>(gridDim.x) * kRows) {
    __syncthreads();
    for (int x = threadIdx.x; x < curves * axes * kRows; x += kGatherThreads) {
      const int i = first + x % kRows - prefix;
      own[x] = i >= 0 && i < n ? ranks[x / kRows * n + i] : 0;
    }
    __syncthreads();
    T* out = static_cast<T*>(p.out) + ((g * heads + h) * size + first) * size;
    for (int j = threadIdx.x; j < size; j += kGatherThreads) {
      T value[kRows] = {};
      if (j >= prefix) {
        for (int c = 0; c < curves; ++c) {
          const T weight = weight_of<T>(m, c, h);
          if (axes == 1) {
            const int rank = ranks[c * n + j - prefix];
#pragma unroll
            for (int r = 0; r < kRows; ++r) value[r] += weight * gather(c, abs(own[c * kRows + r] - rank));
          } else if (m.decay_per_axis) {
            T product[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) product[r] = weight;
            for (int x = c * axes; x < (c + 1) * axes; ++x) {
              const int rank = ranks[x * n + j - prefix];
#pragma unroll
              for (int r = 0; r < kRows; ++r) product[r] *= gather(x, abs(own[x * kRows + r] - rank));
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) value[r] += product[r];
          } else {
            int far[kRows] = {};
            for (int x = c * axes; x < (c + 1) * axes; ++x) {
              const int rank = ranks[x * n + j - prefix];
#pragma unroll
              for (int r = 0; r < kRows; ++r) far[r] += abs(own[x * kRows + r] - rank);
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) value[r] += weight * gather(c, far[r]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = first + r;
        if (i >= size) continue;
        out[static_cast<std::int64_t>(r) * size + j] =
            i < prefix || j < prefix ? prefix_value<T>(m, h, i == j) : value[r];
      }
    }
  }
}

// log M. One block per (g, i, chunk of heads), threads over j. Shared memory: rates [C * axes][kHeads], weights
// [C][kHeads].
template <class T>
__global__ void __launch_bounds__(kThreads) log_kernel(const __grid_constant__ DecayMaskForward p) {
  const DecayMask& m = p.mask;
  extern __shared__ __align__(16) unsigned char shared[];
  const int curves = static_cast<int>(m.curves);
  const int rows = curves * (m.decay_per_axis ? static_cast<int>(m.axes) : 1);
  Rate<T>* rates = reinterpret_cast<Rate<T>*>(shared);
  T* weights = reinterpret_cast<T*>(rates + rows * kHeads);
  const int heads = static_cast<int>(m.heads);
  const int h0 = static_cast<int>(blockIdx.y) * kHeads;
  const int prefix = static_cast<int>(m.prefix);
  const int size = prefix + static_cast<int>(m.tokens);
  const std::int64_t g = blockIdx.x / size;
  const int i = static_cast<int>(blockIdx.x % size);
  const std::int32_t* ranks = m.ranks + g * m.curves * m.axes * m.tokens;
  for (int x = threadIdx.x; x < rows * kHeads; x += kThreads) {
    const int h = min(h0 + x % kHeads, heads - 1);
    rates[x] = make_rate(static_cast<const T*>(m.log_decay)[x / kHeads * heads + h]);
  }
  for (int x = threadIdx.x; x < curves * kHeads; x += kThreads) {
    weights[x] = weight_of<T>(m, x / kHeads, min(h0 + x % kHeads, heads - 1));
  }
  __syncthreads();
  T* out = static_cast<T*>(p.out) + (g * heads + h0) * size * size + static_cast<std::int64_t>(i) * size;
  const int count = min(kHeads, heads - h0);
  const T ln2 = static_cast<T>(0.69314718055994530942);
  for (int j = threadIdx.x; j < size; j += kThreads) {
    T value[kHeads];
    if (i < prefix || j < prefix) {
      for (int k = 0; k < kHeads; ++k) value[k] = prefix_value<T>(m, min(h0 + k, heads - 1), i == j);
    } else {
      for (int k = 0; k < kHeads; ++k) {
        T top = -static_cast<T>(INFINITY);
        for (int c = 0; c < curves; ++c) {
          top = max(top, curve_exponent(m, ranks, rates + k, c, kHeads, i - prefix, j - prefix));
        }
        T sum = 0;
        for (int c = 0; c < curves; ++c) {
          sum += weights[c * kHeads + k] *
                 power(curve_exponent(m, ranks, rates + k, c, kHeads, i - prefix, j - prefix) - top);
        }
        value[k] = top * ln2 + log(sum);
      }
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (k < count) out[static_cast<std::int64_t>(k) * size * size + j] = value[k];
    }
  }
}

// Sums of a block in a fixed order; the result is in thread 0.
__device__ double block_sum(double x, double* shared) {
  for (int s = 16; s > 0; s /= 2) x += __shfl_down_sync(0xffffffffu, x, s);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) sum += shared[w];
  }
  return sum;
}

// inverse [G,C,N], and in bad [G,C] whether the ranks are no permutation of 0 ... N - 1. One block per (g, c).
__global__ void __launch_bounds__(kThreads)
    invert_kernel(const __grid_constant__ DecayMask m, std::int32_t* inverse, int* bad) {
  const int n = static_cast<int>(m.tokens);
  const std::int32_t* ranks = m.ranks + static_cast<std::int64_t>(blockIdx.x) * n;
  volatile std::int32_t* to = inverse + static_cast<std::int64_t>(blockIdx.x) * n;
  const auto inside = [&](int rank) { return rank >= 0 && rank < n; };
  for (int j = threadIdx.x; j < n; j += kThreads) {
    if (inside(ranks[j])) to[ranks[j]] = j;
  }
  __syncthreads();
  int wrong = 0;
  for (int j = threadIdx.x; j < n; j += kThreads) wrong |= !inside(ranks[j]) || to[ranks[j]] != j;
  wrong = __syncthreads_or(wrong);
  if (threadIdx.x == 0) bad[blockIdx.x] = wrong;
}
__device__ __forceinline__ bool all_permutations(const DecayMask& m, const int* bad) {
  int wrong = 0;
  for (int x = threadIdx.x; x < m.groups * m.curves; x += static_cast<int>(blockDim.x)) wrong |= bad[x];
  return !__syncthreads_or(wrong);
}

// parts as below, from histograms: of one share of the rows, one head, up to kBinCurves curves. Thread x owns distances
// x, x + kBinThreads, ...
template <class T, int kBins>
__global__ void __launch_bounds__(kBinThreads)
    histogram_kernel(const __grid_constant__ DecayMaskBackward p, const T* table, const std::int32_t* inverse,
                     const int* bad, double* parts) {
  const DecayMask& m = p.mask;
  if (!all_permutations(m, bad)) return;
  extern __shared__ __align__(16) unsigned char shared[];  // two rows of dM
  __shared__ double sums[kBinThreads / 32];
  const int n = static_cast<int>(m.tokens);
  const int curves = static_cast<int>(m.curves);
  const int heads = static_cast<int>(m.heads);
  const int h = static_cast<int>(blockIdx.y);
  const int c0 = static_cast<int>(blockIdx.z) * kBinCurves;
  const std::int64_t size = m.prefix + n;
  double slopes[kBinCurves] = {};
  double masses[kBinCurves] = {};
  T bins[kBinCurves][kBins] = {};
  const auto fold = [&] {
#pragma unroll
    for (int x = 0; x < kBinCurves; ++x)
#pragma unroll
      for (int b = 0; b < kBins; ++b) {
        const int k = static_cast<int>(threadIdx.x) + b * kBinThreads;
        if (k < n && c0 + x < curves) {
          const double mass = static_cast<double>(bins[x][b]) *
                              static_cast<double>(table[(static_cast<std::int64_t>(c0 + x) * heads + h) * n + k]);
          masses[x] += mass;
          slopes[x] += mass * k;
        }
        bins[x][b] = 0;
      }
  };
  int count = 0;
  for (std::int64_t at = blockIdx.x; at < m.groups * n; at += kShares, ++count) {
    const std::int64_t g = at / n;
    const int i = static_cast<int>(at % n);
    const T* dout = static_cast<const T*>(p.dout) + ((g * heads + h) * size + m.prefix + i) * size + m.prefix;
    T* row = reinterpret_cast<T*>(shared) + count % 2 * n;
#pragma unroll
    for (int b = 0; b < kBins; ++b) {
      const int j = static_cast<int>(threadIdx.x) + b * kBinThreads;
      if (j < n) row[j] = dout[j];
    }
    __syncthreads();
#pragma unroll
    for (int x = 0; x < kBinCurves; ++x) {
      if (c0 + x >= curves) continue;
      const std::int64_t curve = (g * curves + c0 + x) * n;
      const int rank = m.ranks[curve + i];
#pragma unroll
      for (int b = 0; b < kBins; ++b) {
        const int k = static_cast<int>(threadIdx.x) + b * kBinThreads;
        T sum = 0;
        if (rank + k < n) sum = row[inverse[curve + rank + k]];
        if (k > 0 && rank >= k) sum += row[inverse[curve + rank - k]];
        bins[x][b] += sum;
      }
    }
    if (count % kTermsPerSum == kTermsPerSum - 1) fold();
  }
  fold();
#pragma unroll
  for (int x = 0; x < kBinCurves; ++x) {
    const double slope = block_sum(slopes[x], sums);
    const double mass = block_sum(masses[x], sums);
    if (threadIdx.x == 0 && c0 + x < curves) {
      double* to = parts + ((static_cast<std::int64_t>(blockIdx.x) * heads + h) * curves + c0 + x) * 2;
      to[0] = slope * static_cast<double>(weight_of<T>(m, c0 + x, h));
      to[1] = mass;
    }
  }
}

// parts [kShares][heads][lanes][2]: the sums of dM w power distance, and of dM power, where a lane is a (curve, axis).
// With bad given, only where histograms were not possible.
template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ DecayMaskBackward p, const int* bad, double* parts) {
  const DecayMask& m = p.mask;
  if (bad && all_permutations(m, bad)) return;
  extern __shared__ __align__(16) unsigned char shared[];
  const int curves = static_cast<int>(m.curves);
  const int axes = m.decay_per_axis ? static_cast<int>(m.axes) : 1;
  const int lanes = curves * axes;
  double* sums = reinterpret_cast<double*>(shared);  // [kThreads / 32]
  Rate<T>* rates = reinterpret_cast<Rate<T>*>(sums + kThreads / 32);
  T* weights = reinterpret_cast<T*>(rates + lanes);
  const int h = static_cast<int>(blockIdx.y);
  const int lane0 = static_cast<int>(blockIdx.z) * kLanes;
  const int heads = static_cast<int>(m.heads);
  const int n = static_cast<int>(m.tokens);
  const int prefix = static_cast<int>(m.prefix);
  const std::int64_t size = prefix + n;
  for (int x = threadIdx.x; x < lanes; x += kThreads) {
    rates[x] = make_rate(static_cast<const T*>(m.log_decay)[x * heads + h]);
  }
  for (int x = threadIdx.x; x < curves; x += kThreads) weights[x] = weight_of<T>(m, x, h);
  __syncthreads();

  double slopes[kLanes] = {};
  double masses[kLanes] = {};
  T slope[kLanes] = {};
  T mass[kLanes] = {};
  int terms = 0;
  const auto fold = [&] {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      slopes[k] += static_cast<double>(slope[k]);
      masses[k] += static_cast<double>(mass[k]);
      slope[k] = mass[k] = 0;
    }
    terms = 0;
  };
  for (std::int64_t row = blockIdx.x; row < m.groups * n; row += kShares) {
    const std::int64_t g = row / n;
    const int i = static_cast<int>(row % n);
    const std::int32_t* ranks = m.ranks + g * m.curves * m.axes * n;
    const T* dout = static_cast<const T*>(p.dout) + ((g * heads + h) * size + prefix + i) * size + prefix;
    for (int j = threadIdx.x; j < n; j += kThreads) {
      T gradient = dout[j];
      T top = 0;
      if (m.log_space) {
        top = -static_cast<T>(INFINITY);
        for (int c = 0; c < curves; ++c) top = max(top, curve_exponent(m, ranks, rates, c, 1, i, j));
        T sum = 0;
        for (int c = 0; c < curves; ++c) sum += weights[c] * power(curve_exponent(m, ranks, rates, c, 1, i, j) - top);
        gradient /= sum;
      }
#pragma unroll
      for (int k = 0; k < kLanes; ++k) {
        const int lane = lane0 + k;
        if (lane < lanes) {
          const int c = lane / axes;
          T own;
          T x;
          if (m.decay_per_axis) {
            own = static_cast<T>(distance(ranks + static_cast<std::int64_t>(lane) * n, i, j));
            x = curve_exponent(m, ranks, rates, c, 1, i, j);
          } else {
            int far = 0;
            for (int a = 0; a < m.axes; ++a) far += distance(ranks + (c * m.axes + a) * n, i, j);
            own = static_cast<T>(far);
            x = exponent(rates[c], own);
          }
          const T value = gradient * power(x - top);
          mass[k] += value;
          slope[k] += value * own;
        }
      }
      if (++terms == kTermsPerSum) fold();
    }
  }
  fold();
#pragma unroll
  for (int k = 0; k < kLanes; ++k) {
    const double s = block_sum(slopes[k], sums);
    const double t = block_sum(masses[k], sums);
    if (threadIdx.x == 0 && lane0 + k < lanes) {
      double* at = parts + ((static_cast<std::int64_t>(blockIdx.x) * heads + h) * lanes + lane0 + k) * 2;
      at[0] = s * static_cast<double>(weights[(lane0 + k) / axes]);
      at[1] = t;
    }
  }
}

template <class T>
__global__ void finish_kernel(const __grid_constant__ DecayMaskBackward p, const double* parts, int shares) {
  const DecayMask& m = p.mask;
  const int axes = m.decay_per_axis ? static_cast<int>(m.axes) : 1;
  const int lanes = static_cast<int>(m.curves) * axes;
  const int heads = static_cast<int>(m.heads);
  const int x = blockIdx.x * blockDim.x + threadIdx.x;
  if (x >= lanes * heads) return;
  const int lane = x / heads;
  const int h = x % heads;
  double slope = 0;
  double mass = 0;
  for (int s = 0; s < shares; ++s) {
    const double* at = parts + ((static_cast<std::int64_t>(s) * heads + h) * lanes + lane) * 2;
    slope += at[0];
    mass += at[1];
  }
  if (p.dlog_decay) static_cast<T*>(p.dlog_decay)[x] = static_cast<T>(slope);
  if (p.dweight && lane % axes == 0) static_cast<T*>(p.dweight)[lane / axes * heads + h] = static_cast<T>(mass);
}

// One block per head: the sum over everything that prefix_decay filled, in a fixed order.
template <class T>
__global__ void __launch_bounds__(kThreads) prefix_kernel(const __grid_constant__ DecayMaskBackward p) {
  const DecayMask& m = p.mask;
  __shared__ double sums[kThreads / 32];
  const int h = static_cast<int>(blockIdx.x);
  const std::int64_t size = m.prefix + m.tokens;
  double sum = 0;
  for (std::int64_t g = 0; g < m.groups; ++g) {
    const T* dout = static_cast<const T*>(p.dout) + (g * m.heads + h) * size * size;
    for (std::int64_t x = threadIdx.x; x < m.prefix * size; x += kThreads) {
      const std::int64_t i = x / size;
      const std::int64_t j = x % size;
      if (i == j) continue;
      sum += static_cast<double>(dout[i * size + j]);
      if (j >= m.prefix) sum += static_cast<double>(dout[j * size + i]);
    }
  }
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) {
    const double factor = m.log_space ? 1.0 : exp(static_cast<double>(static_cast<const T*>(m.prefix_decay)[h]));
    static_cast<T*>(p.dprefix_decay)[h] = static_cast<T>(sum * factor);
  }
}

std::int64_t lanes_of(const DecayMask& m) {
  return m.curves * (m.decay_per_axis ? m.axes : 1);
}

std::size_t table_bytes(const DecayMask& m) {
  return align256(static_cast<std::size_t>(lanes_of(m) * m.heads * m.tokens) * (m.dtype == DType::kFloat64 ? 8 : 4));
}
// Whether the gradient goes through histograms if the ranks allow it.
bool has_histogram(const DecayMask& m) {
  return !m.log_space && !m.decay_per_axis && m.axes == 1 && m.tokens <= kMostTokens;
}

// Where things are in the scratch of the backward pass.
struct Layout {
  std::size_t table, inverse, bad, bytes;
};
Layout layout(const DecayMask& m) {
  Layout l{};
  l.table = align256(static_cast<std::size_t>(kShares * m.heads * lanes_of(m) * 2) * sizeof(double));
  l.inverse = l.bad = l.bytes = l.table;
  if (has_histogram(m)) {
    l.inverse = l.table + table_bytes(m);
    l.bad = l.inverse + align256(static_cast<std::size_t>(m.groups * m.curves * m.tokens) * 4);
    l.bytes = l.bad + align256(static_cast<std::size_t>(m.groups * m.curves) * 4);
  }
  return l;
}

template <class T>
cudaError_t make_table(const DecayMask& m, T* table, cudaStream_t stream) {
  const std::int64_t rows = lanes_of(m) * m.heads;
  if (rows == 0 || m.tokens == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(m.tokens, kThreads)), static_cast<unsigned>(rows));
  table_kernel<T><<<grid, kThreads, 0, stream>>>(m, table);
  return cudaGetLastError();
}

template <class T>
cudaError_t forward(const DecayMaskForward& p, T* table, cudaStream_t stream) {
  const DecayMask& m = p.mask;
  const std::int64_t size = m.prefix + m.tokens;
  if (m.groups * size == 0 || m.heads == 0) return cudaSuccess;
  if (m.log_space) {
    const dim3 grid(static_cast<unsigned>(m.groups * size), static_cast<unsigned>(ceil_div(m.heads, kHeads)));
    const std::size_t shared = kHeads * (lanes_of(m) * sizeof(Rate<T>) + m.curves * sizeof(T));
    log_kernel<T><<<grid, kThreads, shared, stream>>>(p);
    return cudaGetLastError();
  }
  if (const cudaError_t e = make_table<T>(m, table, stream); e != cudaSuccess) return e;
  const std::size_t powers = static_cast<std::size_t>(lanes_of(m) * m.tokens) * sizeof(T);
  const bool copied = powers <= kTableBytes;
  const std::size_t shared = (copied ? powers : 0) + static_cast<std::size_t>(m.curves * m.axes * kRows) * sizeof(int);
  // Small rows of powers: many small blocks. Large ones leave room for one block on a multiprocessor, which is then
  // large and takes many rows.
  const bool large = copied && powers > kSmallTableBytes;
  constexpr int kLarge = sizeof(T) == 8 ? 512 : 1024;
  const auto kernel = large    ? gather_kernel<T, kLarge, true>
                      : copied ? gather_kernel<T, kThreads, true>
                               : gather_kernel<T, kThreads, false>;
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
      e != cudaSuccess) {
    return e;
  }
  const std::int64_t chunks = ceil_div(size, kRows);
  const std::int64_t wanted = ceil_div(large ? kFewBlocks : kManyBlocks, m.heads * m.groups);
  const dim3 grid(static_cast<unsigned>(chunks < wanted ? chunks : wanted), static_cast<unsigned>(m.heads),
                  static_cast<unsigned>(m.groups));
  kernel<<<grid, large ? kLarge : kThreads, shared, stream>>>(p, table);
  return cudaGetLastError();
}

template <class T>
cudaError_t start_histogram(const DecayMaskBackward& p, unsigned shares, const T* table, const std::int32_t* inverse,
                            const int* bad, double* parts, cudaStream_t stream) {
  const DecayMask& m = p.mask;
  const dim3 grid(shares, static_cast<unsigned>(m.heads), static_cast<unsigned>(ceil_div(m.curves, kBinCurves)));
  const auto kernel = m.tokens <= kBinThreads       ? histogram_kernel<T, 1>
                      : m.tokens <= 2 * kBinThreads ? histogram_kernel<T, 2>
                      : m.tokens <= 4 * kBinThreads ? histogram_kernel<T, 4>
                                                    : histogram_kernel<T, kMostTokens / kBinThreads>;
  const std::size_t rows = 2 * static_cast<std::size_t>(m.tokens) * sizeof(T);
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(rows));
      e != cudaSuccess) {
    return e;
  }
  kernel<<<grid, kBinThreads, rows, stream>>>(p, table, inverse, bad, parts);
  return cudaGetLastError();
}

template <class T>
cudaError_t backward(const DecayMaskBackward& p, unsigned char* scratch, cudaStream_t stream) {
  const DecayMask& m = p.mask;
  const std::int64_t lanes = lanes_of(m);
  if (m.heads == 0) return cudaSuccess;
  if ((p.dlog_decay || p.dweight) && lanes > 0) {
    double* parts = reinterpret_cast<double*>(scratch);
    const Layout l = layout(m);
    int* bad = nullptr;
    const std::int64_t shares = m.groups * m.tokens < kShares ? m.groups * m.tokens : kShares;
    if (shares > 0) {
      if (has_histogram(m)) {
        T* table = reinterpret_cast<T*>(scratch + l.table);
        std::int32_t* inverse = reinterpret_cast<std::int32_t*>(scratch + l.inverse);
        bad = reinterpret_cast<int*>(scratch + l.bad);
        if (const cudaError_t e = make_table<T>(m, table, stream); e != cudaSuccess) return e;
        invert_kernel<<<static_cast<unsigned>(m.groups * m.curves), kThreads, 0, stream>>>(m, inverse, bad);
        if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
        const cudaError_t e = start_histogram<T>(p, static_cast<unsigned>(shares), table, inverse, bad, parts, stream);
        if (e != cudaSuccess) return e;
      }
      const dim3 grid(static_cast<unsigned>(shares), static_cast<unsigned>(m.heads),
                      static_cast<unsigned>(ceil_div(lanes, kLanes)));
      const std::size_t shared = kThreads / 32 * sizeof(double) + lanes * sizeof(Rate<T>) + m.curves * sizeof(T);
      backward_kernel<T><<<grid, kThreads, shared, stream>>>(p, bad, parts);
      if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
    }
    finish_kernel<T>
        <<<static_cast<unsigned>(ceil_div(lanes * m.heads, 128)), 128, 0, stream>>>(p, parts, static_cast<int>(shares));
    if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  }
  if (p.dprefix_decay && m.prefix_decay) {
    prefix_kernel<T><<<static_cast<unsigned>(m.heads), kThreads, 0, stream>>>(p);
    if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace

std::size_t scratch_bytes(const DecayMaskForward& p) {
  return p.mask.log_space ? 0 : table_bytes(p.mask);
}

std::size_t scratch_bytes(const DecayMaskBackward& p) {
  return layout(p.mask).bytes;
}

cudaError_t launch(const DecayMaskForward& p, void* scratch, cudaStream_t stream) {
  return p.mask.dtype == DType::kFloat64 ? forward<double>(p, static_cast<double*>(scratch), stream)
                                         : forward<float>(p, static_cast<float*>(scratch), stream);
}

cudaError_t launch(const DecayMaskBackward& p, void* scratch, cudaStream_t stream) {
  unsigned char* base = static_cast<unsigned char*>(scratch);
  return p.mask.dtype == DType::kFloat64 ? backward<double>(p, base, stream) : backward<float>(p, base, stream);
}

}  // namespace violin::kernels::cuda
