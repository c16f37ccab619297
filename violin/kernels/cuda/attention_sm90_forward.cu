// Forward pass on Hopper. A block owns 256 queries of one (image, head), 128 where heads have two parts: four or two
// warpgroups of 64 queries each and one warp that keeps bulk copies of K, V and table tiles in flight, three tiles of
// 64 keys deep. Within a warpgroup the next product with K is issued before the product with V, so that the softmax
// waits for the former alone and starts beside the latter; that of the next item's first keys is issued in the last
// step. Results go through the place of the queries in shared memory. Images are the fastest grid index: neighbours in
// time share a table tile, which then comes from L2.
#include "violin/kernels/cuda/attention_sm90_softmax.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

constexpr int kStages = 3;
constexpr int kProducerRegisters = 24;
template <int kParts>
constexpr int kGroupsOf = kParts == 1 ? 4 : 2;
template <int kParts>
constexpr int kConsumerRegisters = kParts == 1 ? 112 : 240;
static_assert(registers_suffice(kGroupsOf<1>, kProducerRegisters, kConsumerRegisters<1>) &&
              registers_suffice(kGroupsOf<2>, kProducerRegisters, kConsumerRegisters<2>));
template <int kParts>
constexpr int kThreads = (kGroupsOf<kParts> + 1) * kWarpgroup;

template <int kParts, bool kGain>
constexpr int kSharedBytes = 1024 + 2 * kGroupsOf<kParts> * kParts * kTileBytes + kStages * 2 * kParts * kTileBytes +
                             (kGain ? kStages * kGroupsOf<kParts> * kRecordBytes : 0) + 8 * (2 * kStages + 4);
static_assert(kSharedBytes<1, true> <= 227 * 1024 && kSharedBytes<2, true> <= 227 * 1024);

// kPersistent: a block takes item after item and loads the next one while it stores the last, which pays where items
// are short. Otherwise it has one item, and the compiler makes a tighter loop of its steps.
template <class T, int kSteps, bool kGain, bool kPersistent, bool kNarrow>
__global__ void __launch_bounds__(kThreads<kPartsOf<kSteps>>, 1)
    forward_kernel(const __grid_constant__ AttentionForward p, const __grid_constant__ Maps maps, const Records records,
                   int chunk) {
  constexpr int kParts = kPartsOf<kSteps>;
  constexpr int kGroups = kGroupsOf<kParts>;
  constexpr int kRowsBytes = kParts * kTileBytes;  // 64 rows of a head
  extern __shared__ unsigned char raw[];
  unsigned char* q_tiles = raw + (1024 - shared_address(raw) % 1024) % 1024;  // [2][kGroups]
  unsigned char* kv_tiles = q_tiles + 2 * kGroups * kRowsBytes;
  unsigned char* table = kv_tiles + kStages * 2 * kRowsBytes;
  // Not worked out again in every step.
  const std::uint32_t first_byte = __shfl_sync(0xffffffffu, shared_address(q_tiles), 0);
  const Barrier full(first_byte + static_cast<std::uint32_t>(table - q_tiles) +
                     (kGain ? kStages * kGroups * kRecordBytes : 0));
  const Barrier empty = full + kStages;
  const Barrier q_full = empty + kStages;
  const Barrier q_empty = q_full + 2;

  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int batch = static_cast<int>(p.shape.batch);
  const int table_groups = static_cast<int>(p.shape.groups);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int query_blocks = (query_tiles + kGroups - 1) / kGroups;
  const int items = batch * query_blocks * static_cast<int>(p.shape.heads);
  const int group = warpgroup();
  // What a block does in a round: a tile of queries for each of groups_at() warpgroups.
  Place place(batch, chunk, query_blocks, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  const auto groups_at = [&](const Place& at) { return min(kGroups, query_tiles - at.block() * kGroups); };
  const int users = 4 * (kPersistent ? kGroups : groups_at(place));  // warps that read a buffer

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init(full + s, 1);
      init_for_warps(empty + s, users);
    }
    for (int s = 0; s < 2; ++s) {
      init(q_full + s, 1);
      init_for_warps(q_empty + s, users);
    }
    fence_init();
  }
  __syncthreads();

  if (group == kGroups) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x != kGroups * kWarpgroup) return;
    int step = 0;
    for (int item = blockIdx.x, round = 0; item < items; item += gridDim.x, ++round, place.advance()) {
      const int groups = groups_at(place);
      const int first_tile = place.block() * kGroups;
      if (round >= 2) wait(q_empty + round % 2, (round / 2 - 1) % 2);
      arrive_and_expect(q_full + round % 2, groups * kRowsBytes);
      for (int x = 0; x < groups; ++x) {
        copy_parts<kParts>(q_tiles + (round % 2 * kGroups + x) * kRowsBytes, &maps.q, q_full + round % 2,
                           (first_tile + x) * kTile, place.h(), place.b());
      }
      for (int t = 0; t < key_tiles; ++t, ++step) {
        const int s = step % kStages;
        if (step >= kStages) wait(empty + s, (step / kStages - 1) % 2);
        arrive_and_expect(full + s, 2 * kRowsBytes + (kGain ? groups * kRecordBytes : 0));
        unsigned char* kv = kv_tiles + s * 2 * kRowsBytes;
        copy_parts<kParts>(kv, &maps.k, full + s, t * kTile, place.h(), place.b());
        copy_parts<kParts>(kv + kRowsBytes, &maps.v, full + s, t * kTile, place.h(), place.b());
        if constexpr (kGain) {
          copy_bytes(table + s * kGroups * kRecordBytes,
                     records.at(place.b() % table_groups, place.h(), query_tiles, key_tiles, first_tile, t),
                     groups * kRecordBytes, full + s);
        }
      }
      if constexpr (!kPersistent) break;
    }
    return;
  }

  take_registers<kConsumerRegisters<kParts>>();

  const float factor = static_cast<float>(p.scale) * kLog2e;
  const std::uint32_t first_record = first_byte + static_cast<std::uint32_t>(table - q_tiles);
  const std::uint32_t offset = record_offset<false>();
  const bool first_thread = threadIdx.x % kWarpgroup == 0;
  const std::uint32_t first_q = low_descriptor(first_byte) + group * kParts * kTileStep;
  const auto q_tile = [&](int round) { return first_q + round % 2 * kGroups * kParts * kTileStep; };
  const std::uint32_t first_kv = low_descriptor(first_byte + static_cast<std::uint32_t>(kv_tiles - q_tiles));
  const auto kv_tile = [&](int stage) { return first_kv + stage * 2 * kParts * kTileStep; };
  RecordPart record;
  const auto fetch = [&](int stage) {
    if constexpr (kGain) {
      const std::uint32_t at = first_record + (stage * kGroups + group) * kRecordBytes;
      load_record_range(record, at + kTileBytes);
      load_record_half<false, 0>(record, at, offset);
      load_record_half<false, 1>(record, at, offset);
    }
  };
  float z[32];
  bool ready = false;   // z holds the first logits of the item
  bool stored = false;  // the last round's place of queries is still being read
  const auto settle = [&](int round) {
    if (!stored) return;
    if (first_thread) wait_until_read();
    release(q_empty + (round + 1) % 2);
    stored = false;
  };
  // Steps are counted from the round, not on the way: the compiler then knows that all threads agree.
  for (int item = blockIdx.x, count = 0; item < items; item += gridDim.x, ++count) {
    const int round = kPersistent ? count : 0;
    const int first_step = round * key_tiles;
    const int b = place.b();
    const int h = place.h();
    const int first_tile = place.block() * kGroups;
    const bool busy = group < groups_at(place);
    bool next_busy = false;
    if constexpr (kPersistent) {
      place.advance();
      next_busy = item + static_cast<int>(gridDim.x) < items && group < groups_at(place);
    }
    if (!busy) {
      if constexpr (!kPersistent) return;
      settle(round);
      // Nothing to do here, but the buffers wait for everybody.
      wait(q_full + round % 2, round / 2 % 2);
      release(q_empty + round % 2);
      for (int step = first_step; step < first_step + key_tiles; ++step) {
        wait(full + step % kStages, step / kStages % 2);
        release(empty + step % kStages);
      }
      continue;
    }
    HeadSums<kSteps> sum = {};
    float maximum[2] = {-INFINITY, -INFINITY};
    float total[2] = {0, 0};
    Fragments weights = {};

    if (!ready) {
      wait(q_full + round % 2, round / 2 % 2);
      wait(full + first_step % kStages, first_step / kStages % 2);
      wgmma_fence();
      multiply_rows<T, kSteps>(z, q_tile(round), kv_tile(first_step % kStages));
      wgmma_commit();
      fetch(first_step % kStages);
      wgmma_wait<0>();
      pin(z);
    }
    for (int t = 0; t < key_tiles; ++t) {
      const int step = first_step + t;
      const int s = step % kStages;
      // Here the product of the last weights with V may still run: neither `sum` nor `weights` may be touched.
      float multiplier = factor;  // of z, on the way to base 2
      const bool narrow = kNarrow && t + 1 == key_tiles;
      if constexpr (kGain) {
        start_record(record, factor);
        if (narrow) {
          keep_branch();
          multiplier = apply_record<T, kNarrowColumns / 2>(z, record);
        } else {
          multiplier = apply_record<T, 32>(z, record);
        }
      }
      if ((t + 1) * kTile > nk) {
        keep_branch();
        cut_keys(z, t * kTile, nk, multiplier < 0 ? INFINITY : -INFINITY);
        if (multiplier == 0) multiplier = 0x1p-126f;  // 0 times infinity is not a number
      }
      float top[2];
      if (!kGain || multiplier >= 0) {
        find_tops(top, z, [](float x, float y) { return fmaxf(x, y); });
      } else {
        keep_branch();
        find_tops(top, z, [](float x, float y) { return fminf(x, y); });
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) top[half] *= multiplier;
      wgmma_wait<0>();
      pin_head<kSteps>(sum);
      pin(weights);
      if (t > 0) release(empty + (step + kStages - 1) % kStages);
      const int next = (step + 1) % kStages;
      const bool more = t + 1 < key_tiles;
      if (t == 1 || !more) settle(round);
      if (more || next_busy) {
        if (!more) wait(q_full + (round + 1) % 2, (round + 1) / 2 % 2);
        wait(full + next, (step + 1) / kStages % 2);
        fetch(next);
      }
      follow_maximum<kSteps>(top, maximum, total, sum);
      if (narrow) {
        keep_branch();
        weigh<kNarrowColumns>(z, multiplier, maximum, total);
#pragma unroll
        for (int e = kNarrowColumns / 2; e < 32; ++e) z[e] = 0;
      } else {
        weigh<kTile>(z, multiplier, maximum, total);
      }
      pack_tile<T>(weights, z);
      pin_head<kSteps>(sum);
      const auto add = [&] {
        multiply_add_head<T, kSteps>(sum, weights, kv_tile(s) + kParts * kTileStep);
        wgmma_commit();
      };
      if (more || next_busy) {
        pin(z);
        wgmma_fence();
        multiply_rows<T, kSteps>(z, q_tile(more ? round : round + 1), kv_tile(next));
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
    ready = next_busy;
    release(empty + (first_step + key_tiles - 1) % kStages);
    const int first_row = (first_tile + group) * kTile;
    unsigned char* place_of_q = q_tiles + (round % 2 * kGroups + group) * kRowsBytes;
    leave_rows<T, kSteps>(place_of_q, sum, maximum, total, static_cast<float*>(p.lse) + (b * p.shape.heads + h) * nq,
                          first_row, nq, 1 + group);
    if (first_thread) {
      store_parts<kParts>(&maps.out, place_of_q, first_row, h, b);
      commit_stores();
    }
    stored = true;
    if constexpr (!kPersistent) break;
  }
  if (stored && first_thread) wait_until_read();
}

template <class T, int kSteps, bool kGain>
cudaError_t start(const AttentionForward& p, const Maps& maps, const Records& records, cudaStream_t stream) {
  constexpr int kParts = kPartsOf<kSteps>;
  constexpr int kBytes = kSharedBytes<kParts, kGain>;
  const AttentionShape& s = p.shape;
  const bool persistent = s.keys <= kShortWalk;
  const auto kernel = !persistent           ? forward_kernel<T, kSteps, kGain, false, false>
                      : ends_narrow(s.keys) ? forward_kernel<T, kSteps, kGain, true, true>
                                            : forward_kernel<T, kSteps, kGain, true, false>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  const std::int64_t items = s.batch * s.heads * ceil_div(s.queries, kGroupsOf<kParts> * kTile);
  const std::int64_t blocks = persistent && items > processors() ? processors() : items;
  kernel<<<static_cast<unsigned>(blocks), kThreads<kParts>, kBytes, stream>>>(
      p, maps, records, images_per_chunk(s.batch, s.keys, kParts));
  return cudaGetLastError();
}

template <class T>
cudaError_t start(const AttentionForward& p, const Maps& maps, const Records& records, cudaStream_t stream) {
  return with_steps(p.shape, [&](auto steps) {
    constexpr int kSteps = decltype(steps)::value;
    return records.data ? start<T, kSteps, true>(p, maps, records, stream)
                        : start<T, kSteps, false>(p, maps, records, stream);
  });
}

}  // namespace

cudaError_t start_forward(const AttentionForward& p, const Maps& maps, const Records& records, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? start<__half>(p, maps, records, stream)
                                    : start<__nv_bfloat16>(p, maps, records, stream);
}

}  // namespace violin::kernels::cuda::sm90
