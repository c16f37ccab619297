// Hopper path, host side: tensor maps, scratch, and the order of the kernels.
#include <cuda.h>

#include "violin/kernels/cuda/attention.h"
#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda {
namespace sm90 {
namespace {

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
  return (dtype == DType::kFloat16 || dtype == DType::kBFloat16) && s.dim <= 2 * kTile && s.dim % 8 == 0 &&
         s.keys > 0 && scale > 0 && s.batch % s.groups == 0 &&
         s.batch * s.heads * (s.queries + s.keys + 2 * kTile) < (std::int64_t{1} << 31);
}

// queries: those whose dQ the kernel of this name computes.
Schedule schedule_for(const AttentionShape& s, std::int64_t queries) {
  return make_schedule(s.groups * s.heads * ceil_div(queries, kTile * kTilesPerUnit),
                       ceil_div(s.batch / s.groups, images_per_item(parts_of(steps_of(s)))),
                       processors() / kTilesPerUnit);
}

// Offsets into the scratch of a backward pass.
struct Layout {
  std::size_t records, tail, sums, strips, bytes;
};

TableSums table_sums(const AttentionShape& s, std::int64_t queries) {
  return {nullptr, ceil_div(queries, kTile) * kTile, ceil_div(s.keys, 8) * 8};
}

Layout layout(const AttentionBackward& p) {
  const AttentionShape& s = p.shape;
  Layout l{};
  l.records =
      align256(static_cast<std::size_t>(s.batch * s.heads * ceil_div(s.queries, kTile)) * kStatisticsFloats * 4);
  const int tail = tail_queries(p);
  const std::int64_t queries = s.queries - tail;
  l.tail = l.records + record_bytes(p.gain, s);
  l.sums = l.tail;
  if (p.dgain) l.sums += align256(static_cast<std::size_t>(s.batch * s.heads * tail * s.keys) * 4);
  l.strips = l.bytes = l.sums;
  if (p.dgain) {
    const TableSums sums = table_sums(s, queries);
    if (sums.rows != s.queries || sums.stride != s.keys) {
      l.strips += align256(static_cast<std::size_t>(s.groups * s.heads * sums.rows * sums.stride) * 4);
    }
    l.bytes =
        l.strips +
        static_cast<std::size_t>(count_strips(schedule_for(s, queries)) * kTilesPerUnit * kTile * sums.stride) * 4;
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
  const auto floats = [&](std::size_t offset) { return reinterpret_cast<float*>(base + offset); };
  sm90::Maps maps{};
  sm90::Work work;
  cudaError_t e = sm90::make_map(maps.q, p.q, s, s.queries, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.k, p.k, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.v, p.v, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.dout, p.dout, s, s.queries, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.dk, p.dk, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.dv, p.dv, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = make_records(p.gain, s, p.dtype, base + l.records, work.records, stream);
  if (e != cudaSuccess) return e;
  work.statistics = floats(0);
  work.tail.queries = sm90::tail_queries(p);
  work.tail.shares = p.dgain ? floats(l.tail) : nullptr;
  const std::int64_t queries = s.queries - work.tail.queries;
  work.schedule = sm90::schedule_for(s, queries);
  work.sums = sm90::table_sums(s, queries);
  work.sums.data = l.sums == l.strips ? static_cast<float*>(p.dgain) : floats(l.sums);
  work.strips = floats(l.strips);
  e = sm90::start_statistics(p, work, stream);
  const bool want_dkv = p.dk.data || p.dv.data;
  if (e == cudaSuccess && want_dkv) e = sm90::start_dkv(p, maps, work, stream);
  if (e == cudaSuccess && (p.dq.data || p.dgain)) e = sm90::start_dq(p, maps, work, want_dkv, stream);
  const bool sums_are_all = l.bytes == l.sums && work.tail.queries == 0;  // and where the gradient is wanted
  if (e == cudaSuccess && p.dgain && !sums_are_all) e = sm90::start_last(p, work, stream);
  return e;
}

}  // namespace violin::kernels::cuda
