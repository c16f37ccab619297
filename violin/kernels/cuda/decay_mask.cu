// The decay mask on the GPU: gathered from rows of powers; log M, which cannot be, computes its powers.
#include "violin/kernels/cuda/decay_mask.cuh"

namespace violin::kernels::cuda {
namespace {

constexpr int kHeads = 8;  // per block of log M
template <class T>
constexpr int kTogether = sizeof(T) == 4 ? 4 : 2;  // heads of a block that gathers

// A block has kCount heads of one group and takes kRows rows after kRows rows, threads over j. Shared memory: the rows'
// ranks [curve * axes], these heads' powers if they fit.
template <class T, int kGatherThreads, bool kCopied, int kCount>
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
  const int h = static_cast<int>(blockIdx.y) * kCount;
  const std::int64_t g = blockIdx.z;
  const std::int32_t* ranks = m.ranks + g * curves * axes * n;
  RowRanks* own = reinterpret_cast<RowRanks*>(shared);
  using Value = PerHead<T, kCount>;
  constexpr int kPart = kCount > 1 ? 8 : kRows;  // rows that a thread takes at a time
  const HeadRows<T, Row::kPower, kCopied, kCount> gather(m, table, own + curves * axes, 0,
                                                         curves * (m.decay_per_axis ? axes : 1), h);
  for (int first = static_cast<int>(blockIdx.x) * kRows; first < size; first += static_cast<int>(gridDim.x) * kRows) {
    const bool inside = copy_ranks(ranks, curves * axes, n, first - prefix, own);
    for (int x = threadIdx.x; x < size * (kRows / kPart); x += kGatherThreads) {
      const int j = x % size;
      const int begin = x / size * kPart;
      Value value[kPart] = {};
      if (j >= prefix) {
        for (int c = 0; c < curves; ++c) {
          Value weight;
#pragma unroll
          for (int k = 0; k < kCount; ++k) weight.of[k] = weight_of<T>(m, c, gather.head_of(k));
          if (kCount == 1 && m.decay_per_axis) {
            T product[kPart];
#pragma unroll
            for (int r = 0; r < kPart; ++r) product[r] = weight.of[0];
            for (int lane = c * axes; lane < (c + 1) * axes; ++lane) {
              int far[kPart] = {};
              add_distances(own[lane], begin, ranks[lane * n + j - prefix], far);
#pragma unroll
              for (int r = 0; r < kPart; ++r) product[r] *= gather(lane, far[r]).of[0];
            }
#pragma unroll
            for (int r = 0; r < kPart; ++r) value[r].of[0] += product[r];
          } else {
            visit_rows<kPart>(gather, own, begin, inside, ranks, axes, c, j - prefix,
                              [&](int r, const Value& power_of) {
#pragma unroll
                                for (int k = 0; k < kCount; ++k) value[r].of[k] += weight.of[k] * power_of.of[k];
                              });
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (h + k >= heads) continue;
        T* out = static_cast<T*>(p.out) + ((g * heads + h + k) * size + first + begin) * size + j;
#pragma unroll
        for (int r = 0; r < kPart; ++r) {
          const int i = first + begin + r;
          if (i >= size) continue;
          out[static_cast<std::int64_t>(r) * size] =
              i < prefix || j < prefix ? prefix_value<T>(m, h + k, i == j) : value[r].of[k];
        }
      }
    }
  }
}

// log M. One block per (g, i, chunk of heads), threads over j. Shared memory: rates [C * axes][kHeads], weights
// [C][kHeads] and their logarithms.
template <class T>
__global__ void __launch_bounds__(kThreads) log_kernel(const __grid_constant__ DecayMaskForward p) {
  const DecayMask& m = p.mask;
  extern __shared__ __align__(16) unsigned char shared[];
  const int curves = static_cast<int>(m.curves);
  const int rows = curves * (m.decay_per_axis ? static_cast<int>(m.axes) : 1);
  Rate<T>* rates = reinterpret_cast<Rate<T>*>(shared);
  T* weights = reinterpret_cast<T*>(rates + rows * kHeads);
  T* log_weights = weights + curves * kHeads;
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
    log_weights[x] = log2(abs(weights[x]));
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
        const LogSum<T> sum = log_sum(curves, weights + k, log_weights + k, kHeads, [&](int c) {
          return curve_exponent(m, ranks, rates + k, c, kHeads, i - prefix, j - prefix);
        });
        value[k] = sum.top * ln2 + log(sum.sum);
      }
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (k < count) out[static_cast<std::int64_t>(k) * size * size + j] = value[k];
    }
  }
}

template <class T>
cudaError_t forward(const DecayMaskForward& p, T* table, cudaStream_t stream) {
  const DecayMask& m = p.mask;
  const std::int64_t size = m.prefix + m.tokens;
  if (m.groups * size == 0 || m.heads == 0) return cudaSuccess;
  if (m.log_space) {
    const dim3 grid(static_cast<unsigned>(m.groups * size), static_cast<unsigned>(ceil_div(m.heads, kHeads)));
    const std::size_t shared = kHeads * (lanes_of(m) * sizeof(Rate<T>) + 2 * m.curves * sizeof(T));
    log_kernel<T><<<grid, kThreads, shared, stream>>>(p);
    return cudaGetLastError();
  }
  if (const cudaError_t e = make_table<T, Row::kPower>(m, table, stream); e != cudaSuccess) return e;
  constexpr int kLarge = 512;
  constexpr int kMany = kTogether<T>;
  const GatherPlan plan = plan_gather<T, kMany>(m, lanes_of(m));
  const auto kernel = plan.heads > 1
                          ? plan.large ? gather_kernel<T, kLarge, true, kMany> : gather_kernel<T, kThreads, true, kMany>
                      : plan.large  ? gather_kernel<T, kLarge, true, 1>
                      : plan.copied ? gather_kernel<T, kThreads, true, 1>
                                    : gather_kernel<T, kThreads, false, 1>;
  if (const cudaError_t e = allow_most_shared(kernel, kOtherShared); e != cudaSuccess) return e;
  const int threads = plan.large ? kLarge : kThreads;
  constexpr std::int64_t kMost = 4096;
  const std::int64_t heads = ceil_div(m.heads, plan.heads);
  const std::int64_t blocks =
      share_chunks(kernel, threads, plan.shared, ceil_div(size, kRows), heads * m.groups, kMost);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(heads), static_cast<unsigned>(m.groups));
  kernel<<<grid, threads, plan.shared, stream>>>(p, table);
  return cudaGetLastError();
}

}  // namespace

std::size_t scratch_bytes(const DecayMaskForward& p) {
  return p.mask.log_space ? 0 : table_bytes(p.mask);
}

cudaError_t launch(const DecayMaskForward& p, void* scratch, cudaStream_t stream) {
  return p.mask.dtype == DType::kFloat64 ? forward<double>(p, static_cast<double*>(scratch), stream)
                                         : forward<float>(p, static_cast<float*>(scratch), stream);
}

}  // namespace violin::kernels::cuda
