// Forward pass on Hopper with the gain table as it is, in float32. Where few images share a table, to make records of
// it takes as long as to use them. Twice the bytes have to pass, so that more share a tile: a block owns 128 queries of
// two images, a warpgroup 64 queries of one image, and two blocks of a cluster have the same queries of four images.
// Each of the two loads one of the two table tiles of a step, for both; two threads keep K and V of an image in flight
// each, a third the table. Otherwise it is the walk of attention_sm90_forward.cu.
#include "violin/kernels/cuda/attention_sm90_softmax.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

constexpr int kGroups = 4;
constexpr int kImages = 2;
constexpr int kQueryTiles = kGroups / kImages;
constexpr int kCluster = 2;
constexpr int kThreads = (kGroups + 1) * kWarpgroup;
constexpr int kStages = 2;  // of keys and the values of the tile before: both are needed at the same time
constexpr int kTableStages = 3;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 112;
static_assert(registers_suffice(kGroups, kProducerRegisters, kConsumerRegisters));
// Rows of a table tile have eight floats more than the tile, so that the four rows that half a warp reads at once lie
// in different banks. Bulk copies do not pad; they bring eight columns of the next tile along.
constexpr int kRowBytes = kFloatsRow * 4;
constexpr int kFloatsBytes = kTile * kRowBytes;
constexpr int kBarriers = 2 * kStages * kImages + kTableStages * (kQueryTiles + 1) + 1;
constexpr int kSharedBytes = 1024 + kGroups * kTileBytes + kStages * kImages * 2 * kTileBytes +
                             kTableStages * kQueryTiles * kFloatsBytes + 8 * kBarriers;
static_assert(kSharedBytes <= 227 * 1024);

__device__ __forceinline__ float2 load_pair(std::uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
  return v;
}

template <class T>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    forward_floats_kernel(const __grid_constant__ AttentionForward p, const __grid_constant__ Maps maps) {
  constexpr int kSteps = 4;
  extern __shared__ unsigned char raw[];
  unsigned char* q_tiles = raw + (1024 - shared_address(raw) % 1024) % 1024;  // [image][tile]
  unsigned char* kv_tiles = q_tiles + kGroups * kTileBytes;                   // [kStages][image][K, V]
  unsigned char* table = kv_tiles + kStages * kImages * 2 * kTileBytes;       // [kTableStages][tile]
  const std::uint32_t first_byte = __shfl_sync(0xffffffffu, shared_address(q_tiles), 0);
  const Barrier full(first_byte + static_cast<std::uint32_t>(table - q_tiles) +
                     kTableStages * kQueryTiles * kFloatsBytes);
  const Barrier empty = full + kStages * kImages;
  const Barrier table_full = empty + kStages * kImages;                 // [kTableStages][tile]
  const Barrier table_empty = table_full + kTableStages * kQueryTiles;  // of the tile that this block loads
  const Barrier q_full = table_empty + kTableStages;

  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int batch = static_cast<int>(p.shape.batch);
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int query_blocks = (nq + kQueryTiles * kTile - 1) / (kQueryTiles * kTile);
  const int image_groups = (batch + kCluster * kImages - 1) / (kCluster * kImages);
  const int group = warpgroup();
  const int rank = cluster_rank();
  const int cluster = static_cast<int>(blockIdx.x) / kCluster;
  const int first_image = cluster % image_groups * kCluster * kImages + rank * kImages;
  const int first_tile = cluster / image_groups % query_blocks * kQueryTiles;
  const int h = cluster / image_groups / query_blocks;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages * kImages; ++s) {
      init(full + s, 1);
      init_for_warps(empty + s, 4 * kQueryTiles);
    }
    for (int s = 0; s < kTableStages * kQueryTiles; ++s) init(table_full + s, 1);
    for (int s = 0; s < kTableStages; ++s) init_for_warps(table_empty + s, 4 * kImages * kCluster);
    init(q_full, 1);
    fence_init();
  }
  cluster_sync();

  if (group == kGroups) {
    give_registers<kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 - kGroups * 4;
    if (threadIdx.x % 32 != 0 || warp > kImages) return;
    if (warp < kImages) {
      const int b = min(first_image + warp, batch - 1);  // past the last image the last one again
      if (warp == 0) {
        arrive_and_expect(q_full, kGroups * kTileBytes);
        for (int x = 0; x < kGroups; ++x) {
          copy_box(q_tiles + x * kTileBytes, &maps.q, q_full, 0, (first_tile + x % kQueryTiles) * kTile, h,
                   min(first_image + x / kQueryTiles, batch - 1));
        }
      }
      for (int t = 0; t <= key_tiles; ++t) {
        const int s = t % kStages * kImages + warp;
        if (t >= kStages) wait(empty + s, (t / kStages - 1) % 2);
        unsigned char* kv = kv_tiles + s * 2 * kTileBytes;
        arrive_and_expect(full + s, (t == 0 || t == key_tiles ? 1 : 2) * kTileBytes);
        if (t < key_tiles) copy_box(kv, &maps.k, full + s, 0, t * kTile, h, b);
        if (t > 0) copy_box(kv + kTileBytes, &maps.v, full + s, 0, (t - 1) * kTile, h, b);
      }
    } else {
      const int table_head = p.gain.head == 0 ? 0 : h;
      const int row = (first_tile + rank) * kTile;
      for (int t = 0; t < key_tiles; ++t) {
        const int s = t % kTableStages;
        const Barrier other = table_full + s * kQueryTiles + (1 - rank);
        const Barrier own = table_full + s * kQueryTiles + rank;
        // What the other block sends may land before it is announced here, but not before the last was complete.
        if (t >= kTableStages) wait(other, (t / kTableStages - 1) % 2);
        arrive_and_expect(other, kFloatsBytes);
        if (t >= kTableStages) wait(table_empty + s, (t / kTableStages - 1) % 2);
        arrive_and_expect(own, kFloatsBytes);
        copy_box_to((1 << kCluster) - 1, table + (s * kQueryTiles + rank) * kFloatsBytes, &maps.gain, own, t * kTile,
                    row, table_head, 0);
      }
    }
    cluster_sync_unaligned();
    return;
  }

  take_registers<kConsumerRegisters>();

  const int lane = threadIdx.x % 32;
  const int image = group / kQueryTiles;
  const int tile = group % kQueryTiles;
  const float factor = static_cast<float>(p.scale) * kLog2e;
  std::uint32_t first_float = first_byte + static_cast<std::uint32_t>(table - q_tiles) + tile * kFloatsBytes +
                              (threadIdx.x % kWarpgroup / 32 * 16 + lane / 4) * kRowBytes + lane % 4 * 8;
  asm volatile("" : "+r"(first_float));
  std::uint32_t table_read = address_in(table_empty, tile);
  asm volatile("" : "+r"(table_read));
  const bool first_thread = threadIdx.x % kWarpgroup == 0;
  const std::uint32_t q_tile = low_descriptor(first_byte) + group * kTileStep;
  const std::uint32_t first_kv =
      low_descriptor(first_byte + static_cast<std::uint32_t>(kv_tiles - q_tiles)) + image * 2 * kTileStep;
  const auto kv_tile = [&](int stage) { return first_kv + stage * kImages * 2 * kTileStep; };
  const auto await_table = [&](int t) {
    wait(table_full + t % kTableStages * kQueryTiles + tile, t / kTableStages % 2);
  };
  const auto await_keys = [&](int t) { wait(full + t % kStages * kImages + image, t / kStages % 2); };
  const auto release_keys = [&](int t) { release(empty + t % kStages * kImages + image); };
  float gains[16];  // of half of a thread's logits; there are no registers for all
  const auto fetch = [&](int t, int half) {
    const std::uint32_t at = first_float + t % kTableStages * kQueryTiles * kFloatsBytes + half * 128;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 v = load_pair(at + i / 2 * 32 + i % 2 * 8 * kRowBytes);
      gains[2 * i] = v.x;
      gains[2 * i + 1] = v.y;
    }
  };
  HeadSums<kSteps> sum = {};
  float maximum[2] = {-INFINITY, -INFINITY};
  float total[2] = {0, 0};
  Fragments weights = {};
  float z[32];

  wait(q_full, 0);
  await_keys(0);
  wgmma_fence();
  multiply_rows<T, kSteps>(z, q_tile, kv_tile(0));
  wgmma_commit();
  await_table(0);
  fetch(0, 0);
  wgmma_wait<0>();
  pin(z);
  for (int t = 0; t < key_tiles; ++t) {
    // Here the product of the last weights with V may still run: neither `sum` nor `weights` may be touched.
#pragma unroll
    for (int i = 0; i < 16; ++i) z[i] *= gains[i];
    pin_first<16>(z);
    fetch(t, 1);
#pragma unroll
    for (int i = 0; i < 16; ++i) z[16 + i] *= gains[i];
    if ((t + 1) * kTile > nk) {
      keep_branch();
      cut_keys(z, t * kTile, nk, -INFINITY);
    }
    float top[2] = {0, 0};
    if (factor > 0) {  // as it always is: what is in a branch is not put off until after the wait
      find_tops(top, z, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
      for (int half = 0; half < 2; ++half) top[half] *= factor;
    }
    // Not before the gains have been used: an arrival at another block may overtake loads that are on their way.
    __syncwarp();
    if (kSpeakers > 1 || elect()) arrive_at(table_read + 8 * (t % kTableStages));
    wgmma_wait<0>();
    pin_head<kSteps>(sum);
    pin(weights);
    release_keys(t);
    const bool more = t + 1 < key_tiles;
    await_keys(t + 1);
    if (more) {
      await_table(t + 1);
      fetch(t + 1, 0);
    }
    follow_maximum<kSteps>(top, maximum, total, sum);
    weigh<kTile>(z, factor, maximum, total);
    pack_tile<T>(weights, z);
    pin_head<kSteps>(sum);
    const std::uint32_t next = kv_tile((t + 1) % kStages);
    const auto add = [&] {
      multiply_add_head<T, kSteps>(sum, weights, next + kTileStep);
      wgmma_commit();
    };
    if (more) {
      pin(z);
      wgmma_fence();
      multiply_rows<T, kSteps>(z, q_tile, next);
      wgmma_commit();
      add();
      wgmma_wait<1>();
      pin(z);
    } else {
      wgmma_fence();
      add();
    }
  }
  wgmma_wait<0>();
  pin_head<kSteps>(sum);
  const int b = first_image + image;
  const int first_row = (first_tile + tile) * kTile;
  unsigned char* place_of_q = q_tiles + group * kTileBytes;
  leave_rows<T, kSteps>(place_of_q, sum, maximum, total, static_cast<float*>(p.lse) + (b * p.shape.heads + h) * nq,
                        first_row, b < batch ? nq : 0, 1 + group);
  if (first_thread && b < batch) {
    store_box(&maps.out, place_of_q, 0, first_row, h, b);
    commit_stores();
    wait_until_read();
  }
  cluster_sync_unaligned();
}

template <class T>
cudaError_t start(const AttentionForward& p, const Maps& maps, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const auto kernel = forward_floats_kernel<T>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (e != cudaSuccess) return e;
  const std::int64_t clusters =
      ceil_div(s.batch, kCluster * kImages) * s.heads * ceil_div(s.queries, kQueryTiles * kTile);
  kernel<<<static_cast<unsigned>(clusters * kCluster), kThreads, kSharedBytes, stream>>>(p, maps);
  return cudaGetLastError();
}

}  // namespace

cudaError_t start_forward_floats(const AttentionForward& p, const Maps& maps, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? start<__half>(p, maps, stream) : start<__nv_bfloat16>(p, maps, stream);
}

}  // namespace violin::kernels::cuda::sm90
