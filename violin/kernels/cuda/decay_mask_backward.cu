// The gradient of the decay mask on the GPU.
//
// For a curve and a head, the sum of dM w k gamma^k over all pairs of patches, k their distance: gathered from a row of
// k gamma^k as the mask is from a row of powers, 16 terms in float32, then in double, block by block in a fixed order.
#include "violin/kernels/cuda/decay_mask.cuh"

namespace violin::kernels::cuda {
namespace {

constexpr int kLanes = 8;     // (curve, axis) pairs per block
constexpr int kShares = 256;  // at most, of the rows
constexpr int kTermsPerSum = 16;
constexpr int kTogether = 2;  // heads of a block that gathers

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

// parts [shares][heads][lanes][2]: the sums of dM w k power, and of dM power, where a lane is a (curve, axis); this
// kernel fills one of the two. A block has kCount heads, up to kLanes curves, and takes kRows rows after kRows rows,
// threads over j. Shared memory as in the forward pass.
template <class T, int kGatherThreads, bool kCopied, Row kRow, int kCount>
__global__ void __launch_bounds__(kGatherThreads)
    gathering_kernel(const __grid_constant__ DecayMaskBackward p, const T* table, double* parts) {
  const DecayMask& m = p.mask;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ double sums[kGatherThreads / 32];
  const int n = static_cast<int>(m.tokens);
  const int axes = static_cast<int>(m.axes);
  const int heads = static_cast<int>(m.heads);
  const int h = static_cast<int>(blockIdx.y) * kCount;
  const int c0 = static_cast<int>(blockIdx.z) * kLanes;
  const int curves = min(kLanes, static_cast<int>(m.curves) - c0);
  const std::int64_t size = m.prefix + n;
  RowRanks* own = reinterpret_cast<RowRanks*>(shared);
  using Value = PerHead<T, kCount>;
  constexpr int kPart = kCount > 1 ? 8 : kRows;  // rows that a thread takes at a time
  const HeadRows<T, kRow, kCopied, kCount> gather(m, table, own + curves * axes, c0, curves, h);
  double totals[kLanes][kCount] = {};
  const std::int64_t chunks = (n + kRows - 1) / kRows;
  for (std::int64_t at = blockIdx.x; at < m.groups * chunks; at += gridDim.x) {
    const std::int64_t g = at / chunks;
    const int first = static_cast<int>(at % chunks) * kRows;
    const std::int32_t* ranks = m.ranks + (g * m.curves + c0) * axes * n;
    const bool inside = copy_ranks(ranks, curves * axes, n, first, own);
    for (int x = threadIdx.x; x < n * (kRows / kPart); x += kGatherThreads) {
      const int j = x % n;
      const int begin = x / n * kPart;
      Value gradient[kPart];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const T* dout = static_cast<const T*>(p.dout) +
                        ((g * heads + gather.head_of(k)) * size + m.prefix + first + begin) * size + m.prefix + j;
#pragma unroll
        for (int r = 0; r < kPart; ++r) gradient[r].of[k] = first + begin + r < n ? dout[r * size] : T(0);
      }
#pragma unroll
      for (int c = 0; c < kLanes; ++c) {
        if (c >= curves) break;
        Value sum = {};
        visit_rows<kPart>(gather, own, begin, inside, ranks, axes, c, j, [&](int r, const Value& value) {
#pragma unroll
          for (int k = 0; k < kCount; ++k) sum.of[k] += gradient[r].of[k] * value.of[k];
        });
#pragma unroll
        for (int k = 0; k < kCount; ++k) totals[c][k] += static_cast<double>(sum.of[k]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    if (c >= curves) break;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const double sum = block_sum(totals[c][k], sums);
      if (threadIdx.x != 0 || h + k >= heads) continue;
      double* to = parts + ((static_cast<std::int64_t>(blockIdx.x) * heads + h + k) * m.curves + c0 + c) * 2;
      const double weight = static_cast<double>(weight_of<T>(m, c0 + c, h + k));
      to[kRow == Row::kSlope ? 0 : 1] = kRow == Row::kSlope ? sum * weight : sum;
    }
  }
}

// parts as above where nothing can be gathered: log M, and a decay per axis.
template <class T>
__global__ void __launch_bounds__(kThreads)
    computing_kernel(const __grid_constant__ DecayMaskBackward p, double* parts) {
  const DecayMask& m = p.mask;
  extern __shared__ __align__(16) unsigned char shared[];
  const int curves = static_cast<int>(m.curves);
  const int axes = m.decay_per_axis ? static_cast<int>(m.axes) : 1;
  const int lanes = curves * axes;
  double* sums = reinterpret_cast<double*>(shared);  // [kThreads / 32]
  Rate<T>* rates = reinterpret_cast<Rate<T>*>(sums + kThreads / 32);
  T* weights = reinterpret_cast<T*>(rates + lanes);
  T* log_weights = weights + curves;
  const int h = static_cast<int>(blockIdx.y);
  const int lane0 = static_cast<int>(blockIdx.z) * kLanes;
  const int heads = static_cast<int>(m.heads);
  const int n = static_cast<int>(m.tokens);
  const int prefix = static_cast<int>(m.prefix);
  const std::int64_t size = prefix + n;
  for (int x = threadIdx.x; x < lanes; x += kThreads) {
    rates[x] = make_rate(static_cast<const T*>(m.log_decay)[x * heads + h]);
  }
  for (int x = threadIdx.x; x < curves; x += kThreads) {
    weights[x] = weight_of<T>(m, x, h);
    log_weights[x] = log2(abs(weights[x]));
  }
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
      LogSum<T> sum{0, 1};
      if (m.log_space) {
        sum = log_sum(curves, weights, log_weights, 1,
                      [&](int c) { return curve_exponent(m, ranks, rates, c, 1, i, j); });
        gradient /= sum.sum;
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
          const T value = gradient * sum.relative(x);
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

// Adds the shares, in the same order every time: one warp per (lane, head).
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ DecayMaskBackward p, const double* parts, int shares) {
  const DecayMask& m = p.mask;
  const int axes = m.decay_per_axis ? static_cast<int>(m.axes) : 1;
  const int lanes = static_cast<int>(m.curves) * axes;
  const int heads = static_cast<int>(m.heads);
  const int x = static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / 32);
  if (x >= lanes * heads) return;
  const int lane = x / heads;
  const int h = x % heads;
  double slope = 0;
  double mass = 0;
  for (int s = static_cast<int>(threadIdx.x) % 32; s < shares; s += 32) {
    const double* at = parts + ((static_cast<std::int64_t>(s) * heads + h) * lanes + lane) * 2;
    if (p.dlog_decay) slope += at[0];
    if (p.dweight) mass += at[1];
  }
  for (int s = 16; s > 0; s /= 2) {
    slope += __shfl_down_sync(0xffffffffu, slope, s);
    mass += __shfl_down_sync(0xffffffffu, mass, s);
  }
  if (threadIdx.x % 32 != 0) return;
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

bool gathers(const DecayMask& m) {
  return !m.log_space && !m.decay_per_axis;
}

std::size_t parts_bytes(const DecayMask& m) {
  return align256(static_cast<std::size_t>(kShares * m.heads * lanes_of(m) * 2) * sizeof(double));
}

// Fills `shares` shares, or, where that is 0, as many as suit it, and says how many.
template <class T, Row kRow>
cudaError_t start_gathering(const DecayMaskBackward& p, T* table, double* parts, std::int64_t& shares,
                            cudaStream_t stream) {
  const DecayMask& m = p.mask;
  if (const cudaError_t e = make_table<T, kRow>(m, table, stream); e != cudaSuccess) return e;
  const GatherPlan plan = plan_gather<T, kTogether>(m, m.curves < kLanes ? m.curves : kLanes);
  constexpr int kLarge = 512;
  const auto kernel = plan.heads > 1 ? plan.large ? gathering_kernel<T, kLarge, true, kRow, kTogether>
                                                  : gathering_kernel<T, kThreads, true, kRow, kTogether>
                      : plan.large ? gathering_kernel<T, kLarge, true, kRow, 1>
                      : plan.copied  ? gathering_kernel<T, kThreads, true, kRow, 1>
                                     : gathering_kernel<T, kThreads, false, kRow, 1>;
  if (const cudaError_t e = allow_most_shared(kernel, kOtherShared); e != cudaSuccess) return e;
  const std::int64_t blocks = ceil_div(m.curves, kLanes);
  const int threads = plan.large ? kLarge : kThreads;
  const std::int64_t heads = ceil_div(m.heads, plan.heads);
  if (shares == 0) {
    shares = share_chunks(kernel, threads, plan.shared, m.groups * ceil_div(m.tokens, kRows), heads * blocks, kShares);
  }
  const dim3 grid(static_cast<unsigned>(shares), static_cast<unsigned>(heads), static_cast<unsigned>(blocks));
  kernel<<<grid, threads, plan.shared, stream>>>(p, table, parts);
  return cudaGetLastError();
}

template <class T>
cudaError_t backward(const DecayMaskBackward& p, unsigned char* scratch, cudaStream_t stream) {
  const DecayMask& m = p.mask;
  const std::int64_t lanes = lanes_of(m);
  if (m.heads == 0) return cudaSuccess;
  if ((p.dlog_decay || p.dweight) && lanes > 0) {
    double* parts = reinterpret_cast<double*>(scratch);
    T* table = reinterpret_cast<T*>(scratch + parts_bytes(m));
    std::int64_t shares = m.groups * m.tokens < kShares ? m.groups * m.tokens : kShares;
    if (shares > 0 && gathers(m)) {
      shares = 0;  // both fill equally many
      if (p.dlog_decay) {
        const cudaError_t e = start_gathering<T, Row::kSlope>(p, table, parts, shares, stream);
        if (e != cudaSuccess) return e;
      }
      if (p.dweight) {
        const cudaError_t e = start_gathering<T, Row::kPower>(p, table, parts, shares, stream);
        if (e != cudaSuccess) return e;
      }
    } else if (shares > 0) {
      const dim3 grid(static_cast<unsigned>(shares), static_cast<unsigned>(m.heads),
                      static_cast<unsigned>(ceil_div(lanes, kLanes)));
      const std::size_t shared = kThreads / 32 * sizeof(double) + lanes * sizeof(Rate<T>) + 2 * m.curves * sizeof(T);
      computing_kernel<T><<<grid, kThreads, shared, stream>>>(p, parts);
      if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
    }
    finish_kernel<T><<<static_cast<unsigned>(ceil_div(lanes * m.heads * 32, kThreads)), kThreads, 0, stream>>>(
        p, parts, static_cast<int>(shares));
    if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  }
  if (p.dprefix_decay && m.prefix_decay) {
    prefix_kernel<T><<<static_cast<unsigned>(m.heads), kThreads, 0, stream>>>(p);
    if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace

std::size_t scratch_bytes(const DecayMaskBackward& p) {
  return parts_bytes(p.mask) + (gathers(p.mask) ? table_bytes(p.mask) : 0);
}

cudaError_t launch(const DecayMaskBackward& p, void* scratch, cudaStream_t stream) {
  unsigned char* base = static_cast<unsigned char*>(scratch);
  return p.mask.dtype == DType::kFloat64 ? backward<double>(p, base, stream) : backward<float>(p, base, stream);
}

}  // namespace violin::kernels::cuda
