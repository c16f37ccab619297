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

// Boxes of 64 rows of a tensor of four dimensions, sizes from the innermost on and strides in bytes from the second on.
cudaError_t encode_map(CUtensorMap& map, CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[4],
                       const cuuint64_t (&strides)[3], cuuint32_t columns, CUtensorMapSwizzle swizzle) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  if (const cudaError_t e = use_context(); e != cudaSuccess) return e;
  const cuuint32_t box[4] = {columns, kTile, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, type, 4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
cuuint64_t size_of(std::int64_t n) {
  return static_cast<cuuint64_t>(n);
}
// The stride of a dimension of size 1 is never used, but must be valid.
cuuint64_t stride_of(std::int64_t size, std::int64_t stride, int bytes) {
  return static_cast<cuuint64_t>(size == 1 ? 16 : stride * bytes);
}

// Boxes of 64 rows and 64 columns of x [B,h,rows,d].
template <class H>
cudaError_t make_map(CUtensorMap& map, const H& x, const AttentionShape& s, std::int64_t rows, DType dtype) {
  if (x.data == nullptr) return cudaSuccess;  // a gradient that nobody wants
  return encode_map(map, dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                    x.data, {size_of(s.dim), size_of(rows), size_of(s.heads), size_of(s.batch)},
                    {stride_of(rows, x.token, 2), stride_of(s.heads, x.head, 2), stride_of(s.batch, x.batch, 2)}, kTile,
                    CU_TENSOR_MAP_SWIZZLE_128B);
}
// Boxes of a float table that all images share, as attention_sm90_forward_floats.cu wants them.
cudaError_t make_map(CUtensorMap& map, const Table& gain, const AttentionShape& s) {
  const std::int64_t heads = gain.head == 0 ? 1 : s.heads;
  return encode_map(
      map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, gain.data, {size_of(s.keys), size_of(s.queries), size_of(heads), 1},
      {stride_of(s.queries, gain.row, 4), stride_of(heads, gain.head, 4), 16}, kFloatsRow, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// Whether the forward pass reads the gain table as it is. To make records of a table takes the same time for any number
// of images, to do without them a little for each; fewer than three leave blocks idle.
bool reads_floats(const AttentionForward& p) {
  const AttentionShape& s = p.shape;
  const Table& gain = p.gain;
  const auto good = [](std::int64_t size, std::int64_t stride) {
    return size == 1 || (stride > 0 && stride % 4 == 0 && stride < (std::int64_t{1} << 37));
  };
  return gain.data != nullptr && !gain.packed && s.groups == 1 && parts_of(steps_of(s)) == 1 && s.batch >= 3 &&
         s.batch <= std::max<std::int64_t>(16, s.keys / 64) && reinterpret_cast<std::uintptr_t>(gain.data) % 16 == 0 &&
         good(s.queries, gain.row) && good(gain.head == 0 ? 1 : s.heads, gain.head);
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
         s.keys > 0 && static_cast<float>(scale) > 0 && s.batch % s.groups == 0 &&
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

Layout layout(const AttentionBackward& p, bool adds) {
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
    if (adds || sums.rows != s.queries || sums.stride != s.keys) {
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
  return sm90::fits(s, p.dtype, p.scale) && s.keys > kFewKeys && p.bias.data == nullptr && p.gate.data == nullptr &&
         p.dbias == nullptr && p.dgate == nullptr && (p.dgain == nullptr || p.gain.data != nullptr) &&
         sm90::mappable(p.q, s, s.queries) && sm90::mappable(p.k, s, s.keys) && sm90::mappable(p.v, s, s.keys) &&
         sm90::mappable(p.out, s, s.queries) && sm90::mappable(p.dout, s, s.queries) && writable(p.dq, s.queries) &&
         writable(p.dk, s.keys) && writable(p.dv, s.keys);
}

std::size_t scratch_sm90(const AttentionForward& p) {
  return sm90::reads_floats(p) ? 0 : record_bytes(p.gain, p.shape);
}
std::size_t scratch_sm90(const AttentionBackward& p, bool adds) {
  return sm90::layout(p, adds).bytes;
}

cudaError_t launch_sm90(const AttentionForward& p, void* scratch, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  sm90::Maps maps{};
  Records records;
  cudaError_t e = sm90::make_map(maps.q, p.q, s, s.queries, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.k, p.k, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.v, p.v, s, s.keys, p.dtype);
  if (e == cudaSuccess) e = sm90::make_map(maps.out, p.out, s, s.queries, p.dtype);
  const bool floats = sm90::reads_floats(p);
  if (e == cudaSuccess) {
    e = floats ? sm90::make_map(maps.gain, p.gain, s) : make_records(p.gain, s, p.dtype, scratch, records, stream);
  }
  if (e != cudaSuccess) return e;
  return floats ? sm90::start_forward_floats(p, maps, stream) : sm90::start_forward(p, maps, records, stream);
}

cudaError_t launch_sm90(const AttentionBackward& p, bool adds, void* scratch, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const sm90::Layout l = sm90::layout(p, adds);
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
  if (e == cudaSuccess && p.dgain && !sums_are_all) e = sm90::start_last(p, adds, work, stream);
  return e;
}

}  // namespace violin::kernels::cuda
