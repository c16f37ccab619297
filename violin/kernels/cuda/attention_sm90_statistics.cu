// What the backward pass on Hopper starts with: the statistics of all queries, and dQ of a tail of few queries
// (attention_sm90.cuh). Both read each number once.
#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kPartThreads = 8;  // for a row of 64 numbers
constexpr int kRows = kThreads / kPartThreads;

// A thread's eight numbers of a row of a head, on which kRowThreads threads work; 0 past its end.
template <class T, int kRowThreads = kPartThreads>
struct Piece {
  uint4 bits{};

  Piece() = default;
  __device__ __forceinline__ Piece(const T* row, std::int64_t dim) {
    const int column = threadIdx.x % kRowThreads * 8;
    if (column < dim) bits = *reinterpret_cast<const uint4*>(row + column);
  }
  __device__ __forceinline__ float operator[](int i) const {
    return static_cast<float>(reinterpret_cast<const T*>(&bits)[i]);
  }
};
// The sum over a row, for all threads of the row.
template <class T, int kRowThreads>
__device__ __forceinline__ float dot(const Piece<T, kRowThreads>& x, const Piece<T, kRowThreads>& y) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
#pragma unroll
  for (int s = kRowThreads / 2; s > 0; s /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, s);
  return sum;
}
// Where no key counts the weights are 0.
__device__ __forceinline__ float log_sum(const AttentionBackward& p, std::int64_t row) {
  const float lse = static_cast<const float*>(p.lse)[row] * kLog2e;
  return lse == -INFINITY ? INFINITY : lse;
}

// D = sum(dO o O), and the log-sum-exp in base 2.
template <class T, int kParts>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const __grid_constant__ AttentionBackward p, float* statistics) {
  constexpr int kRowThreads = kParts * kPartThreads;
  const int nq = static_cast<int>(p.shape.queries);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const unsigned x = blockIdx.x * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  const unsigned rows = query_tiles * kTile;
  const unsigned heads = static_cast<unsigned>(p.shape.heads);
  const int i = static_cast<int>(x % rows);
  const std::int64_t bh = x / rows;
  const std::int64_t h = x / rows % heads;
  const std::int64_t b = x / rows / heads;
  Piece<T, kRowThreads> out, dout;
  if (i < nq) {
    out = Piece<T, kRowThreads>(head_of<T>(p.out, b, h) + i * p.out.token, p.shape.dim);
    dout = Piece<T, kRowThreads>(head_of<T>(p.dout, b, h) + i * p.dout.token, p.shape.dim);
  }
  const float sum = dot(out, dout);
  if (threadIdx.x % kRowThreads == 0) {
    float* to = statistics + (bh * query_tiles + i / kTile) * kStatisticsFloats + statistics_at(i % kTile);
    to[0] = i < nq ? log_sum(p, bh * nq + i) : INFINITY;
    to[2] = sum;
  }
}

// A number of the gain.
template <class T>
__device__ __forceinline__ float gain_at(const Records& records, std::int64_t g, int h, const AttentionShape& s,
                                         int query, int key) {
  const int query_tiles = static_cast<int>((s.queries + kTile - 1) / kTile);
  const int key_tiles = static_cast<int>((s.keys + kTile - 1) / kTile);
  const unsigned char* record = records.at(g, h, query_tiles, key_tiles, query / kTile, key / kTile);
  const int row = query % kTile;
  const int column = key % kTile;
  const std::uint32_t v =
      *reinterpret_cast<const std::uint16_t*>(record + row * 128 + (column / 8 ^ row % 8) * 16 + column % 8 * 2);
  const float2 range = *reinterpret_cast<const float2*>(record + kTileBytes);
  return fmaf(widen<T>(v, false), range.y, range.x);
}

// A block for each image and head, all at once; eight threads to a key.
template <class T, int kQueries>
__global__ void __launch_bounds__(kThreads, kQueries == 1 ? 3 : 2)
    tail_kernel(const __grid_constant__ AttentionBackward p, const Records records, const Tail tail) {
  const AttentionShape& s = p.shape;
  const int block = static_cast<int>(blockIdx.x);
  const int nk = static_cast<int>(s.keys);
  const int first = static_cast<int>(s.queries) - kQueries;
  const int h = block % static_cast<int>(s.heads);
  const std::int64_t b = block / static_cast<int>(s.heads);
  const float scale = static_cast<float>(p.scale);
  Piece<T> q[kQueries], dout[kQueries];
  float lse[kQueries], delta[kQueries];
  float sum[kQueries][8] = {};
#pragma unroll
  for (int n = 0; n < kQueries; ++n) {
    q[n] = Piece<T>(head_of<T>(p.q, b, h) + (first + n) * p.q.token, s.dim);
    dout[n] = Piece<T>(head_of<T>(p.dout, b, h) + (first + n) * p.dout.token, s.dim);
    lse[n] = log_sum(p, static_cast<std::int64_t>(block) * s.queries + first + n);
    delta[n] = dot(Piece<T>(head_of<T>(p.out, b, h) + (first + n) * p.out.token, s.dim), dout[n]);
  }
  const T* keys = head_of<T>(p.k, b, h);
  const T* values = head_of<T>(p.v, b, h);
  const auto visit = [&](int key, const Piece<T>& k, const Piece<T>& v, const float(&gain)[kQueries]) {
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      const float logit = dot(q[n], k);
      const float weight = power2(fmaf(logit, gain[n] * scale * kLog2e, -lse[n]));
      const float dweight = dot(dout[n], v);  // all lanes of a warp sum here, also those past the end
      const float gradient = key < nk ? weight * (dweight - delta[n]) : 0;
      if (tail.shares && threadIdx.x % kPartThreads == 0 && key < nk) {
        tail.shares[(static_cast<std::int64_t>(block) * kQueries + n) * nk + key] = gradient * logit * scale;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[n][i] = fmaf(gradient * gain[n], k[i], sum[n][i]);
    }
  };
  constexpr int kAtATime = 2;  // keys of a thread on their way
  for (int start = 0; start < nk; start += kAtATime * kRows) {
    Piece<T> k[kAtATime], v[kAtATime];
    float gain[kAtATime][kQueries];
    const int own = start + threadIdx.x / kPartThreads;
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int key = min(own + i * kRows, nk - 1);
      k[i] = Piece<T>(keys + key * p.k.token, s.dim);
      v[i] = Piece<T>(values + key * p.v.token, s.dim);
#pragma unroll
      for (int n = 0; n < kQueries; ++n) {
        gain[i][n] = records.data ? gain_at<T>(records, b % s.groups, h, s, first + n, key) : 1.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) visit(own + i * kRows, k[i], v[i], gain[i]);
  }
  if (p.dq.data == nullptr) return;
  __shared__ float sums[kQueries][kThreads / 32][kTile];
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kQueries; ++n)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x = sum[n][i];
      x += __shfl_xor_sync(0xffffffffu, x, 8);
      x += __shfl_xor_sync(0xffffffffu, x, 16);
      if (lane < kPartThreads) sums[n][threadIdx.x / 32][lane * 8 + i] = x;
    }
  __syncthreads();
  const int n = threadIdx.x / kTile;
  const int column = threadIdx.x % kTile;
  if (n >= kQueries || column >= s.dim) return;
  float all = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) all += sums[n][w][column];
  head_of<T>(p.dq, b, h)[(first + n) * p.dq.token + column] = static_cast<T>(all * scale);
}

template <class T>
cudaError_t start(const AttentionBackward& p, const Work& work, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const unsigned heads = static_cast<unsigned>(s.batch * s.heads);
  if (work.tail.queries > 0) {
    static_assert(kMostTailQueries == 2);
    const auto kernel = work.tail.queries == 1 ? tail_kernel<T, 1> : tail_kernel<T, 2>;
    kernel<<<heads, kThreads, 0, stream>>>(p, work.records, work.tail);
    if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  }
  const int parts = parts_of(steps_of(s));
  static_assert(kTile % kRows == 0);
  const unsigned blocks = heads * static_cast<unsigned>(ceil_div(s.queries, kTile)) * (kTile / kRows) * parts;
  const auto kernel = parts == 1 ? statistics_kernel<T, 1> : statistics_kernel<T, 2>;
  kernel<<<blocks, kThreads, 0, stream>>>(p, work.statistics);
  return cudaGetLastError();
}

}  // namespace

cudaError_t start_statistics(const AttentionBackward& p, const Work& work, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? start<__half>(p, work, stream) : start<__nv_bfloat16>(p, work, stream);
}

}  // namespace violin::kernels::cuda::sm90
