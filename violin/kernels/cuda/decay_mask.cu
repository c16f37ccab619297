// The decay mask and its gradient on the GPU.
//
// The CPU gathers powers from rows of numbers; here a power costs less than a gather: the special-function units give
// 16 powers a clock and multiprocessor, a warp's gather from shared memory about half of that because its banks
// collide. So each power is 2^(distance * log2 gamma), with log2 gamma as a sum of two numbers so that only the last
// rounding of the exponent counts. A thread makes one (i, j) for up to eight heads at once and so computes distances
// once. Nothing depends on how large ranks are, so no bound has to be known.
//
// Backward: a block owns (a share of the rows, a head, up to eight curve axes) and sums dM * power * distance in
// float32 over 16 elements, those sums in double; a second kernel adds the blocks' sums in order. No atomics, the same
// bits each time.
#include "violin/kernels/cuda/decay_mask.h"

#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 8;     // heads per block of the forward pass
constexpr int kLanes = 8;     // (curve, axis) pairs per block of the backward pass
constexpr int kShares = 256;  // row shares of the backward pass
constexpr int kTermsPerSum = 16;

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

// One block per (g, i, chunk of heads), threads over j. Shared memory: rates [C * axes][kHeads], weights [C][kHeads].
template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ DecayMaskForward p) {
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
    } else if (m.log_space) {
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
    } else {
      for (int k = 0; k < kHeads; ++k) value[k] = 0;
      if (m.decay_per_axis) {
        for (int c = 0; c < curves; ++c)
          for (int k = 0; k < kHeads; ++k) {
            value[k] +=
                weights[c * kHeads + k] * power(curve_exponent(m, ranks, rates + k, c, kHeads, i - prefix, j - prefix));
          }
      } else {
        for (int c = 0; c < curves; ++c) {
          int far = 0;
          for (int a = 0; a < m.axes; ++a) far += distance(ranks + (c * m.axes + a) * m.tokens, i - prefix, j - prefix);
          const T x = static_cast<T>(far);
#pragma unroll
          for (int k = 0; k < kHeads; ++k)
            value[k] += weights[c * kHeads + k] * power(exponent(rates[c * kHeads + k], x));
        }
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
    for (int w = 0; w < kThreads / 32; ++w) sum += shared[w];
  }
  return sum;
}

// parts [kShares][heads][lanes][2]: the sums of dM w power distance, and of dM power, where a lane is a (curve, axis).
template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ DecayMaskBackward p, double* parts) {
  const DecayMask& m = p.mask;
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

template <class T>
cudaError_t forward(const DecayMaskForward& p, cudaStream_t stream) {
  const DecayMask& m = p.mask;
  const std::int64_t rows = m.groups * (m.prefix + m.tokens);
  if (rows == 0 || m.heads == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(m.heads, kHeads)));
  const std::size_t shared = kHeads * (lanes_of(m) * sizeof(Rate<T>) + m.curves * sizeof(T));
  forward_kernel<T><<<grid, kThreads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <class T>
cudaError_t backward(const DecayMaskBackward& p, double* parts, cudaStream_t stream) {
  const DecayMask& m = p.mask;
  const std::int64_t lanes = lanes_of(m);
  if (m.heads == 0) return cudaSuccess;
  if ((p.dlog_decay || p.dweight) && lanes > 0) {
    const std::int64_t shares = m.groups * m.tokens < kShares ? m.groups * m.tokens : kShares;
    if (shares > 0) {
      const dim3 grid(static_cast<unsigned>(shares), static_cast<unsigned>(m.heads),
                      static_cast<unsigned>(ceil_div(lanes, kLanes)));
      const std::size_t shared = kThreads / 32 * sizeof(double) + lanes * sizeof(Rate<T>) + m.curves * sizeof(T);
      backward_kernel<T><<<grid, kThreads, shared, stream>>>(p, parts);
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

std::size_t scratch_bytes(const DecayMaskForward&) {
  return 0;
}

std::size_t scratch_bytes(const DecayMaskBackward& p) {
  return align256(static_cast<std::size_t>(kShares * p.mask.heads * lanes_of(p.mask) * 2) * sizeof(double));
}

cudaError_t launch(const DecayMaskForward& p, void*, cudaStream_t stream) {
  return p.mask.dtype == DType::kFloat64 ? forward<double>(p, stream) : forward<float>(p, stream);
}

cudaError_t launch(const DecayMaskBackward& p, void* scratch, cudaStream_t stream) {
  double* parts = static_cast<double*>(scratch);
  return p.mask.dtype == DType::kFloat64 ? backward<double>(p, parts, stream) : backward<float>(p, parts, stream);
}

}  // namespace violin::kernels::cuda
