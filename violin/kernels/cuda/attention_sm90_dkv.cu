// dK and dV on Hopper. A block owns 128 keys of one (image, head): two warpgroups of 64 keys each, whose K and V stay
// in registers as left sides, and one warp that keeps bulk copies of Q, dO, their statistics and table tiles in flight.
// On the transposed logits S^T = K Q^T the weights are already where dV += P^T dO and dK += dA^T Q want their left
// sides, so nothing goes back to shared memory. The next products with Q and dO are issued together with the sums of
// this step, in the last step those of the next item. Results leave through tiles of their own in shared memory.
//
// Heads of two parts have twice the sums: K and V stay in shared memory, where the results take their place in the end,
// and the next products wait for the sums of this step; those are long enough for the other warpgroup's arithmetic.
#include "violin/kernels/cuda/attention_sm90.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

constexpr int kGroups = 2;
template <int kParts>
constexpr int kStagesOf = kParts == 1 ? 4 : 3;
constexpr int kThreads = (kGroups + 1) * kWarpgroup;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
static_assert(registers_suffice(kGroups, kProducerRegisters, kConsumerRegisters));
constexpr int kStatisticsBytes = kStatisticsFloats * 4;

template <int kParts, bool kGain>
constexpr int kSharedBytes = 1024 + (kParts == 1 ? 2 : 1) * kGroups * 2 * kParts * kTileBytes +
                             kStagesOf<kParts> * (2 * kParts * kTileBytes + kStatisticsBytes) +
                             (kGain ? kStagesOf<kParts> * kGroups * kRecordBytes : 0) + 8 * (2 * kStagesOf<kParts> + 2);

// kPersistent: a block takes item after item and loads the next one while it stores the last, which pays where items
// are short. Otherwise it has one item, and the compiler makes a tighter loop of its steps.
template <class T, int kSteps, bool kGain, bool kPersistent, bool kNarrow>
__global__ void __launch_bounds__(kThreads, 1)
    dkv_kernel(const __grid_constant__ AttentionBackward p, const __grid_constant__ Maps maps, const Records records,
               const float* statistics, int chunk) {
  constexpr int kParts = kPartsOf<kSteps>;
  constexpr int kStages = kStagesOf<kParts>;
  constexpr int kRowsBytes = kParts * kTileBytes;  // 64 rows of a head
  constexpr bool kInRegisters = kParts == 1;       // K and V
  static_assert(kInRegisters || !kPersistent);
  extern __shared__ unsigned char raw[];
  unsigned char* own_tiles = raw + (1024 - shared_address(raw) % 1024) % 1024;         // [kGroups][k, v]
  unsigned char* results = own_tiles + (kInRegisters ? kGroups * 2 * kRowsBytes : 0);  // [kGroups][dk, dv]
  unsigned char* tiles = results + kGroups * 2 * kRowsBytes;                           // [kStages][q, dout]
  unsigned char* table = tiles + kStages * 2 * kRowsBytes;
  unsigned char* numbers = table + (kGain ? kStages * kGroups * kRecordBytes : 0);
  const Barrier full(shared_address(numbers + kStages * kStatisticsBytes));
  const Barrier empty = full + kStages;
  const Barrier own_full = empty + kStages;
  const Barrier own_empty = own_full + 1;

  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int batch = static_cast<int>(p.shape.batch);
  const int heads = static_cast<int>(p.shape.heads);
  const int table_groups = static_cast<int>(p.shape.groups);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int key_blocks = (key_tiles + kGroups - 1) / kGroups;
  const int items = batch * key_blocks * heads;
  const int group = warpgroup();
  // What a block does in a round: a tile of keys for each of groups_at() warpgroups.
  Place place(batch, chunk, key_blocks, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  const auto groups_at = [&](const Place& at) { return min(kGroups, key_tiles - at.block() * kGroups); };
  const int users = 4 * (kPersistent ? kGroups : groups_at(place));  // warps that read a buffer

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init(full + s, 1);
      init_for_warps(empty + s, users);
    }
    init(own_full, 1);
    init_for_warps(own_empty, users);
    fence_init();
  }
  if (p.dq.data || p.dgain) let_next_start();  // dQ's kernel, which shares nothing with this one but what both read
  __syncthreads();

  if (group == kGroups) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x != kGroups * kWarpgroup) return;
    int step = 0;
    for (int item = blockIdx.x, round = 0; item < items; item += gridDim.x, ++round, place.advance()) {
      const int groups = groups_at(place);
      const int first_tile = place.block() * kGroups;
      const int b = place.b();
      const int h = place.h();
      if (round > 0) wait(own_empty, (round - 1) % 2);
      arrive_and_expect(own_full, groups * 2 * kRowsBytes);
      for (int x = 0; x < groups; ++x) {
        copy_parts<kParts>(own_tiles + 2 * x * kRowsBytes, &maps.k, own_full, (first_tile + x) * kTile, h, b);
        copy_parts<kParts>(own_tiles + (2 * x + 1) * kRowsBytes, &maps.v, own_full, (first_tile + x) * kTile, h, b);
      }
      const float* from = statistics + static_cast<std::int64_t>(b * heads + h) * query_tiles * kStatisticsFloats;
      for (int t = 0; t < query_tiles; ++t, ++step) {
        const int s = step % kStages;
        if (step >= kStages) wait(empty + s, (step / kStages - 1) % 2);
        arrive_and_expect(full + s, 2 * kRowsBytes + kStatisticsBytes + (kGain ? groups * kRecordBytes : 0));
        copy_parts<kParts>(tiles + s * 2 * kRowsBytes, &maps.q, full + s, t * kTile, h, b);
        copy_parts<kParts>(tiles + s * 2 * kRowsBytes + kRowsBytes, &maps.dout, full + s, t * kTile, h, b);
        copy_bytes(numbers + s * kStatisticsBytes, from + t * kStatisticsFloats, kStatisticsBytes, full + s);
        if constexpr (kGain) {
          for (int x = 0; x < groups; ++x) {
            copy_bytes(table + (s * kGroups + x) * kRecordBytes,
                       records.at(b % table_groups, h, query_tiles, key_tiles, t, first_tile + x), kRecordBytes,
                       full + s);
          }
        }
      }
      if constexpr (!kPersistent) break;
    }
    return;
  }
  take_registers<kConsumerRegisters>();

  const int lane = threadIdx.x % 32;
  const float scale = static_cast<float>(p.scale);
  const float factor = scale * kLog2e;
  const std::uint32_t first_record = shared_address(table);
  const std::uint32_t offset = record_offset<true>();
  std::uint32_t first_number = shared_address(numbers) + lane % 4 * 16;
  asm volatile("" : "+r"(first_number));
  const bool first_thread = threadIdx.x % kWarpgroup == 0;
  unsigned char* own = own_tiles + 2 * group * kRowsBytes;
  unsigned char* result = results + 2 * group * kRowsBytes;
  const std::uint32_t first_own = low_descriptor(own);
  const std::uint32_t first = low_descriptor(tiles);
  const auto tile_of = [&](int stage) { return first + stage * 2 * kParts * kTileStep; };
  Fragments k, v;
  float x[32] = {};   // K Q^T
  float dx[32] = {};  // V dO^T
  RecordPart record;
  float numbers_of[8][4];  // log-sum-exp and D of columns 8 n, 8 n + 1
  // What columns 8 from ... 8 to - 1 need: the statistics, and the record by 16 columns. Fetched by halves half a step
  // before they are used, or, where registers are short, just before.
  const auto fetch = [&](int from, int to, int stage) {
#pragma unroll
    for (int n = from; n < to; ++n) {
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(numbers_of[n][0]), "=f"(numbers_of[n][1]), "=f"(numbers_of[n][2]), "=f"(numbers_of[n][3])
                   : "r"(first_number + stage * kStatisticsBytes + n * 64));
    }
    if constexpr (kGain) {
      const std::uint32_t at = first_record + (stage * kGroups + group) * kRecordBytes;
      if (from == 0) load_record_range(record, at + kTileBytes);
#pragma unroll
      for (int q = (from + 1) / 2; q < (to + 1) / 2; ++q) load_record_quarter<true>(record, q, at, offset);
    }
  };
  const auto fetch_first = [&](int at) { fetch(0, kInRegisters ? 4 : 1, at % kStages); };
  const auto await = [&](int at) { wait(full + at % kStages, at / kStages % 2); };
  const auto issue = [&](int at) {
    const int s = at % kStages;
    if constexpr (!kInRegisters) {
      clear(x);
      clear(dx);
    }
    wgmma_fence();
    if constexpr (kInRegisters) {
      multiply_rows<T>(x, k, tile_of(s));
      multiply_rows<T>(dx, v, tile_of(s) + kTileStep);
    } else {
      // Nothing is added, but the compiler does not know: it would keep the descriptors of all tiles in registers.
      const std::uint32_t left = first_own + (static_cast<std::uint32_t>(at) >> 28);
      multiply_rows<T, kSteps>(x, left, tile_of(s));
      multiply_rows<T, kSteps>(dx, left + kParts * kTileStep, tile_of(s) + kParts * kTileStep);
    }
    wgmma_commit();
  };
  // K and V of a round become left sides.
  const auto take = [&](int round) {
    wait(own_full, round % 2);
    if constexpr (kInRegisters) {
      load_fragments(k, own);
      load_fragments(v, own + kTileBytes);
    }
  };
  bool ready = false;  // x and dx hold the first products of the item
  // Steps are counted from the round, not on the way: the compiler then knows that all threads agree.
  for (int item = blockIdx.x, count = 0; item < items; item += gridDim.x, ++count) {
    const int round = kPersistent ? count : 0;
    const int first_step = round * query_tiles;
    const int b = place.b();
    const int h = place.h();
    const int tile = place.block() * kGroups + group;
    const bool busy = group < groups_at(place);
    bool next_busy = false;
    if constexpr (kPersistent) {
      place.advance();
      next_busy = item + static_cast<int>(gridDim.x) < items && group < groups_at(place);
    }
    if (!busy) {
      if constexpr (!kPersistent) return;
      // Nothing to do here, but the buffers wait for everybody.
      wait(own_full, round % 2);
      release(own_empty, lane == 0);
      for (int step = first_step; step < first_step + query_tiles; ++step) {
        wait(full + step % kStages, step / kStages % 2);
        release(empty + step % kStages, lane == 0);
      }
      continue;
    }
    HeadSums<kSteps> dk = {};
    HeadSums<kSteps> dv = {};
    Fragments weights = {};
    Fragments dproducts = {};
    pin_head<kSteps>(dk);
    pin_head<kSteps>(dv);
    if (!ready) {
      take(round);
      pin(x);
      pin(dx);
      await(first_step);
      fetch_first(first_step);
      issue(first_step);
      wgmma_wait<0>();
      pin(x);
      pin(dx);
    }
    release(own_empty, lane == 0);  // of registers, not before a product has waited for them; else nobody waits for it
    for (int t = 0; t < query_tiles; ++t) {
      const int step = first_step + t;
      const int s = step % kStages;
      if constexpr (kInRegisters) fetch(4, 8, s);
      if constexpr (kGain) start_record(record, factor);
      const auto weigh = [&](auto from, auto to) {
#pragma unroll
        for (int n = decltype(from)::value / 8; n < decltype(to)::value / 8; ++n) {
          if (!kInRegisters && n < 7) fetch(n + 1, n + 2, s);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int at = 4 * n + e;
            float gain = factor;
            if constexpr (kGain) gain = fmaf(unpack<T>(record, n / 2, n % 2 * 4 + e), record.slope, record.base);
            x[at] = power2(fmaf(x[at], gain, -numbers_of[n][e % 2]));
            dx[at] = x[at] * (dx[at] - numbers_of[n][2 + e % 2]);
            if constexpr (kGain) dx[at] *= gain;
          }
          weights[n / 2][n % 2 * 2] = pack<T>(x[4 * n], x[4 * n + 1]);
          weights[n / 2][n % 2 * 2 + 1] = pack<T>(x[4 * n + 2], x[4 * n + 3]);
          dproducts[n / 2][n % 2 * 2] = pack<T>(dx[4 * n], dx[4 * n + 1]);
          dproducts[n / 2][n % 2 * 2 + 1] = pack<T>(dx[4 * n + 2], dx[4 * n + 3]);
        }
      };
      constexpr std::integral_constant<int, 0> kBegin;
      constexpr std::integral_constant<int, kNarrowColumns> kNarrowEnd;
      constexpr std::integral_constant<int, kTile> kEnd;
      if constexpr (kNarrow) {
        weigh(kBegin, kNarrowEnd);
        if (t + 1 < query_tiles) {
          weigh(kNarrowEnd, kEnd);
        } else {
          keep_branch();
#pragma unroll
          for (int q = kNarrowColumns / 16; q < 4; ++q)
#pragma unroll
            for (int e = 0; e < 4; ++e) weights[q][e] = dproducts[q][e] = 0;
        }
      } else {
        weigh(kBegin, kEnd);
      }
      const auto add = [&] {
        multiply_add_head<T, kSteps>(dv, weights, tile_of(s) + kParts * kTileStep);
        multiply_add_head<T, kSteps>(dk, dproducts, tile_of(s));
        wgmma_commit();
      };
      wgmma_fence();
      add();
      const bool more = t + 1 < query_tiles;
      if (more || next_busy) {
        if (!more) take(round + 1);
        await(step + 1);
        if constexpr (!kInRegisters) {
          wgmma_wait<0>();
          pin_head<kSteps>(dk);
          pin_head<kSteps>(dv);
          release(empty + s, lane == 0);
        }
        fetch_first(step + 1);
        issue(step + 1);
        if constexpr (kInRegisters) {
          wgmma_wait<1>();
          release(empty + s, lane == 0);
        }
        wgmma_wait<0>();
        pin(x);
        pin(dx);
      } else {
        wgmma_wait<0>();
        release(empty + s, lane == 0);
        if constexpr (!kInRegisters) {  // or the compiler would carry them on
          clear(x);
          clear(dx);
        }
      }
      pin_head<kSteps>(dk);
      pin_head<kSteps>(dv);
    }
    ready = next_busy;
    const float dk_factor = kGain ? kLn2 : scale;  // gains were multiplied by scale * log2(e)
    if (first_thread) wait_until_read();           // what the last item left
    named_sync(1 + group, kWarpgroup);
    leave_head<T, kSteps>(result, dk, dk_factor, dk_factor);
    leave_head<T, kSteps>(result + kRowsBytes, dv, 1.0f, 1.0f);
    fence_stores();
    named_sync(1 + group, kWarpgroup);
    if (first_thread) {
      if (p.dk.data) store_parts<kParts>(&maps.dk, result, tile * kTile, h, b);
      if (p.dv.data) store_parts<kParts>(&maps.dv, result + kRowsBytes, tile * kTile, h, b);
      commit_stores();
    }
    if constexpr (!kPersistent) break;
  }
  if (first_thread) wait_until_read();
}

template <class T, int kSteps, bool kGain>
cudaError_t start(const AttentionBackward& p, const Maps& maps, const Work& work, cudaStream_t stream) {
  constexpr int kParts = kPartsOf<kSteps>;
  constexpr int kBytes = kSharedBytes<kParts, kGain>;
  static_assert(kBytes <= 227 * 1024);
  const AttentionShape& s = p.shape;
  bool persistent = false;
  auto kernel = dkv_kernel<T, kSteps, kGain, false, false>;
  if constexpr (kParts == 1) {
    persistent = s.queries <= kShortWalk;
    if (persistent) {
      kernel =
          ends_narrow(s.queries) ? dkv_kernel<T, kSteps, kGain, true, true> : dkv_kernel<T, kSteps, kGain, true, false>;
    }
  }
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  const std::int64_t items = s.batch * s.heads * ceil_div(s.keys, kGroups * kTile);
  const std::int64_t blocks = persistent && items > processors() ? processors() : items;
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(p, maps, work.records, work.statistics,
                                                                      images_per_chunk(s.batch, s.queries, kParts));
  return cudaGetLastError();
}

template <class T>
cudaError_t start(const AttentionBackward& p, const Maps& maps, const Work& work, cudaStream_t stream) {
  return with_steps(p.shape, [&](auto steps) {
    constexpr int kSteps = decltype(steps)::value;
    return work.records.data ? start<T, kSteps, true>(p, maps, work, stream)
                             : start<T, kSteps, false>(p, maps, work, stream);
  });
}

}  // namespace

cudaError_t start_dkv(const AttentionBackward& p, const Maps& maps, const Work& work, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? start<__half>(p, maps, work, stream)
                                    : start<__nv_bfloat16>(p, maps, work, stream);
}

}  // namespace violin::kernels::cuda::sm90
