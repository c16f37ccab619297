// Attention in float32 and float64 on the ordinary arithmetic units: the exact path, and the reference of the fast
// ones.
//
// A block of 16 x 16 threads works on square tiles of 16 M x 16 M logits; a thread owns the M x M of them at rows ty +
// 16 a and columns tx + 16 c, so that a product step reads 2 M numbers from shared memory for M^2 multiply-adds. Rows
// of a tile in shared memory are d + 1 numbers apart, which keeps the 16 columns of a step in different banks. The
// backward pass is three kernels, each owning what it sums: dK and dV per key tile, dQ per query tile, the tables'
// gradients per (query, key) tile with a loop over the images. Nothing is summed with atomics.
//
// Before them, one kernel writes down what they need to know of each query: the log-sum-exp that the forward pass
// saved, and D = rowsum(dO o O). A large log-sum-exp resolves weights to |LSE| roundings only, and where a row has one
// weight D is off by more than dP - D itself: tiles of queries with large ones, or with few keys, pass over the keys
// once more and measure the softmax and D from the very products that the gradients are made of.
#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxDimSteps = 8;    // d <= 128 in columns of 16
constexpr int kImagesPerSum = 16;  // float32 sums over many images lose bits; sums of sums of 16 do not

template <class T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(INFINITY);
}

template <class T>
__device__ __forceinline__ T sum_of_16(T x) {
  for (int s = 8; s > 0; s /= 2) x += __shfl_xor_sync(0xffffffffu, x, s);
  return x;
}

// Rows [first, first + kTile) of a head into shared memory; rows past the end become 0.
template <class T, int kTile>
__device__ void load_rows(T* to, const T* from, std::int64_t stride, int first, int rows, int d) {
  for (int x = threadIdx.x; x < kTile * d; x += kThreads) {
    const int r = x / d;
    const int c = x % d;
    to[r * (d + 1) + c] = first + r < rows ? from[(first + r) * stride + c] : T(0);
  }
}

// out[a][c] = sum_k rows[ty + 16 a][k] * columns[tx + 16 c][k]
template <class T, int M>
__device__ __forceinline__ void product(T (&out)[M][M], const T* rows, const T* columns, int d) {
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  for (int a = 0; a < M; ++a)
    for (int c = 0; c < M; ++c) out[a][c] = 0;
  for (int k = 0; k < d; ++k) {
    T x[M], y[M];
#pragma unroll
    for (int a = 0; a < M; ++a) x[a] = rows[(ty + 16 * a) * (d + 1) + k];
#pragma unroll
    for (int c = 0; c < M; ++c) y[c] = columns[(tx + 16 * c) * (d + 1) + k];
#pragma unroll
    for (int a = 0; a < M; ++a)
#pragma unroll
      for (int c = 0; c < M; ++c) out[a][c] += x[a] * y[c];
  }
}

// sum[a][s] += sum_j weights[ty + 16 a][j] * rows[j][tx + 16 s], where the tile is summed by itself first: long sums of
// float32 lose fewer bits so.
template <class T, int M>
__device__ __forceinline__ void accumulate(T (&sum)[M][kMaxDimSteps], const T* weights, const T* rows, int d) {
  constexpr int kTile = 16 * M;
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  T part[M][kMaxDimSteps] = {};
  for (int j = 0; j < kTile; ++j) {
    T x[M];
#pragma unroll
    for (int a = 0; a < M; ++a) x[a] = weights[(ty + 16 * a) * (kTile + 1) + j];
#pragma unroll
    for (int s = 0; s < kMaxDimSteps; ++s) {
      const int c = tx + 16 * s;
      if (c < d) {
        const T y = rows[j * (d + 1) + c];
#pragma unroll
        for (int a = 0; a < M; ++a) part[a][s] += x[a] * y;
      }
    }
  }
#pragma unroll
  for (int a = 0; a < M; ++a)
#pragma unroll
    for (int s = 0; s < kMaxDimSteps; ++s) sum[a][s] += part[a][s];
}

template <class T, int M>
__device__ __forceinline__ void store(const T (&sum)[M][kMaxDimSteps], T* to, std::int64_t stride, int first, int rows,
                                      int d, T factor) {
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
#pragma unroll
  for (int a = 0; a < M; ++a)
#pragma unroll
    for (int s = 0; s < kMaxDimSteps; ++s) {
      const int r = first + ty + 16 * a;
      const int c = tx + 16 * s;
      if (r < rows && c < d) to[r * stride + c] = sum[a][s] * factor;
    }
}

// What a block works on: a tile of queries, or of keys, of one image and head; and the thread's place in it.
struct Place {
  int d, nq, nk;
  int first;  // row of the tile
  std::int64_t b, h;
  int tx, ty;
};

template <int kTile>
__device__ __forceinline__ Place place(const AttentionShape& s, std::int64_t rows) {
  const int tiles = (static_cast<int>(rows) + kTile - 1) / kTile;
  const std::int64_t image = blockIdx.x / tiles;
  return {static_cast<int>(s.dim),
          static_cast<int>(s.queries),
          static_cast<int>(s.keys),
          static_cast<int>(blockIdx.x % tiles) * kTile,
          image / s.heads,
          image % s.heads,
          static_cast<int>(threadIdx.x % 16),
          static_cast<int>(threadIdx.x / 16)};
}

// What one element of the logits contributes to the gradients.
template <class T>
struct Element {
  T weight;    // P o gate
  T dlogit;    // dZ
  T dproduct;  // dZ o gain; times scale it is dA
  T dgate;
};

// What the backward kernels know of each query: weights are exp(logit - shift) * factor, and D. [B,h,Nq] each.
template <class T>
struct Statistics {
  T* shift;
  T* factor;
  T* delta;
};

template <class T>
struct Tables {
  const T* gain;
  const T* bias;
  const T* gate;
  std::int64_t gain_row, bias_row, gate_row;
  T scale;

  template <class Call>
  __device__ Tables(const Call& p, std::int64_t g, std::int64_t h)
      : gain(slice_of<T>(p.gain, g, h)),
        bias(slice_of<T>(p.bias, g, h)),
        gate(slice_of<T>(p.gate, g, h)),
        gain_row(p.gain.row),
        bias_row(p.bias.row),
        gate_row(p.gate.row),
        scale(static_cast<T>(p.scale)) {}

  __device__ T gain_at(int i, int j) const { return gain ? gain[i * gain_row + j] : T(1); }
  __device__ T open_at(int i, int j) const { return gate ? gate[i * gate_row + j] : T(1); }
  __device__ T logit(T product, T gain, int i, int j) const {
    const T z = product * scale * gain;
    return bias ? z + bias[i * bias_row + j] : z;
  }

  // product: (Q K^T)[i,j]; dot: (dO V^T)[i,j]; row: of the statistics
  __device__ Element<T> element(T product, T dot, int i, int j, const Statistics<T>& of, std::int64_t row) const {
    const T m = gain_at(i, j);
    const T weight = exp(logit(product, m, i, j) - of.shift[row]) * of.factor[row];
    const T open = open_at(i, j);
    const T dlogit = weight * (dot * open - of.delta[row]);
    return {weight * open, dlogit, dlogit * m, weight * dot};
  }
};

template <class T, int M>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ AttentionForward p) {
  constexpr int kTile = 16 * M;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto [d, nq, nk, i0, b, h, tx, ty] = place<kTile>(p.shape, p.shape.queries);
  T* q = reinterpret_cast<T*>(shared);
  T* k = q + kTile * (d + 1);
  T* v = k + kTile * (d + 1);
  T* weights = v + kTile * (d + 1);
  const Tables<T> tables(p, b % p.shape.groups, h);

  T sum[M][kMaxDimSteps] = {};
  T maximum[M], total[M];
  for (int a = 0; a < M; ++a) {
    maximum[a] = -infinity<T>();
    total[a] = 0;
  }
  load_rows<T, kTile>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
  for (int j0 = 0; j0 < nk; j0 += kTile) {
    __syncthreads();
    load_rows<T, kTile>(k, head_of<T>(p.k, b, h), p.k.token, j0, nk, d);
    load_rows<T, kTile>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
    __syncthreads();
    T z[M][M];
    product<T, M>(z, q, k, d);
#pragma unroll
    for (int a = 0; a < M; ++a) {
      const int i = i0 + ty + 16 * a;
      T top = maximum[a];
#pragma unroll
      for (int c = 0; c < M; ++c) {
        const int j = j0 + tx + 16 * c;
        z[a][c] = i < nq && j < nk ? tables.logit(z[a][c], tables.gain_at(i, j), i, j) : -infinity<T>();
        top = max(top, z[a][c]);
      }
      for (int s = 8; s > 0; s /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, s));
      const T shift = top == -infinity<T>() ? T(0) : top;
      const T decay = exp(maximum[a] - shift);
      maximum[a] = top;
      total[a] *= decay;
#pragma unroll
      for (int s = 0; s < kMaxDimSteps; ++s) sum[a][s] *= decay;
#pragma unroll
      for (int c = 0; c < M; ++c) {
        const int j = j0 + tx + 16 * c;
        T weight = exp(z[a][c] - shift);
        total[a] += weight;
        if (i < nq && j < nk) weight *= tables.open_at(i, j);
        weights[(ty + 16 * a) * (kTile + 1) + tx + 16 * c] = weight;
      }
    }
    __syncthreads();
    accumulate<T, M>(sum, weights, v, d);
  }
#pragma unroll
  for (int a = 0; a < M; ++a) {
    const T t = sum_of_16(total[a]);
    const T inverse = t == 0 ? T(0) : T(1) / t;  // and not a number where t is none
#pragma unroll
    for (int s = 0; s < kMaxDimSteps; ++s) sum[a][s] *= inverse;
    const int i = i0 + ty + 16 * a;
    if (tx == 0 && i < nq) {
      static_cast<T*>(p.lse)[(b * p.shape.heads + h) * nq + i] = t == 0 ? -infinity<T>() : maximum[a] + log(t);
    }
  }
  store<T, M>(sum, head_of<T>(p.out, b, h), p.out.token, i0, nq, d, T(1));
}

template <class T, int M>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const __grid_constant__ AttentionBackward p, Statistics<T> to) {
  constexpr int kTile = 16 * M;
  constexpr T kLargeLse = 16;  // beyond it the saved log-sum-exp is too coarse
  extern __shared__ __align__(16) unsigned char shared[];
  const auto [d, nq, nk, i0, b, h, tx, ty] = place<kTile>(p.shape, p.shape.queries);
  T* q = reinterpret_cast<T*>(shared);
  T* g_out = q + kTile * (d + 1);
  T* k = g_out + kTile * (d + 1);
  T* v = k + kTile * (d + 1);
  const Tables<T> tables(p, b % p.shape.groups, h);
  const std::int64_t first = (b * p.shape.heads + h) * nq;
  const T* lse = static_cast<const T*>(p.lse) + first;

  bool measures = nk <= kTile;  // which is cheap then
#pragma unroll
  for (int a = 0; a < M; ++a) {
    const int i = i0 + ty + 16 * a;
    if (i < nq && abs(lse[i]) > kLargeLse && lse[i] != -infinity<T>()) measures = true;
  }
  T shift[M], factor[M], delta[M];
  load_rows<T, kTile>(g_out, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d);
  if (__syncthreads_or(measures)) {
    T total[M];
    for (int a = 0; a < M; ++a) {
      shift[a] = -infinity<T>();
      total[a] = delta[a] = 0;
    }
    load_rows<T, kTile>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
    for (int j0 = 0; j0 < nk; j0 += kTile) {
      __syncthreads();
      load_rows<T, kTile>(k, head_of<T>(p.k, b, h), p.k.token, j0, nk, d);
      load_rows<T, kTile>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
      __syncthreads();
      T z[M][M], dot_ij[M][M];
      product<T, M>(z, q, k, d);
      product<T, M>(dot_ij, g_out, v, d);
#pragma unroll
      for (int a = 0; a < M; ++a) {
        const int i = i0 + ty + 16 * a;
        T top = shift[a];
#pragma unroll
        for (int c = 0; c < M; ++c) {
          const int j = j0 + tx + 16 * c;
          const bool exists = i < nq && j < nk;
          z[a][c] = exists ? tables.logit(z[a][c], tables.gain_at(i, j), i, j) : -infinity<T>();
          dot_ij[a][c] *= exists ? tables.open_at(i, j) : T(0);
          top = max(top, z[a][c]);
        }
        for (int s = 8; s > 0; s /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, s));
        const T finite = top == -infinity<T>() ? T(0) : top;
        const T decay = exp(shift[a] - finite);
        shift[a] = top;
        total[a] *= decay;
        delta[a] *= decay;
#pragma unroll
        for (int c = 0; c < M; ++c) {
          const T weight = exp(z[a][c] - finite);
          total[a] += weight;
          delta[a] += weight * dot_ij[a][c];
        }
      }
    }
#pragma unroll
    for (int a = 0; a < M; ++a) {
      const T t = sum_of_16(total[a]);
      factor[a] = t == 0 ? T(0) : T(1) / t;
      delta[a] = sum_of_16(delta[a]) * factor[a];
    }
  } else {
    load_rows<T, kTile>(q, head_of<T>(p.out, b, h), p.out.token, i0, nq, d);
    __syncthreads();
#pragma unroll
    for (int a = 0; a < M; ++a) {
      const int r = ty + 16 * a;
      T dot = 0;
      for (int c = tx; c < d; c += 16) dot += q[r * (d + 1) + c] * g_out[r * (d + 1) + c];
      delta[a] = sum_of_16(dot);
      shift[a] = i0 + r < nq ? lse[i0 + r] : T(0);
      factor[a] = 1;
    }
  }
#pragma unroll
  for (int a = 0; a < M; ++a) {
    const int i = i0 + ty + 16 * a;
    if (tx != 0 || i >= nq) continue;
    to.shift[first + i] = shift[a] == -infinity<T>() ? infinity<T>() : shift[a];  // no key: every weight is 0
    to.factor[first + i] = factor[a];
    to.delta[first + i] = delta[a];
  }
}

// dK and dV of a key tile: rows of the tile are keys, columns queries.
template <class T, int M>
__global__ void __launch_bounds__(kThreads) dkv_kernel(const __grid_constant__ AttentionBackward p, Statistics<T> of) {
  constexpr int kTile = 16 * M;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto [d, nq, nk, j0, b, h, tx, ty] = place<kTile>(p.shape, p.shape.keys);
  T* k = reinterpret_cast<T*>(shared);
  T* v = k + kTile * (d + 1);
  T* q = v + kTile * (d + 1);
  T* g_out = q + kTile * (d + 1);
  T* weights = g_out + kTile * (d + 1);
  T* dproducts = weights + kTile * (kTile + 1);
  const Tables<T> tables(p, b % p.shape.groups, h);
  const std::int64_t row = (b * p.shape.heads + h) * nq;

  T dk[M][kMaxDimSteps] = {};
  T dv[M][kMaxDimSteps] = {};
  load_rows<T, kTile>(k, head_of<T>(p.k, b, h), p.k.token, j0, nk, d);
  load_rows<T, kTile>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
  for (int i0 = 0; i0 < nq; i0 += kTile) {
    __syncthreads();
    load_rows<T, kTile>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
    load_rows<T, kTile>(g_out, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d);
    __syncthreads();
    T product_ji[M][M], dot_ji[M][M];
    product<T, M>(product_ji, k, q, d);
    product<T, M>(dot_ji, v, g_out, d);
#pragma unroll
    for (int a = 0; a < M; ++a)
#pragma unroll
      for (int c = 0; c < M; ++c) {
        const int i = i0 + tx + 16 * c;
        const int j = j0 + ty + 16 * a;
        Element<T> e{};
        if (i < nq && j < nk) e = tables.element(product_ji[a][c], dot_ji[a][c], i, j, of, row + i);
        weights[(ty + 16 * a) * (kTile + 1) + tx + 16 * c] = e.weight;
        dproducts[(ty + 16 * a) * (kTile + 1) + tx + 16 * c] = e.dproduct;
      }
    __syncthreads();
    accumulate<T, M>(dv, weights, g_out, d);
    accumulate<T, M>(dk, dproducts, q, d);
  }
  if (p.dk.data) store<T, M>(dk, head_of<T>(p.dk, b, h), p.dk.token, j0, nk, d, static_cast<T>(p.scale));
  if (p.dv.data) store<T, M>(dv, head_of<T>(p.dv, b, h), p.dv.token, j0, nk, d, T(1));
}

template <class T, int M>
__global__ void __launch_bounds__(kThreads) dq_kernel(const __grid_constant__ AttentionBackward p, Statistics<T> of) {
  constexpr int kTile = 16 * M;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto [d, nq, nk, i0, b, h, tx, ty] = place<kTile>(p.shape, p.shape.queries);
  T* q = reinterpret_cast<T*>(shared);
  T* g_out = q + kTile * (d + 1);
  T* k = g_out + kTile * (d + 1);
  T* v = k + kTile * (d + 1);
  T* dproducts = v + kTile * (d + 1);
  const Tables<T> tables(p, b % p.shape.groups, h);
  const std::int64_t row = (b * p.shape.heads + h) * nq;

  T dq[M][kMaxDimSteps] = {};
  load_rows<T, kTile>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
  load_rows<T, kTile>(g_out, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d);
  for (int j0 = 0; j0 < nk; j0 += kTile) {
    __syncthreads();
    load_rows<T, kTile>(k, head_of<T>(p.k, b, h), p.k.token, j0, nk, d);
    load_rows<T, kTile>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
    __syncthreads();
    T product_ij[M][M], dot_ij[M][M];
    product<T, M>(product_ij, q, k, d);
    product<T, M>(dot_ij, g_out, v, d);
#pragma unroll
    for (int a = 0; a < M; ++a)
#pragma unroll
      for (int c = 0; c < M; ++c) {
        const int i = i0 + ty + 16 * a;
        const int j = j0 + tx + 16 * c;
        T value = 0;
        if (i < nq && j < nk) {
          value = tables.element(product_ij[a][c], dot_ij[a][c], i, j, of, row + i).dproduct;
        }
        dproducts[(ty + 16 * a) * (kTile + 1) + tx + 16 * c] = value;
      }
    __syncthreads();
    accumulate<T, M>(dq, dproducts, k, d);
  }
  store<T, M>(dq, head_of<T>(p.dq, b, h), p.dq.token, i0, nq, d, static_cast<T>(p.scale));
}

// Gradients of the tables in one (query, key) tile of one group and head: a sum over the images of the group, in order.
template <class T, int M>
__global__ void __launch_bounds__(kThreads)
    tables_kernel(const __grid_constant__ AttentionBackward p, Statistics<T> of) {
  constexpr int kTile = 16 * M;
  extern __shared__ __align__(16) unsigned char shared[];
  const int d = static_cast<int>(p.shape.dim);
  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  T* q = reinterpret_cast<T*>(shared);
  T* g_out = q + kTile * (d + 1);
  T* k = g_out + kTile * (d + 1);
  T* v = k + kTile * (d + 1);
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int j0 = static_cast<int>(blockIdx.x % key_tiles) * kTile;
  const int i0 = static_cast<int>(blockIdx.x / key_tiles % query_tiles) * kTile;
  const std::int64_t gh = blockIdx.x / key_tiles / query_tiles;
  const std::int64_t h = gh % p.shape.heads;
  const std::int64_t g = gh / p.shape.heads;
  const Tables<T> tables(p, g, h);
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;

  T dgain[M][M] = {}, dbias[M][M] = {}, dgate[M][M] = {};
  T part_gain[M][M] = {}, part_bias[M][M] = {}, part_gate[M][M] = {};
  int images = 0;
  for (std::int64_t b = g; b < p.shape.batch; b += p.shape.groups) {
    const std::int64_t row = (b * p.shape.heads + h) * nq;
    __syncthreads();
    load_rows<T, kTile>(q, head_of<T>(p.q, b, h), p.q.token, i0, nq, d);
    load_rows<T, kTile>(g_out, head_of<T>(p.dout, b, h), p.dout.token, i0, nq, d);
    load_rows<T, kTile>(k, head_of<T>(p.k, b, h), p.k.token, j0, nk, d);
    load_rows<T, kTile>(v, head_of<T>(p.v, b, h), p.v.token, j0, nk, d);
    __syncthreads();
    T product_ij[M][M], dot_ij[M][M];
    product<T, M>(product_ij, q, k, d);
    product<T, M>(dot_ij, g_out, v, d);
    const bool fold = ++images % kImagesPerSum == 0;
#pragma unroll
    for (int a = 0; a < M; ++a)
#pragma unroll
      for (int c = 0; c < M; ++c) {
        const int i = i0 + ty + 16 * a;
        const int j = j0 + tx + 16 * c;
        if (i < nq && j < nk) {
          const Element<T> e = tables.element(product_ij[a][c], dot_ij[a][c], i, j, of, row + i);
          part_gain[a][c] += e.dlogit * product_ij[a][c];
          part_bias[a][c] += e.dlogit;
          part_gate[a][c] += e.dgate;
        }
        if (fold) {
          dgain[a][c] += part_gain[a][c];
          dbias[a][c] += part_bias[a][c];
          dgate[a][c] += part_gate[a][c];
          part_gain[a][c] = part_bias[a][c] = part_gate[a][c] = 0;
        }
      }
  }
#pragma unroll
  for (int a = 0; a < M; ++a)
#pragma unroll
    for (int c = 0; c < M; ++c) {
      const int i = i0 + ty + 16 * a;
      const int j = j0 + tx + 16 * c;
      if (i >= nq || j >= nk) continue;
      const std::int64_t at = (gh * nq + i) * nk + j;
      if (p.dgain) static_cast<T*>(p.dgain)[at] = (dgain[a][c] + part_gain[a][c]) * static_cast<T>(p.scale);
      if (p.dbias) static_cast<T*>(p.dbias)[at] = dbias[a][c] + part_bias[a][c];
      if (p.dgate) static_cast<T*>(p.dgate)[at] = dgate[a][c] + part_gate[a][c];
    }
}

template <class T, int M>
std::size_t shared_bytes(std::int64_t d, int tiles, int squares) {
  return (tiles * 16 * M * (d + 1) + squares * 16 * M * (16 * M + 1)) * sizeof(T);
}

template <class P, class... Args>
cudaError_t start(void (*kernel)(P, Args...), std::int64_t blocks, std::size_t shared, cudaStream_t stream, const P& p,
                  Args... args) {
  if (blocks == 0) return cudaSuccess;
  if (const cudaError_t e = allow_most_shared(kernel); e != cudaSuccess) return e;
  kernel<<<static_cast<unsigned>(blocks), kThreads, shared, stream>>>(p, args...);
  return cudaGetLastError();
}

template <class T, int M>
cudaError_t forward(const AttentionForward& p, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  return start(forward_kernel<T, M>, ceil_div(s.queries, 16 * M) * s.batch * s.heads, shared_bytes<T, M>(s.dim, 3, 1),
               stream, p);
}

template <class T, int M>
cudaError_t backward(const AttentionBackward& p, void* scratch, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const std::int64_t query_tiles = ceil_div(s.queries, 16 * M);
  const std::int64_t key_tiles = ceil_div(s.keys, 16 * M);
  const std::int64_t rows = s.batch * s.heads * s.queries;
  T* const first = static_cast<T*>(scratch);
  const Statistics<T> of{first, first + rows, first + 2 * rows};
  cudaError_t e =
      start(statistics_kernel<T, M>, query_tiles * s.batch * s.heads, shared_bytes<T, M>(s.dim, 4, 0), stream, p, of);
  if (e == cudaSuccess && (p.dk.data || p.dv.data)) {
    e = start(dkv_kernel<T, M>, key_tiles * s.batch * s.heads, shared_bytes<T, M>(s.dim, 4, 2), stream, p, of);
  }
  if (e == cudaSuccess && p.dq.data) {
    e = start(dq_kernel<T, M>, query_tiles * s.batch * s.heads, shared_bytes<T, M>(s.dim, 4, 1), stream, p, of);
  }
  if (e == cudaSuccess && (p.dgain || p.dbias || p.dgate)) {
    e = start(tables_kernel<T, M>, query_tiles * key_tiles * s.groups * s.heads, shared_bytes<T, M>(s.dim, 4, 0),
              stream, p, of);
  }
  return e;
}

// Devices differ in shared memory per block (sm_86: 99 KiB, sm_80: 163, sm_90: 227); large tiles where they fit.
template <class T, int M>
bool fits(std::int64_t d) {
  return shared_bytes<T, M>(d, 4, 2) <= most_shared();
}

}  // namespace

cudaError_t launch_simt(const AttentionForward& p, cudaStream_t stream) {
  const std::int64_t d = p.shape.dim;
  if (p.dtype == DType::kFloat64) {
    return fits<double, 2>(d) ? forward<double, 2>(p, stream) : forward<double, 1>(p, stream);
  }
  return fits<float, 4>(d) ? forward<float, 4>(p, stream) : forward<float, 2>(p, stream);
}

std::size_t scratch_simt(const AttentionBackward& p) {
  const std::int64_t rows = p.shape.batch * p.shape.heads * p.shape.queries;
  return static_cast<std::size_t>(3 * rows) * (p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
}

cudaError_t launch_simt(const AttentionBackward& p, void* scratch, cudaStream_t stream) {
  const std::int64_t d = p.shape.dim;
  if (p.dtype == DType::kFloat64) {
    return fits<double, 2>(d) ? backward<double, 2>(p, scratch, stream) : backward<double, 1>(p, scratch, stream);
  }
  return fits<float, 4>(d) ? backward<float, 4>(p, scratch, stream) : backward<float, 2>(p, scratch, stream);
}

}  // namespace violin::kernels::cuda
