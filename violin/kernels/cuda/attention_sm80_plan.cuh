// How the sm_80 kernel for the tables' gradients is cut, for its launcher and for the scratch it needs.
#pragma once

#include <algorithm>

#include "violin/kernels/cuda/records.cuh"

namespace violin::kernels::cuda::sm80 {

// Where the kernel writes: gradients [splits][size], each split with the sum over its part of the images. Null: not
// wanted.
struct TableGradients {
  float* gain = nullptr;
  float* bias = nullptr;
  float* gate = nullptr;
  std::int64_t size = 0;
  int splits = 0;  // 0: no gradient is wanted
};

inline int wanted_tables(const AttentionBackward& p) {
  return (p.dgain != nullptr) + (p.dbias != nullptr) + (p.dgate != nullptr);
}

inline bool needs_all(const AttentionBackward& p) {
  return p.bias.data || p.gate.data || p.dbias || p.dgate;
}

// Tiles of 64 queries that a block has beside 64 keys. All three gradients of two tiles would not fit into registers,
// nor would two tiles of wide heads into shared memory.
__host__ __device__ constexpr int tables_tiles(std::int64_t dim, bool all) {
  return dim <= 64 && !all ? 2 : 1;
}
inline std::int64_t tables_blocks(const AttentionShape& s, bool all) {
  return ceil_div(s.queries, tables_tiles(s.dim, all) * kTile) * ceil_div(s.keys, kTile) * s.groups * s.heads;
}

// Few tiles would leave most of the device idle, so that several blocks share the images of a tile: enough for two
// rounds of two blocks on every processor, each with at least eight images, as long as their sums take 32 MiB.
inline int tables_splits(const AttentionBackward& p) {
  const int wanted = wanted_tables(p);
  const AttentionShape& s = p.shape;
  const std::int64_t blocks = tables_blocks(s, needs_all(p));
  if (wanted == 0 || blocks == 0) return 0;
  const std::int64_t bytes = wanted * s.groups * s.heads * s.queries * s.keys * 4;
  const std::int64_t splits =
      std::min({4 * processors() / blocks, s.batch / s.groups / 8, (std::int64_t{32} << 20) / bytes});
  return static_cast<int>(std::max<std::int64_t>(splits, 1));
}

}  // namespace violin::kernels::cuda::sm80
