// Hopper path, host side: tensor maps, statistics, scratch, and the order of the kernels.
#include <cuda.h>

#include "violin/kernels/cuda/attention.h"
#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda {
namespace sm90 {
namespace {

// Eight threads per query: D = sum(dO o O), and the log-sum-exp in base 2.
template <class T>
__global__ void __launch_bounds__(256)
    statistics_kernel(const __grid_constant__ AttentionBackward p, float* statistics) {
  const int nq = static_cast<int>(p.shape.queries);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const unsigned x = blockIdx.x * 32u + threadIdx.x / 8;
  const unsigned rows = query_tiles * kTile;
  const unsigned heads = static_cast<unsigned>(p.shape.heads);
  if (x >= static_cast<unsigned>(p.shape.batch) * heads * rows) return;
  const int i = static_cast<int>(x % rows);
  const std::int64_t bh = x / rows;
  const std::int64_t h = x / rows % heads;
  const std::int64_t b = x / rows / heads;
  const int c = threadIdx.x % 8 * 8;
  float sum = 0;
  if (i < nq && c < p.shape.dim) {
    const uint4 o = *reinterpret_cast<const uint4*>(head_of<T>(p.out, b, h) + i * p.out.token + c);
    const uint4 g = *reinterpret_cast<const uint4*>(head_of<T>(p.dout, b, h) + i * p.dout.token + c);
    const T* left = reinterpret_cast<const T*>(&o);
    const T* right = reinterpret_cast<const T*>(&g);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum = fmaf(static_cast<float>(left[k]), static_cast<float>(right[k]), sum);
  }
  for (int s = 4; s > 0; s /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, s);
  if (threadIdx.x % 8 == 0) {
    float* to = statistics + (bh * query_tiles + i / kTile) * kStatisticsFloats + statistics_at(i % kTile);
    const float lse = i < nq ? static_cast<const float*>(p.lse)[bh * nq + i] * kLog2e : INFINITY;
    to[0] = lse == -INFINITY ? INFINITY : lse;
    to[2] = sum;
  }
}

// cuTensorMapEncodeTiled from the driver, found at run time so that nothing links against the driver.
using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

// The driver's functions want a current context, which a thread has only once it has used the runtime.
cudaError_t use_context() {
  thread_local int used = -1;
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess && device != used) {
    e = cudaSetDevice(device);
    if (e == cudaSuccess) used = device;
  }
  return e;
}

// Boxes of 64 rows and 64 columns of x [B,h,rows,d].
template <class H>
cudaError_t make_map(CUtensorMap& map, const H& x, const AttentionShape& s, std::int64_t rows, DType dtype) {
  static const Encode encode = find_encode();
  if (x.data == nullptr) return cudaSuccess;  // a gradient that nobody wants
  if (encode == nullptr) return cudaErrorNotSupported;
  if (const cudaError_t e = use_context(); e != cudaSuccess) return e;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(s.dim), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(s.heads), static_cast<cuuint64_t>(s.batch)};
  // The stride of a dimension of size 1 is never used, but must be valid.
  const auto bytes = [](std::int64_t size, std::int64_t stride) {
    return static_cast<cuuint64_t>(size == 1 ? 16 : stride * 2);
  };
  const cuuint64_t strides[3] = {bytes(rows, x.token), bytes(s.heads, x.head), bytes(s.batch, x.batch)};
  const cuuint32_t box[4] = {kTile, kTile, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
             const_cast<void*>(x.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Strides that a bulk copy can follow.
template <class H>
bool mappable(const H& x, const AttentionShape& s, std::int64_t rows) {
  const auto good = [](std::int64_t size, std::int64_t stride) {
    return size == 1 || (stride > 0 && stride % 8 == 0 && stride < (std::int64_t{1} << 38));
  };
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && good(rows, x.token) && good(s.heads, x.head) &&
         good(s.batch, x.batch);
}

bool fits(const AttentionShape& s, DType dtype, double scale) {
  return (dtype == DType::kFloat16 || dtype == DType::kBFloat16) && s.dim <= kTile && s.dim % 8 == 0 && s.keys > 0 &&
         scale > 0 && s.batch % s.groups == 0 &&
         s.batch * s.heads * (s.queries + s.keys + 2 * kTile) < (std::int64_t{1} << 31);
}

Schedule schedule_for(const AttentionShape& s) {
  return make_schedule(s.groups * s.heads * ceil_div(s.queries, kTile * kTilesPerUnit),
                       ceil_div(s.batch / s.groups, kImagesPerItem), processors() / kTilesPerUnit);
}

// Offsets into the scratch of a backward pass.
struct Layout {
  std::size_t records, sums, strips, bytes;
};

TableSums table_sums(const AttentionShape& s) {
  return {nullptr, ceil_div(s.queries, kTile) * kTile, ceil_div(s.keys, 8) * 8};
}

Layout layout(const AttentionBackward& p) {
  const AttentionShape& s = p.shape;
  Layout l{};
  l.records =
      align256(static_cast<std::size_t>(s.batch * s.heads * ceil_div(s.queries, kTile)) * kStatisticsFloats * 4);
  l.sums = l.strips = l.bytes = l.records + record_bytes(p.gain, s);
  if (p.gain.data && p.dgain) {
    const TableSums sums = table_sums(s);
    if (sums.rows != s.queries || sums.stride != s.keys) {
      l.strips += align256(static_cast<std::size_t>(s.groups * s.heads * sums.rows * sums.stride) * 4);
    }
    l.bytes =
        l.strips + static_cast<std::size_t>(count_strips(schedule_for(s)) * kTilesPerUnit * kTile * sums.stride) * 4;
  }
  return l;
}

}  // namespace
}  // namespace sm90

bool has_sm90_kernel(const AttentionForward& p) {
  const AttentionShape& s = p.shape;
  return sm90::fits(s, p.dtype, p.scale) && p.bias.data == nullptr && p.gate.data == nullptr &&
         sm90::mappable(p.q, s, s.queries) && sm90::mappable(p.k, s, s.keys) && sm90::mappable(p.v, s, s.keys) &&
         sm90::mappable(p.out, s, s.queries);
}

bool has_sm90_kernel(const AttentionBackward& p) {
  const AttentionShape& s = p.shape;
  const auto writable = [&](const MutableHeads& x, std::int64_t rows) {
    return x.data == nullptr || sm90::mappable(x, s, rows);
  };
  return sm90::fits(s, p.dtype, p.scale) && p.bias.data == nullptr && p.gate.data == nullptr && p.dbias == nullptr &&
         p.dgate == nullptr && (p.dgain == nullptr || p.gain.data != nullptr) && sm90::mappable(p.q, s, s.queries) &&
         sm90::mappable(p.k, s, s.keys) && sm90::mappable(p.v, s, s.keys) && sm90::mappable(p.out, s, s.queries) &&
         sm90::mappable(p.dout, s, s.queries) && writable(p.dq, s.queries) && writable(p.dk, s.keys) &&
         writable(p.dv, s.keys);
}

std::size_t scratch_sm90(const AttentionForward& p) {
  return record_bytes(p.gain, p.shape);
}
std::size_t scratch_sm90(const AttentionBackward& p) {
  return sm90::layout(p).bytes;
}

cudaError_t launch_sm90(const AttentionForward& p, void* scratch, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  sm90::Maps maps{};
  Records records;
  cudaError_t e = sm90::make_map(maps.q, p.q, s, s.queries, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.k, p.k, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.v, p.v, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.out, p.out, s, s.queries, p.dtype);
  if (e == cudaSuccess) {
    e = make_records(p.gain, s, p.dtype, scratch, records, stream);
  }
  return e == cudaSuccess ? sm90::start_forward(p, maps, records, stream) : e;
}

cudaError_t launch_sm90(const AttentionBackward& p, void* scratch, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const sm90::Layout l = sm90::layout(p);
  unsigned char* base = static_cast<unsigned char*>(scratch);
  float* statistics = reinterpret_cast<float*>(base);
  sm90::Maps maps{};
  Records records;
  cudaError_t e = sm90::make_map(maps.q, p.q, s, s.queries, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.k, p.k, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.v, p.v, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.dout, p.dout, s, s.queries, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.dk, p.dk, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.dv, p.dv, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = make_records(p.gain, s, p.dtype, base + l.records, records, stream);
  if (e != cudaSuccess) return e;
  const std::int64_t rows = s.batch * s.heads * ceil_div(s.queries, kTile) * kTile;
  const unsigned blocks = static_cast<unsigned>(ceil_div(rows, 32));
  if (p.dtype == DType::kFloat16) {
    sm90::statistics_kernel<__half><<<blocks, 256, 0, stream>>>(p, statistics);
  } else {
    sm90::statistics_kernel<__nv_bfloat16><<<blocks, 256, 0, stream>>>(p, statistics);
  }
  e = cudaGetLastError();
  if (e == cudaSuccess && (p.dq.data || p.dgain)) {
    sm90::TableSums sums = sm90::table_sums(s);
    sums.data = l.sums == l.strips ? static_cast<float*>(p.dgain) : reinterpret_cast<float*>(base + l.sums);
    const Schedule schedule = sm90::schedule_for(s);
    float* strips = reinterpret_cast<float*>(base + l.strips);
    e = sm90::start_dq(p, maps, records, statistics, schedule, sums, strips, stream);
    if (e == cudaSuccess && records.data && p.dgain) {
      e = sm90::start_strips(s, schedule, sums, strips, static_cast<float*>(p.dgain), stream);
    }
  }
  if (e == cudaSuccess && (p.dk.data || p.dv.data)) e = sm90::start_dkv(p, maps, records, statistics, stream);
  return e;
}

}  // namespace violin::kernels::cuda
