// dQ and the gradient of the gain table on Hopper, in one pass over the logits.
//
// Three sums cross here: dQ runs over keys, the table's gradient over images. A block owns 64 queries of a head and
// walks over the key tiles for four images at a time: two warpgroups with two images each. dQ of the images stays in
// registers for the whole walk; the table's gradient of a tile is summed over the four images in registers, handed from
// the first warpgroup to the second through shared memory, and added to global memory once per tile and four images by
// the very thread that added to it before. So there are no atomics, and sums run over four images at a time. Blocks
// take equal shares of all (head, query tile, four images); where a share starts inside a head's query tile, its sums
// go to a strip of scratch that a last kernel adds in order.
#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

constexpr int kStages = 2;
constexpr int kCluster = kTilesPerUnit;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kThreads = kConsumers + kWarpgroup;
constexpr int kImagesPerGroup = kImagesPerItem / 2;
constexpr int kHandFull = 1;  // named barriers
constexpr int kHandEmpty = 2;

constexpr int kItemBytes = kImagesPerItem * 2 * kTileBytes;  // Q and dO, or K and V, of four images
constexpr int kSharedBytes =
    1024 + (1 + kStages) * kItemBytes + kStages * kRecordBytes + kTile * kTile * 4 + 8 * (2 * kStages + 2);

// Where a block adds the table's gradient of a unit: [64][nk] at `at`, `stride` apart; pairs of columns are 8-byte
// aligned where the stride is even.
struct Target {
  float* at;
  std::int64_t stride;
};

// An addition in L2 without a reply. Those of one thread to one address happen in its order.
__device__ __forceinline__ void add_pair(float* at, float a, float b) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(a), "f"(b) : "memory");
}

template <class T, bool kGain>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    dq_kernel(const __grid_constant__ AttentionBackward p, const __grid_constant__ Maps maps, const Records records,
              const float* statistics, const Schedule schedule, float* strips) {
  extern __shared__ unsigned char raw[];
  unsigned char* own_tiles = raw + (1024 - shared_address(raw) % 1024) % 1024;  // [image][q, dout]
  unsigned char* tiles = own_tiles + kItemBytes;                                // [kStages][image][k, v]
  unsigned char* table = tiles + kStages * kItemBytes;
  float4* hand = reinterpret_cast<float4*>(table + kStages * kRecordBytes);  // [8][128]
  Barrier* full = reinterpret_cast<Barrier*>(hand + kTile * kTile / 4);
  Barrier* empty = full + kStages;
  Barrier* own_full = empty + kStages;
  Barrier* own_empty = own_full + 1;

  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int heads = static_cast<int>(p.shape.heads);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int images = static_cast<int>(p.shape.batch / p.shape.groups);
  const int pairs = (query_tiles + kCluster - 1) / kCluster;
  const int rank = cluster_rank();
  const std::int64_t first = schedule.first(blockIdx.x / kCluster);
  const int count = static_cast<int>(schedule.first(blockIdx.x / kCluster + 1) - first);
  // Items of the unit that the range starts in come last: all clusters then walk over the images in the same direction
  // at about the same time, and K and V that one of them reads are still in L2 for the others.
  const int head_start =
      static_cast<int>(-first % schedule.items_per_unit + schedule.items_per_unit) % schedule.items_per_unit;
  const int shift = head_start < count ? head_start : 0;
  const auto item_at = [&](int n) { return first + (n + shift < count ? n + shift : n + shift - count); };
  const int group = threadIdx.x / kWarpgroup;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init(full + s, 1);
      init(empty + s, 8 * kCluster);  // warps of all blocks
    }
    init(own_full, 1);
    init(own_empty, 2);
    fence_init();
  }
  cluster_sync();

  if (group == 2) {
    give_registers<24>();
    if (threadIdx.x != kConsumers) return;
    int step = 0;
    for (int round = 0; round < count; ++round) {
      const std::int64_t item = item_at(round);
      const int unit = static_cast<int>(item / schedule.items_per_unit);
      const int first_image = static_cast<int>(item % schedule.items_per_unit) * kImagesPerItem;
      const int tile = unit % pairs * kCluster + rank;
      const int h = unit / pairs % heads;
      const int g = unit / pairs / heads;
      const int groups = static_cast<int>(p.shape.groups);
      // Past the last image the last one is loaded again; its weights are then 0.
      const auto image = [&](int x) { return g + min(first_image + x, images - 1) * groups; };
      if (round > 0) wait(own_empty, (round - 1) % 2);
      arrive_and_expect(own_full, kItemBytes);
      for (int x = 0; x < kImagesPerItem; ++x) {
        copy_box(own_tiles + 2 * x * kTileBytes, &maps.q, own_full, 0, tile * kTile, h, image(x));
        copy_box(own_tiles + (2 * x + 1) * kTileBytes, &maps.dout, own_full, 0, tile * kTile, h, image(x));
      }
      for (int t = 0; t < key_tiles; ++t, ++step) {
        const int s = step % kStages;
        if (step >= kStages) wait(empty + s, (step / kStages - 1) % 2);
        arrive_and_expect(full + s, kItemBytes + (kGain ? kRecordBytes : 0));
        // Each block of the cluster loads its share of the images for all of them.
        for (int x = rank; x < kImagesPerItem; x += kCluster) {
          unsigned char* to = tiles + s * kItemBytes + 2 * x * kTileBytes;
          copy_box_to((1 << kCluster) - 1, to, &maps.k, full + s, 0, t * kTile, h, image(x));
          copy_box_to((1 << kCluster) - 1, to + kTileBytes, &maps.v, full + s, 0, t * kTile, h, image(x));
        }
        if constexpr (kGain) {
          copy_bytes(table + s * kRecordBytes,
                     records.row_record(g, h, query_tiles, key_tiles, min(tile, query_tiles - 1), t), kRecordBytes,
                     full + s);
        }
      }
    }
    cluster_sync_unaligned();
    return;
  }
  take_registers<240>();

  const int thread = threadIdx.x % kWarpgroup;
  const int lane = threadIdx.x % 32;
  const int local_row = thread / 32 * 16 + lane / 4;
  const float scale = static_cast<float>(p.scale);
  const float factor = scale * kLog2e;
  const float dq_factor = kGain ? kLn2 : scale;  // gains were multiplied by scale * log2(e)
  const bool want_table = kGain && p.dgain != nullptr;
  float x[32] = {};   // Q K^T
  float dx[32] = {};  // dO V^T
  pin(x);
  pin(dx);
  int step = 0;
  const auto tile_at = [&](int s, int image) {
    return tiles + s % kStages * kItemBytes + 2 * (group * kImagesPerGroup + image) * kTileBytes;
  };
  const auto issue = [&](int s, int image) {
    const unsigned char* own = own_tiles + 2 * (group * kImagesPerGroup + image) * kTileBytes;
    const unsigned char* other = tile_at(s, image);
    wgmma_fence();
    multiply_rows<T>(x, descriptor(own), descriptor(other));
    multiply_rows<T>(dx, descriptor(own + kTileBytes), descriptor(other + kTileBytes));
    wgmma_commit();
  };

  for (int round = 0; round < count; ++round) {
    const std::int64_t item = item_at(round);
    const int unit = static_cast<int>(item / schedule.items_per_unit);
    const int first_image = static_cast<int>(item % schedule.items_per_unit) * kImagesPerItem + group * kImagesPerGroup;
    const int query_tile = unit % pairs * kCluster + rank;
    const int h = unit / pairs % heads;
    const int g = unit / pairs / heads;
    const int row = query_tile * kTile + local_row;
    const bool is_first = item == first || item % schedule.items_per_unit == 0;
    Target target{};
    bool pair_target = false;
    if (want_table) {
      if (first % schedule.items_per_unit != 0 && unit == first / schedule.items_per_unit) {
        target.stride = (nk + 1) / 2 * 2;
        target.at = strips + static_cast<std::int64_t>(blockIdx.x) * kTile * target.stride + local_row * target.stride;
      } else {
        target.stride = nk;
        target.at = static_cast<float*>(p.dgain) + ((static_cast<std::int64_t>(g) * heads + h) * nq + row) * nk;
      }
      target.at += lane % 4 * 2;
      pair_target = target.stride % 2 == 0;
    }
    float lse[kImagesPerGroup][2], delta[kImagesPerGroup][2];
#pragma unroll
    for (int i = 0; i < kImagesPerGroup; ++i) {
      const bool valid = first_image + i < images && query_tile < query_tiles;
      const std::int64_t b = g + static_cast<std::int64_t>(valid ? first_image + i : 0) * p.shape.groups;
      const float* from = statistics +
                          ((b * heads + h) * query_tiles + min(query_tile, query_tiles - 1)) * kStatisticsFloats +
                          local_row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lse[i][half] = valid ? from[8 * half] : INFINITY;
        delta[i][half] = from[kTile + 8 * half];
      }
    }
    float dq[kImagesPerGroup][32] = {};
    float dgain[32];
#pragma unroll
    for (int n = 0; n < 32; ++n) dgain[n] = 0;

    // Adds this tile's sums to what earlier images left there; the first images write. No other thread touches these.
    const bool whole_rows = pair_target && (query_tile + 1) * kTile <= nq;
    const auto put = [&](int t) {
      if (whole_rows && (t + 1) * kTile <= nk) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* at = target.at + 8 * half * target.stride + t * kTile;
          if (is_first) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              *reinterpret_cast<float2*>(at + 8 * n) =
                  make_float2(dgain[4 * n + 2 * half] * scale, dgain[4 * n + 2 * half + 1] * scale);
            }
          } else {
#pragma unroll
            for (int n = 0; n < 8; ++n)
              add_pair(at + 8 * n, dgain[4 * n + 2 * half] * scale, dgain[4 * n + 2 * half + 1] * scale);
          }
        }
        return;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          const int column = t * kTile + e / 2 * 8 + lane % 4 * 2 + e % 2;
          float* at = target.at + 8 * half * target.stride + t * kTile + e / 2 * 8 + e % 2;
          const float value = dgain[e / 2 * 4 + 2 * half + e % 2] * scale;
          if (row + 8 * half >= nq || column >= nk) continue;
          if (is_first) {
            *at = value;
          } else {
            atomicAdd(at, value);
          }
        }
    };

    wait(own_full, round % 2);
    wait(full + step % kStages, step / kStages % 2);
    issue(step, 0);
    wgmma_wait<0>();
    pin(x);
    pin(dx);
    pin(dq[0]);
    pin(dq[1]);
    for (int t = 0; t < key_tiles; ++t, ++step) {
#pragma unroll
      for (int i = 0; i < kImagesPerGroup; ++i) {
        Fragments dproducts;
        [[maybe_unused]] const unsigned char* record = table + step % kStages * kRecordBytes;
        [[maybe_unused]] RecordScale range{};
        if constexpr (kGain) {
          range = record_scale(record);
          range.base *= factor;
          range.slope *= factor;
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          [[maybe_unused]] float w[8];
          if constexpr (kGain) unpack_record<T>(w, record, q);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int half = e % 2;
            float dproduct[2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
              const int at = 8 * q + 2 * e + y;
              float gain = factor;
              if constexpr (kGain) gain = fmaf(w[2 * e + y], range.slope, range.base);
              const float weight = power2(fmaf(x[at], gain, -lse[i][half]));
              const float dlogit = weight * (dx[at] - delta[i][half]);
              if constexpr (kGain) dgain[at] = fmaf(dlogit, x[at], dgain[at]);
              dproduct[y] = kGain ? dlogit * gain : dlogit;
            }
            dproducts[q][e] = pack<T>(dproduct[0], dproduct[1]);
          }
        }
        if ((t + 1) * kTile > nk) {
          // Keys past the end are 0, but a weight there may be infinite.
          keep_branch();
#pragma unroll
          for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int left = nk - (t * kTile + 16 * q + e / 2 * 8 + lane % 4 * 2);
              dproducts[q][e] &= left > 1 ? 0xffffffffu : left == 1 ? 0x0000ffffu : 0u;
            }
        }
        wgmma_fence();
        multiply_add<T>(dq[i], dproducts, descriptor(tile_at(step, i)));
        wgmma_commit();
        if (i + 1 < kImagesPerGroup) {
          issue(step, i + 1);
        } else if (t + 1 < key_tiles) {
          wait(full + (step + 1) % kStages, (step + 1) / kStages % 2);
          issue(step + 1, 0);
        }
        if constexpr (kGain) {
          if (i + 1 == kImagesPerGroup && want_table) {
            if (group == 0) {
              if (t > 0 || round > 0) named_sync(kHandEmpty, kConsumers);
#pragma unroll
              for (int q = 0; q < 8; ++q) {
                hand[q * kWarpgroup + thread] =
                    make_float4(dgain[4 * q], dgain[4 * q + 1], dgain[4 * q + 2], dgain[4 * q + 3]);
              }
              named_arrive(kHandFull, kConsumers);
            } else {
              named_sync(kHandFull, kConsumers);
#pragma unroll
              for (int q = 0; q < 8; ++q) {
                const float4 other = hand[q * kWarpgroup + thread];
                dgain[4 * q] += other.x;
                dgain[4 * q + 1] += other.y;
                dgain[4 * q + 2] += other.z;
                dgain[4 * q + 3] += other.w;
              }
              if (t + 1 < key_tiles || round + 1 < count) named_arrive(kHandEmpty, kConsumers);
              put(t);
            }
#pragma unroll
            for (int n = 0; n < 32; ++n) dgain[n] = 0;
          }
        }
        wgmma_wait<0>();
        pin(x);
        pin(dx);
        pin(dq[i]);
      }
      __syncwarp();
      if (lane < kCluster) arrive_at(empty + step % kStages, lane);
    }
    if (thread == 0) arrive(own_empty);
    if (p.dq.data) {
#pragma unroll
      for (int i = 0; i < kImagesPerGroup; ++i) {
        if (first_image + i < images) {
          const std::int64_t b = g + static_cast<std::int64_t>(first_image + i) * p.shape.groups;
          store_rows<T>(dq[i], head_of<T>(p.dq, b, h), p.dq.token, row, nq, static_cast<int>(p.shape.dim), dq_factor,
                        dq_factor);
        }
      }
    }
  }
  cluster_sync_unaligned();
}

// Adds the strips of the blocks that started inside a unit to the gradient, in the order of the blocks. A block does
// four rows of a unit.
constexpr int kStripRows = 4;
__global__ void __launch_bounds__(256)
    strips_kernel(float* dgain, const float* strips, const Schedule schedule, int nq, int nk, int query_tiles) {
  const int tile = blockIdx.x / (kTile / kStripRows) % query_tiles;
  const std::int64_t slice = blockIdx.x / (kTile / kStripRows) / query_tiles;
  const int local = blockIdx.x % (kTile / kStripRows) * kStripRows;
  const std::int64_t pairs = (query_tiles + kCluster - 1) / kCluster;
  const std::int64_t begin = (slice * pairs + tile / kCluster) * schedule.items_per_unit;
  const std::int64_t end = begin + schedule.items_per_unit;
  const std::int64_t stride = (nk + 1) / 2 * 2;
  const int rows = min(kStripRows, nq - tile * kTile - local);
  float* to = dgain + (slice * nq + tile * kTile + local) * nk;
  // The first block that starts past the unit's first item.
  const int guess = static_cast<int>(begin * schedule.clusters / schedule.items);
  int block = guess;
  while (block < schedule.clusters && schedule.first(block) <= begin) ++block;
  int last = block;
  while (last < schedule.clusters && schedule.first(last) < end) ++last;
  if (block == last) return;
  for (int r = 0; r < rows; ++r) {
    for (int j = threadIdx.x; j < nk; j += blockDim.x) {
      float sum = to[static_cast<std::int64_t>(r) * nk + j];
      for (int x = block; x < last; ++x) {
        const std::int64_t strip = x * kCluster + tile % kCluster;
        sum += strips[(strip * kTile + local + r) * stride + j];
      }
      to[static_cast<std::int64_t>(r) * nk + j] = sum;
    }
  }
}

template <class T, bool kGain>
cudaError_t start(const AttentionBackward& p, const Maps& maps, const Records& records, const float* statistics,
                  const Schedule& schedule, float* strips, cudaStream_t stream) {
  const auto kernel = dq_kernel<T, kGain>;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (e != cudaSuccess) return e;
  kernel<<<static_cast<unsigned>(schedule.clusters * kCluster), kThreads, kSharedBytes, stream>>>(
      p, maps, records, statistics, schedule, strips);
  e = cudaGetLastError();
  if (e != cudaSuccess || !kGain || p.dgain == nullptr) return e;
  const AttentionShape& s = p.shape;
  const std::int64_t blocks = s.groups * s.heads * ceil_div(s.queries, kTile) * (kTile / kStripRows);
  strips_kernel<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
      static_cast<float*>(p.dgain), strips, schedule, static_cast<int>(s.queries), static_cast<int>(s.keys),
      static_cast<int>(ceil_div(s.queries, kTile)));
  return cudaGetLastError();
}

}  // namespace

cudaError_t start_dq(const AttentionBackward& p, const Maps& maps, const Records& records, const float* statistics,
                     const Schedule& schedule, float* strips, cudaStream_t stream) {
  if (p.dtype == DType::kFloat16) {
    return records.rows ? start<__half, true>(p, maps, records, statistics, schedule, strips, stream)
                        : start<__half, false>(p, maps, records, statistics, schedule, strips, stream);
  }
  return records.rows ? start<__nv_bfloat16, true>(p, maps, records, statistics, schedule, strips, stream)
                      : start<__nv_bfloat16, false>(p, maps, records, statistics, schedule, strips, stream);
}

}  // namespace violin::kernels::cuda::sm90
