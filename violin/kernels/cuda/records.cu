// Makes the records of a gain table.
#include "violin/kernels/cuda/records.cuh"

#include "violin/kernels/cuda/attention.h"

namespace violin::kernels::cuda {
namespace {

// One block per 64 x 64 tile of the gain table: finds the tile's range and writes the record.
template <class T>
__global__ void __launch_bounds__(kRecordThreads)
    records_kernel(const Table gain, std::int64_t slices_per_group, int nq, int nk, unsigned char* records) {
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int key_tile = static_cast<int>(blockIdx.x % key_tiles);
  const int query_tile = static_cast<int>(blockIdx.x / key_tiles % query_tiles);
  const std::int64_t slice = blockIdx.x / key_tiles / query_tiles;
  const float* from = static_cast<const float*>(gain.data) + slice / slices_per_group * gain.group +
                      slice % slices_per_group * gain.head;
  const int j = key_tile * kTile + piece_column();
  float values[4][8];
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int i = query_tile * kTile + piece_row(x);
    const float* at = from + i * gain.row + j;
    if (i < nq && j + 8 <= nk && reinterpret_cast<std::uintptr_t>(at) % 16 == 0) {
      *reinterpret_cast<float4*>(values[x]) = __ldcs(reinterpret_cast<const float4*>(at));
      *reinterpret_cast<float4*>(values[x] + 4) = __ldcs(reinterpret_cast<const float4*>(at) + 1);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) values[x][e] = i < nq && j + e < nk ? at[e] : 0.0f;
    }
  }
  uint4 pieces[4];
  const float2 range = encode_tile<T>(values, nq - query_tile * kTile, nk - key_tile * kTile, pieces);
  store_record(records + ((slice * key_tiles + key_tile) * query_tiles + query_tile) * kRecordBytes, pieces, range);
}

std::int64_t record_groups(const Table& gain, const AttentionShape& s) {
  return gain.group == 0 ? 1 : s.groups;
}
std::int64_t record_heads(const Table& gain, const AttentionShape& s) {
  return gain.head == 0 ? 1 : s.heads;
}

}  // namespace

std::size_t record_bytes(const Table& gain, const AttentionShape& s) {
  if (gain.data == nullptr || gain.packed) return 0;
  return align256(static_cast<std::size_t>(record_groups(gain, s) * record_heads(gain, s) * ceil_div(s.queries, kTile) *
                                           ceil_div(s.keys, kTile)) *
                  kRecordBytes);
}

cudaError_t make_records(const Table& gain, const AttentionShape& s, DType dtype, void* data, Records& records,
                         cudaStream_t stream) {
  if (gain.data == nullptr || s.queries == 0 || s.keys == 0) return cudaSuccess;
  const std::int64_t groups = record_groups(gain, s);
  const std::int64_t heads = record_heads(gain, s);
  unsigned char* to = static_cast<unsigned char*>(data);
  records = {gain.packed ? static_cast<const unsigned char*>(gain.data) : to, static_cast<int>(groups),
             static_cast<int>(heads)};
  if (gain.packed) return cudaSuccess;
  const std::int64_t blocks = groups * heads * ceil_div(s.queries, kTile) * ceil_div(s.keys, kTile);
  const auto kernel = dtype == DType::kFloat16 ? records_kernel<__half> : records_kernel<__nv_bfloat16>;
  kernel<<<static_cast<unsigned>(blocks), kRecordThreads, 0, stream>>>(gain, heads, static_cast<int>(s.queries),
                                                                       static_cast<int>(s.keys), to);
  return cudaGetLastError();
}

cudaError_t pack_gain(const Table& gain, const AttentionShape& s, DType dtype, void* to, cudaStream_t stream) {
  Records records;
  return make_records(gain, s, dtype, to, records, stream);
}

}  // namespace violin::kernels::cuda
