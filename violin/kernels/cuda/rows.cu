// Layer norm and sums over rows.
//
// Norm: a warp has a row in registers, four neighbouring columns per lane and step. Backward, the lane also sums dy and
// dy o x^ of its columns over all rows that its warp visits, so that dy and x are read once; warps, then blocks are
// added in a fixed order. Sums over rows alone: a block has 128 columns and a share of the rows.
#include "violin/kernels/cuda/rows.h"

#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocks = 264;  // of the passes whose results are added at the end
constexpr unsigned kAll = 0xffffffffu;

struct Four {
  float v[4];
};

__device__ __forceinline__ Four load(const float* p) {
  const float4 x = *reinterpret_cast<const float4*>(p);
  return {{x.x, x.y, x.z, x.w}};
}
template <class T>
__device__ __forceinline__ Four load(const T* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  const T* x = reinterpret_cast<const T*>(&raw);
  return {{static_cast<float>(x[0]), static_cast<float>(x[1]), static_cast<float>(x[2]), static_cast<float>(x[3])}};
}
__device__ __forceinline__ void store(float* p, const Four& x) {
  *reinterpret_cast<float4*>(p) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}
template <class T>
__device__ __forceinline__ void store(T* p, const Four& x) {
  uint2 raw;
  T* y = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = static_cast<T>(x.v[i]);
  *reinterpret_cast<uint2*>(p) = raw;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int s = 16; s > 0; s /= 2) x += __shfl_xor_sync(kAll, x, s);
  return x;
}

template <class X, class Y, int kSteps>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ LayerNormForward p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int columns = static_cast<int>(p.columns);
  const X* x = static_cast<const X*>(p.x) + row * columns;
  Four own[kSteps];
  float sum = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int column = 4 * (lane + 32 * s);
    own[s] = column < columns ? load(x + column) : Four{};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += own[s].v[i];
  }
  const float mean = warp_sum(sum) / static_cast<float>(columns);
  float squares = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (4 * (lane + 32 * s) >= columns) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += (own[s].v[i] - mean) * (own[s].v[i] - mean);
  }
  const float rstd = rsqrtf(warp_sum(squares) / static_cast<float>(columns) + static_cast<float>(p.eps));
  Y* y = static_cast<Y*>(p.y) + row * columns;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int column = 4 * (lane + 32 * s);
    if (column >= columns) continue;
    const Four weight = load(p.weight + column), bias = load(p.bias + column);
    Four out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.v[i] = (own[s].v[i] - mean) * rstd * weight.v[i] + bias.v[i];
    store(y + column, out);
  }
  if (lane == 0) {
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
}

// Adds the warps' sums and writes them to parts [block][columns]; shared [kWarps][columns].
template <int kSteps>
__device__ __forceinline__ void add_warps(const Four (&own)[kSteps], int columns, float* shared, float* part) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int column = 4 * (lane + 32 * s);
    if (column < columns) store(shared + warp * columns + column, own[s]);
  }
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.x); column < columns; column += kThreads) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w * columns + column];
    part[column] = sum;
  }
}

// parts [2][blocks][columns]
template <class X, class Y, int kSteps>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(const __grid_constant__ LayerNormBackward p, float* parts) {
  extern __shared__ __align__(16) float shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int columns = static_cast<int>(p.columns);
  const float share = 1 / static_cast<float>(columns);
  Four weight[kSteps], dweight[kSteps] = {}, dbias[kSteps] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int column = 4 * (lane + 32 * s);
    weight[s] = column < columns ? load(p.weight + column) : Four{};
  }
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < p.rows;
       row += stride) {
    const X* x = static_cast<const X*>(p.x) + row * columns;
    const Y* dy = static_cast<const Y*>(p.dy) + row * columns;
    const float mean = p.mean[row], rstd = p.rstd[row];
    Four hat[kSteps], g[kSteps];
    float sum = 0, along = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int column = 4 * (lane + 32 * s);
      const bool inside = column < columns;
      hat[s] = inside ? load(x + column) : Four{};
      g[s] = inside ? load(dy + column) : Four{};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        hat[s].v[i] = (hat[s].v[i] - mean) * rstd;
        dbias[s].v[i] += g[s].v[i];
        dweight[s].v[i] += g[s].v[i] * hat[s].v[i];
        g[s].v[i] *= weight[s].v[i];
        sum += g[s].v[i];
        along += g[s].v[i] * hat[s].v[i];
      }
    }
    sum = warp_sum(sum) * share;
    along = warp_sum(along) * share;
    X* dx = static_cast<X*>(p.dx) + row * columns;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int column = 4 * (lane + 32 * s);
      if (column >= columns) continue;
      Four out;
#pragma unroll
      for (int i = 0; i < 4; ++i) out.v[i] = rstd * (g[s].v[i] - sum - hat[s].v[i] * along);
      store(dx + column, out);
    }
  }
  add_warps(dweight, columns, shared, parts + static_cast<std::int64_t>(blockIdx.x) * columns);
  add_warps(dbias, columns, shared, parts + static_cast<std::int64_t>(gridDim.x + blockIdx.x) * columns);
}

// parts [blocks of rows][columns]; blockIdx.y counts 128 columns.
template <class T>
__global__ void __launch_bounds__(kThreads) sums_kernel(const __grid_constant__ ColumnSums p, float* parts) {
  __shared__ Four shared[kWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int columns = static_cast<int>(p.columns);
  const int column = 4 * (lane + 32 * static_cast<int>(blockIdx.y));
  Four sum = {};
  if (column < columns) {
    const T* x = static_cast<const T*>(p.x) + column;
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kWarps;
#pragma unroll 4
    for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp; row < p.rows; row += stride) {
      const Four now = load(x + row * columns);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.v[i] += now.v[i];
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.v[i] += shared[w][lane].v[i];
  store(parts + static_cast<std::int64_t>(blockIdx.x) * columns + column, sum);
}

// out[0] and out[1] from parts [gridDim.y][blocks][columns]; a block has 32 columns, each warp a share of the blocks.
__global__ void __launch_bounds__(kThreads)
    add_blocks_kernel(const float* parts, int blocks, int columns, float* first, float* second) {
  __shared__ float shared[kWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int column = static_cast<int>(blockIdx.x) * 32 + lane;
  const float* from = parts + static_cast<std::int64_t>(blockIdx.y) * blocks * columns;
  float sum = 0;
  if (column < columns) {
    for (int b = warp; b < blocks; b += kWarps) sum += from[static_cast<std::int64_t>(b) * columns + column];
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared[w][lane];
  (blockIdx.y == 0 ? first : second)[column] = sum;
}

cudaError_t add_blocks(const float* parts, std::int64_t blocks, std::int64_t columns, float* first, float* second,
                       cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, 32)), second != nullptr ? 2 : 1);
  add_blocks_kernel<<<grid, kThreads, 0, stream>>>(parts, static_cast<int>(blocks), static_cast<int>(columns), first,
                                                   second);
  return cudaGetLastError();
}

std::int64_t norm_blocks(const LayerNormBackward& p) {
  const std::int64_t wanted = ceil_div(p.rows, kWarps);
  return wanted < kBlocks ? wanted : kBlocks;
}
std::int64_t sum_blocks(const ColumnSums& p) {
  const std::int64_t wanted = ceil_div(p.rows, 4 * kWarps);
  const std::int64_t most = ceil_div(4 * kBlocks, ceil_div(p.columns, 128));
  return wanted < most ? wanted : most;
}

// work.template operator()<X, Y, kSteps>() for the types and the number of columns.
template <class X, class Y, class Work>
cudaError_t with_steps(std::int64_t columns, const Work& work) {
  switch (ceil_div(columns, 128)) {
    case 1:
      return work.template operator()<X, Y, 1>();
    case 2:
      return work.template operator()<X, Y, 2>();
    case 3:
      return work.template operator()<X, Y, 3>();
    case 4:
      return work.template operator()<X, Y, 4>();
    case 5:
    case 6:
      return work.template operator()<X, Y, 6>();
    case 7:
    case 8:
      return work.template operator()<X, Y, 8>();
    default:
      return cudaErrorInvalidValue;
  }
}
template <class Work>
cudaError_t with_types(DType x, DType y, std::int64_t columns, const Work& work) {
  if (x == DType::kFloat32 && y == DType::kFloat32) return with_steps<float, float>(columns, work);
  if (x == DType::kFloat32 && y == DType::kBFloat16) return with_steps<float, __nv_bfloat16>(columns, work);
  if (x == DType::kFloat32 && y == DType::kFloat16) return with_steps<float, __half>(columns, work);
  if (x == DType::kBFloat16 && y == DType::kBFloat16) return with_steps<__nv_bfloat16, __nv_bfloat16>(columns, work);
  if (x == DType::kFloat16 && y == DType::kFloat16) return with_steps<__half, __half>(columns, work);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch(const LayerNormForward& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  return with_types(p.x_type, p.y_type, p.columns, [&]<class X, class Y, int kSteps>() {
    norm_kernel<X, Y, kSteps><<<static_cast<unsigned>(ceil_div(p.rows, kWarps)), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

std::size_t scratch_bytes(const LayerNormBackward& p) {
  return static_cast<std::size_t>(2 * norm_blocks(p) * p.columns) * sizeof(float);
}

cudaError_t launch(const LayerNormBackward& p, void* scratch, cudaStream_t stream) {
  if (p.columns == 0) return cudaSuccess;
  auto* parts = static_cast<float*>(scratch);
  const std::int64_t blocks = norm_blocks(p);
  if (blocks > 0) {
    const cudaError_t e = with_types(p.x_type, p.y_type, p.columns, [&]<class X, class Y, int kSteps>() {
      const std::size_t shared = static_cast<std::size_t>(kWarps * p.columns) * sizeof(float);
      norm_backward_kernel<X, Y, kSteps><<<static_cast<unsigned>(blocks), kThreads, shared, stream>>>(p, parts);
      return cudaGetLastError();
    });
    if (e != cudaSuccess) return e;
  }
  return add_blocks(parts, blocks, p.columns, p.dweight, p.dbias, stream);
}

std::size_t scratch_bytes(const ColumnSums& p) {
  return static_cast<std::size_t>(sum_blocks(p) * p.columns) * sizeof(float);
}

cudaError_t launch(const ColumnSums& p, void* scratch, cudaStream_t stream) {
  if (p.columns == 0) return cudaSuccess;
  auto* parts = static_cast<float*>(scratch);
  const std::int64_t blocks = sum_blocks(p);
  if (blocks > 0) {
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(p.columns, 128)));
    const auto kernel = p.type == DType::kFloat32    ? sums_kernel<float>
                        : p.type == DType::kBFloat16 ? sums_kernel<__nv_bfloat16>
                                                     : sums_kernel<__half>;
    kernel<<<grid, kThreads, 0, stream>>>(p, parts);
    if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  }
  return add_blocks(parts, blocks, p.columns, p.sums, nullptr, stream);
}

}  // namespace violin::kernels::cuda
