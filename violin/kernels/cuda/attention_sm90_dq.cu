// dQ and the gradient of the gain table on Hopper, in one pass over the logits.
//
// Two sums cross here: dQ runs over keys, the table's gradient over images. A block owns 64 queries of a head and walks
// over the key tiles for four images at a time: two warpgroups with two images each. dQ of the images stays in
// registers for the whole walk; the table's gradient of a tile is summed over a warpgroup's two images in registers,
// the warpgroups swap halves of it through shared memory, and each adds its half to global memory, once per tile and
// four images, by the very thread that added to it before. So no number is ever added to by two threads. Every other
// walk goes backwards over the keys, so that it starts with tiles that are still in L2. Blocks take equal shares of all
// (head, query tile, four images); where a share starts inside a head's query tile, its sums go to a strip of scratch
// that a last kernel adds in order.
#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

constexpr int kStages = 4;  // of one image per warpgroup; table tiles have half as many
constexpr int kCluster = kTilesPerUnit;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kThreads = kConsumers + kWarpgroup;
constexpr int kImagesPerGroup = kImagesPerItem / 2;
// Named barriers: the half that a warpgroup hands over has been written (plus the writer's number), has been read.
constexpr int kHandFull = 1;
constexpr int kHandEmpty = 3;

constexpr int kOwnBytes = kImagesPerItem * 2 * kTileBytes;  // Q and dO of four images
constexpr int kStageBytes = 2 * 2 * kTileBytes;             // K and V of two images
constexpr int kSharedBytes =
    1024 + kOwnBytes + kStages * kStageBytes + kStages / 2 * kRecordBytes + kTile * kTile * 4 + 8 * (2 * kStages + 2);

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
  unsigned char* tiles = own_tiles + kOwnBytes;                                 // [kStages][group][k, v]
  unsigned char* table = tiles + kStages * kStageBytes;
  unsigned char* hand = table + kStages / 2 * kRecordBytes;  // [group][4][128] of four floats
  const Barrier full(shared_address(hand + kTile * kTile * 4));
  const Barrier empty = full + kStages;
  const Barrier own_full = empty + kStages;
  const Barrier own_empty = own_full + 1;

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
  const int group = warpgroup();

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init(full + s, 1);
      init(empty + s, 8 * kCluster);  // warps of all blocks
    }
    init(own_full, 1);
    init(own_empty, 8);
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
      arrive_and_expect(own_full, kOwnBytes);
      for (int x = 0; x < kImagesPerItem; ++x) {
        copy_box(own_tiles + 2 * x * kTileBytes, &maps.q, own_full, 0, tile * kTile, h, image(x));
        copy_box(own_tiles + (2 * x + 1) * kTileBytes, &maps.dout, own_full, 0, tile * kTile, h, image(x));
      }
      for (int t = 0; t < key_tiles; ++t, ++step) {
        const int key_tile = round % 2 ? key_tiles - 1 - t : t;
        for (int i = 0; i < kImagesPerGroup; ++i) {
          const int sub = kImagesPerGroup * step + i;
          const int s = sub % kStages;
          if (sub >= kStages) wait(empty + s, (sub / kStages - 1) % 2);
          arrive_and_expect(full + s, kStageBytes + (kGain && i == 0 ? kRecordBytes : 0));
          // Each block of the cluster loads one of the two images for both.
          const int x = rank * kImagesPerGroup + i;
          unsigned char* to = tiles + s * kStageBytes + rank * 2 * kTileBytes;
          copy_box_to((1 << kCluster) - 1, to, &maps.k, full + s, 0, key_tile * kTile, h, image(x));
          copy_box_to((1 << kCluster) - 1, to + kTileBytes, &maps.v, full + s, 0, key_tile * kTile, h, image(x));
          // The table tile belongs to the first image, but its place is free only when the second's is.
          if constexpr (kGain) {
            if (i + 1 == kImagesPerGroup) {
              copy_bytes(table + step % 2 * kRecordBytes,
                         records.at(g, h, query_tiles, key_tiles, min(tile, query_tiles - 1), key_tile), kRecordBytes,
                         full + (sub - i) % kStages);
            }
          }
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
  const auto slot = [&](int at, int image) { return (kImagesPerGroup * at + image) % kStages; };
  const std::uint32_t first_own = low_descriptor(own_tiles) + group * kImagesPerGroup * (2 * kTileBytes >> 4);
  const std::uint32_t first_tile = low_descriptor(tiles) + group * (2 * kTileBytes >> 4);
  const auto tile_at = [&](int at, int image) { return first_tile + slot(at, image) * (kStageBytes >> 4); };
  const auto await = [&](int at, int image) { wait(full + slot(at, image), at * kImagesPerGroup / kStages % 2); };
  const auto issue = [&](int at, int image) {
    const std::uint32_t own = first_own + image * (2 * kTileBytes >> 4);
    const std::uint32_t other = tile_at(at, image);
    wgmma_fence();
    multiply_rows<T>(x, own, other);
    multiply_rows<T>(dx, own + (kTileBytes >> 4), other + (kTileBytes >> 4));
    wgmma_commit();
  };
  const std::uint32_t first_record = shared_address(table);
  const std::uint32_t offset = record_offset<false>();
  RecordPart record;
  const auto fetch = [&](auto half, int at) {
    if constexpr (kGain) {
      load_record_half<false, decltype(half)::value>(record, first_record + at % 2 * kRecordBytes, offset);
    }
  };
  constexpr std::integral_constant<int, 0> kFirstHalf;
  constexpr std::integral_constant<int, 1> kSecondHalf;
  const std::uint32_t handed = shared_address(hand) + thread * 16;

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
                          statistics_at(local_row);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lse[i][half] = valid ? from[16 * half] : INFINITY;
        delta[i][half] = from[16 * half + 2];
      }
    }
    float dq[kImagesPerGroup][32] = {};
    float dgain[32];
#pragma unroll
    for (int n = 0; n < 32; ++n) dgain[n] = 0;

    // Adds this half tile's sums to what earlier images left there; the first images write. No other thread touches
    // these.
    const bool whole_rows = pair_target && (query_tile + 1) * kTile <= nq;
    const auto put = [&](int column, const float(&sums)[16]) {
      if (whole_rows && column + kTile / 2 <= nk) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* at = target.at + 8 * half * target.stride + column;
          if (is_first) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              *reinterpret_cast<float2*>(at + 8 * n) =
                  make_float2(sums[4 * n + 2 * half] * scale, sums[4 * n + 2 * half + 1] * scale);
            }
          } else {
#pragma unroll
            for (int n = 0; n < 4; ++n)
              add_pair(at + 8 * n, sums[4 * n + 2 * half] * scale, sums[4 * n + 2 * half + 1] * scale);
          }
        }
        return;
      }
      keep_branch();
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float* at = target.at + 8 * half * target.stride + column + e / 2 * 8 + e % 2;
          const float value = sums[e / 2 * 4 + 2 * half + e % 2] * scale;
          if (row + 8 * half >= nq || column + e / 2 * 8 + lane % 4 * 2 + e % 2 >= nk) continue;
          if (is_first) {
            *at = value;
          } else {
            atomicAdd(at, value);
          }
        }
    };
    // Gives one half of this warpgroup's sums to the other, gets the other's part of its own half, and puts that away.
    const auto exchange_as = [&](auto number, int key_tile, bool very_first, bool very_last) {
      constexpr int kGroup = decltype(number)::value;
      constexpr int kOwn = 16 * kGroup;
      constexpr int kOther = 16 - kOwn;
      if (!very_first) named_sync(kHandEmpty + kGroup, kConsumers);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(handed + (kGroup * 4 + q) * kWarpgroup * 16),
                     "f"(dgain[kOther + 4 * q]), "f"(dgain[kOther + 4 * q + 1]), "f"(dgain[kOther + 4 * q + 2]),
                     "f"(dgain[kOther + 4 * q + 3])
                     : "memory");
      }
      named_arrive(kHandFull + kGroup, kConsumers);
      named_sync(kHandFull + 1 - kGroup, kConsumers);
      float sums[16];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(sums[4 * q]), "=f"(sums[4 * q + 1]), "=f"(sums[4 * q + 2]), "=f"(sums[4 * q + 3])
                     : "r"(handed + ((1 - kGroup) * 4 + q) * kWarpgroup * 16)
                     : "memory");
      }
#pragma unroll
      for (int n = 0; n < 16; ++n) sums[n] += dgain[kOwn + n];
      if (!very_last) named_arrive(kHandEmpty + 1 - kGroup, kConsumers);
      put(key_tile * kTile + kGroup * (kTile / 2), sums);
    };
    const auto exchange = [&](int key_tile, bool very_first, bool very_last) {
      if (group == 0) {
        exchange_as(std::integral_constant<int, 0>(), key_tile, very_first, very_last);
      } else {
        exchange_as(std::integral_constant<int, 1>(), key_tile, very_first, very_last);
      }
#pragma unroll
      for (int n = 0; n < 32; ++n) dgain[n] = 0;
    };
    const auto key_tile_at = [&](int t) { return round % 2 ? key_tiles - 1 - t : t; };
    const auto release_all = [&](int at, int image) {
      __syncwarp();
      if (lane < kCluster) arrive_at(empty + slot(at, image), lane);
    };

    wait(own_full, round % 2);
    const int first_step = round * key_tiles;
    await(first_step, 0);
    fetch(kFirstHalf, first_step);
    fetch(kSecondHalf, first_step);
    issue(first_step, 0);
    wgmma_wait<0>();
    pin(x);
    pin(dx);
    pin(dq[0]);
    pin(dq[1]);
    Fragments dproducts = {};
    for (int t = 0; t < key_tiles; ++t) {
      const int step = first_step + t;
      const int key_tile = key_tile_at(t);
#pragma unroll
      for (int i = 0; i < kImagesPerGroup; ++i) {
        const bool more = i + 1 < kImagesPerGroup || t + 1 < key_tiles;
        const int next_step = i + 1 < kImagesPerGroup ? step : step + 1;
        constexpr int kNext[] = {1, 0};
        if constexpr (kGain) start_record(record, factor);
#pragma unroll
        for (int at = 0; at < 32; ++at) {
          // The record is fetched again for the second image: 32 gains are too many to keep.
          if (at == 16 && more) {
            await(next_step, kNext[i]);
            fetch(kFirstHalf, next_step);
          }
          const int half = at / 2 % 2;
          float gain = factor;
          if constexpr (kGain) gain = fmaf(unpack<T>(record, at / 8, at % 8), record.slope, record.base);
          const float weight = power2(fmaf(x[at], gain, -lse[i][half]));
          const float dlogit = weight * (dx[at] - delta[i][half]);
          if constexpr (kGain) dgain[at] = fmaf(dlogit, x[at], dgain[at]);
          dx[at] = kGain ? dlogit * gain : dlogit;
          if (at % 2) dproducts[at / 8][at % 8 / 2] = pack<T>(dx[at - 1], dx[at]);
        }
        if (more) fetch(kSecondHalf, next_step);
        if ((key_tile + 1) * kTile > nk) {
          // Keys past the end are 0, but a weight there may be infinite.
          keep_branch();
#pragma unroll
          for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int left = nk - (key_tile * kTile + 16 * q + e / 2 * 8 + lane % 4 * 2);
              dproducts[q][e] &= left > 1 ? 0xffffffffu : left == 1 ? 0x0000ffffu : 0u;
            }
        }
        wgmma_fence();
        multiply_add<T>(dq[i], dproducts, tile_at(step, i));
        wgmma_commit();
        if (more) issue(next_step, kNext[i]);
        if constexpr (kGain) {
          if (i + 1 == kImagesPerGroup && want_table) {
            exchange(key_tile, t == 0 && round == 0, t + 1 == key_tiles && round + 1 == count);
          }
        }
        if (more) {
          wgmma_wait<1>();
          release_all(step, i);
        }
        wgmma_wait<0>();
        pin(x);
        pin(dx);
        pin(dq[i]);
        if (!more) release_all(step, i);
      }
    }
    release(own_empty);
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
  const float* from = strips + (static_cast<std::int64_t>(block * kCluster + tile % kCluster) * kTile + local) * stride;
  const std::int64_t step = kCluster * kTile * stride;
  if (nk % 4 == 0) {
    const int quads = nk / 4;
#pragma unroll 4
    for (int x = threadIdx.x; x < rows * quads; x += blockDim.x) {
      const int at = x / quads * nk + x % quads * 4;
      float4 sum = *reinterpret_cast<const float4*>(to + at);
      for (int n = 0; n < last - block; ++n) {
        const float4 more = __ldcs(reinterpret_cast<const float4*>(from + n * step + at));
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
      }
      *reinterpret_cast<float4*>(to + at) = sum;
    }
    return;
  }
  for (int x = threadIdx.x; x < rows * nk; x += blockDim.x) {
    const int r = x / nk;
    float sum = to[x];
    for (int n = 0; n < last - block; ++n) sum += from[n * step + r * stride + x % nk];
    to[x] = sum;
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
    return records.data ? start<__half, true>(p, maps, records, statistics, schedule, strips, stream)
                        : start<__half, false>(p, maps, records, statistics, schedule, strips, stream);
  }
  return records.data ? start<__nv_bfloat16, true>(p, maps, records, statistics, schedule, strips, stream)
                      : start<__nv_bfloat16, false>(p, maps, records, statistics, schedule, strips, stream);
}

}  // namespace violin::kernels::cuda::sm90
