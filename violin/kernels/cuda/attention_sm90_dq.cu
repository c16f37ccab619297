// dQ and the gradient of the gain table on Hopper, in one pass over the logits.
//
// Two sums cross here: dQ runs over keys, the table's gradient over images. A block owns 64 queries of a head and walks
// over the key tiles for four images at a time: two warpgroups with two images each. dQ of the images stays in
// registers for the whole walk; the table's gradient of a tile is summed over a warpgroup's two images in registers and
// left in shared memory, in two places in turns. Three warps beside the one that loads collect it there: they add the
// two warpgroups' sums to global memory, once per tile and four images, each number by the very thread that added to it
// before. So no number is ever added to by two threads, and the warpgroups hardly wait for the addition. Every other
// walk goes backwards over the keys, so that it starts with tiles that are still in L2. Blocks take shares of all
// (head, query tile, four images) as Schedule says; all but one of those of a head's query tile leave their sums in
// strips of scratch that a last kernel adds in order (attention_sm90_last.cu).
//
// Where heads have two parts, a warpgroup has one image at a time: its two parts have the buffers of two images, and
// the table's gradient leaves for every image, to one place.
#include "violin/kernels/cuda/attention_sm90.cuh"
#include "violin/kernels/cuda/attention_sm90_sums.cuh"

namespace violin::kernels::cuda::sm90 {
namespace {

// Buffers for a tile of each warpgroup: K is needed until the product for dQ, V only until that with dO.
template <int kParts, bool kGain>
constexpr int kStagesOf = kParts == 1 && kGain ? 3 : 4;
template <bool kGain>
constexpr int kVStagesOf = kGain ? 2 : 4;
constexpr int kRecords = 2;  // each serves all images
constexpr int kCluster = kTilesPerUnit;
constexpr int kThreads = kConsumers + kWarpgroup;
// Where sums have one place, those who collect them need registers for more loads on their way.
template <int kParts>
constexpr int kProducerRegisters = kParts == 1 ? 40 : 56;
template <int kParts>
constexpr int kConsumerRegisters = kParts == 1 ? 232 : 224;
static_assert(registers_suffice(2, kProducerRegisters<1>, kConsumerRegisters<1>) &&
              registers_suffice(2, kProducerRegisters<2>, kConsumerRegisters<2>));
constexpr int kTilesPerGroup = 2;                               // those of two images or the parts of one
constexpr int kOwnBytes = 2 * kTilesPerGroup * 2 * kTileBytes;  // Q and dO of all images
constexpr int kNumbersBytes = kStatisticsFloats * 4;            // statistics of an image's queries
constexpr int kStageBytes = 2 * kTileBytes;                     // K or V for two warpgroups
constexpr int kRounds = 8;  // with one tile of keys, those who collect sums may be five behind the one that loads

// What a block does in one round of its walk. The thread that loads works it out and leaves it in shared memory, in
// turns in several places: others would keep it over the walk in local memory, and that is slower.
struct Round {
  int first_image, query_tile, h, g;
  int is_first;  // of those that add to the same sums
  int to_strip;  // sums go to the block's strip
};

template <int kParts, bool kGain>
constexpr int kBarriers = 2 * kStagesOf<kParts, kGain> + kVStagesOf<kGain> + 2 * kTilesPerGroup + kSumsBarriers;
template <int kParts, bool kGain>
constexpr int kSharedBytes =
    kOwnBytes + (kStagesOf<kParts, kGain> + kVStagesOf<kGain>)*kStageBytes + images_per_item(kParts) * kNumbersBytes +
    (kGain ? kRecords * kRecordBytes + 2 * kSumsPlacesOf<kParts> * kSumsBytes : 0) + kBarriers<kParts, kGain> * 8 +
    kRounds * static_cast<int>(sizeof(Round));
static_assert(kSharedBytes<1, true> <= 227 * 1024 && kSharedBytes<1, false> <= 227 * 1024 &&
              kSharedBytes<2, true> <= 227 * 1024 && kSharedBytes<2, false> <= 227 * 1024);

// Rows row and row + 8 of a warpgroup's accumulator to a head. The four lanes of a row swap their pairs until each has
// eight neighbours: a quarter of the instructions, each with as many lines as before.
template <class T, int kColumns>
__device__ __forceinline__ void store_rows(const float (&c)[32], T* to, std::int64_t stride, int row, int rows, int d,
                                           float factor) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int g = 0; g < (kColumns + 31) / 32; ++g) {
      std::uint32_t w[4] = {};  // columns 8 n + 2 lane, n = 4 g ... 4 g + 3
#pragma unroll
      for (int n = 0; n < 4 && 4 * g + n < kColumns / 8; ++n) {
        const int at = 4 * (4 * g + n) + 2 * half;
        w[n] = pack<T>(c[at] * factor, c[at + 1] * factor);
      }
      const auto swap = [](std::uint32_t& x, int with) { x = __shfl_xor_sync(0xffffffffu, x, with); };
      const bool odd = lane % 2 != 0;
      std::uint32_t x = odd ? w[0] : w[1];
      std::uint32_t y = odd ? w[2] : w[3];
      swap(x, 1);
      swap(y, 1);
      const std::uint32_t low[2] = {odd ? x : w[0], odd ? w[1] : x};   // n = lane % 2 of lanes 0, 1 or of 2, 3
      const std::uint32_t high[2] = {odd ? y : w[2], odd ? w[3] : y};  // n = 2 + lane % 2
      const bool second = lane >= 2;
      x = second ? low[0] : high[0];
      y = second ? low[1] : high[1];
      swap(x, 2);
      swap(y, 2);
      const int column = 8 * (4 * g + lane);
      if (row + 8 * half < rows && column < d) {
        *reinterpret_cast<uint4*>(to + (row + 8 * half) * stride + column) =
            second ? make_uint4(x, y, high[0], high[1]) : make_uint4(low[0], low[1], x, y);
      }
    }
  }
}

template <class T, int kSteps, bool kGain, bool kNarrow>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    dq_kernel(const __grid_constant__ AttentionBackward p, const __grid_constant__ Maps maps, const Records records,
              const float* statistics, const Schedule schedule, const TableSums table_sums, float* strips,
              int walked_queries) {
  constexpr int kParts = kPartsOf<kSteps>;
  constexpr int kStages = kStagesOf<kParts, kGain>;
  constexpr int kVStages = kVStagesOf<kGain>;
  constexpr int kSumsPlaces = kSumsPlacesOf<kParts>;
  constexpr int kImages = images_per_item(kParts);
  constexpr int kImagesPerGroup = kImages / 2;
  static_assert(kImagesPerGroup * kParts == kTilesPerGroup);
  constexpr int kLast = kLastColumns<kSteps>;
  // A tile is awaited before half of the arithmetic, where the wait costs least; but where buffers are full of parts of
  // heads and no record is needed earlier, right before the products.
  constexpr bool kAwaitsLate = kParts == 2 && !kGain;
  extern __shared__ __align__(1024) unsigned char own_tiles[];                 // [image][q, dout]
  unsigned char* k_tiles = own_tiles + kOwnBytes;                              // [kStages][group]
  unsigned char* v_tiles = k_tiles + kStages * kStageBytes;                    // [kVStages][group]
  unsigned char* sums = v_tiles + kVStages * kStageBytes;                      // [kSumsPlaces][group]
  unsigned char* numbers = sums + (kGain ? 2 * kSumsPlaces * kSumsBytes : 0);  // [image]
  unsigned char* table = numbers + kImages * kNumbersBytes;
  const Barrier full(shared_address(table + (kGain ? kRecords * kRecordBytes : 0)));
  const Barrier empty = full + kStages;
  const Barrier v_empty = empty + kStages;
  const Barrier own_full = v_empty + kVStages;  // of the warpgroups' first images, of their second
  const Barrier own_empty = own_full + kImagesPerGroup;
  const SumsTurns<kSumsPlaces> turns(own_empty + kImagesPerGroup);
  Round* rounds =
      reinterpret_cast<Round*>(table + (kGain ? kRecords * kRecordBytes : 0) + kBarriers<kParts, kGain> * 8);

  const int nq = static_cast<int>(p.shape.queries);
  const int nk = static_cast<int>(p.shape.keys);
  const int heads = static_cast<int>(p.shape.heads);
  const int query_tiles = (nq + kTile - 1) / kTile;
  const int key_tiles = (nk + kTile - 1) / kTile;
  const int images = static_cast<int>(p.shape.batch / p.shape.groups);
  const int walked_tiles = (walked_queries + kTile - 1) / kTile;
  const int pairs = (walked_tiles + kCluster - 1) / kCluster;
  const int rank = cluster_rank();
  const int cluster = blockIdx.x / kCluster;
  const int count = count_items(schedule, cluster);
  // Of steps that are known not to be negative a remainder takes fewer instructions; but without a gain the loop as a
  // whole is then slower by 2%.
  using Step = std::conditional_t<kGain, std::uint32_t, int>;
  const auto key_tile_at = [&](Step round, int t) { return round % 2 ? key_tiles - 1 - t : t; };
  const bool want_table = kGain && p.dgain != nullptr;
  const float scale = static_cast<float>(p.scale);
  // The table's gradient has the scale as a factor. Beside bfloat16 it is in the weights from the start, so that nobody
  // multiplies sums by it; float16 has not the range.
  constexpr bool kScaledWeights = kGain && std::is_same_v<T, __nv_bfloat16>;
  const int group = warpgroup();

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init(full + s, 1);
      init_for_warps(empty + s, 8 * kCluster);  // of all blocks
    }
    for (int s = 0; s < kVStages; ++s) init_for_warps(v_empty + s, 8 * kCluster);
    for (int i = 0; i < kImagesPerGroup; ++i) {
      init(own_full + i, 1);
      init_for_warps(own_empty + i, 8);
    }
    turns.init_barriers();
    fence_init();
  }
  cluster_sync();

  if (group == 2) {
    give_registers<kProducerRegisters<kParts>>();
    const int warp = threadIdx.x / 32 - kConsumers / 32;
    if (warp > 0) {
      if (!want_table) return;
      const int lane = threadIdx.x % 32;
      const int stride = static_cast<int>(table_sums.stride);
      const Step steps = count * key_tiles;
      const std::uint32_t first_piece = collected_piece(shared_address(sums));
      Step step = 0;
      for (int round = 0; round < count; ++round) {
        Round r{};
        float* rows = nullptr;
        for (int t = 0; t < key_tiles; ++t, ++step) {
          turns.await_sums(step);
          if (t == 0) {
            r = rounds[round % kRounds];
            rows = r.to_strip ? strips + (static_cast<std::int64_t>(strip_of(schedule, cluster)) * kCluster + rank) *
                                             kTile * stride
                              : table_sums.data + ((static_cast<std::int64_t>(r.g) * heads + r.h) * table_sums.rows +
                                                   r.query_tile * kTile) *
                                                      stride;
            rows += lane / 16 * stride + lane % 16 * 4;
          }
          const int column = key_tile_at(round, t) * kTile;
          // The second of two query tiles may not exist.
          if (column + lane % 16 * 4 < stride && r.query_tile < walked_tiles) {
            const std::uint32_t from = first_piece + step % kSumsPlaces * 2 * kSumsBytes;
            if (r.is_first) {
              collect_sums<true, !kScaledWeights>(from, rows + column, stride, scale, warp - 1);
            } else {
              collect_sums<false, !kScaledWeights>(from, rows + column, stride, scale, warp - 1);
            }
          }
          __syncwarp();
          if (step + kSumsPlaces < steps) turns.release_place(step);
        }
      }
      return;
    }
    if (threadIdx.x != kConsumers) return;
    const auto choose = [&](int n) {
      const Item item = item_of(schedule, cluster, n);
      Round r;
      r.first_image = item.number * kImages;
      r.query_tile = item.unit % pairs * kCluster + rank;
      r.h = item.unit / pairs % heads;
      r.g = item.unit / pairs / heads;
      r.is_first = item.first;
      r.to_strip = item.strip;
      return r;
    };
    Step step = 0;
    for (int round = 0; round < count; ++round) {
      const Round r = choose(round);
      const int groups = static_cast<int>(p.shape.groups);
      // Past the last image the last one is loaded again; its weights are then 0.
      const auto image = [&](int x) { return r.g + min(r.first_image + x, images - 1) * groups; };
      rounds[round % kRounds] = r;
      for (int i = 0; i < kImagesPerGroup; ++i) {
        if (round > 0) wait(own_empty + i, (round - 1) % 2);
        arrive_and_expect(own_full + i, 2 * (2 * kParts * kTileBytes + kNumbersBytes));
        for (int x = i; x < kImages; x += kImagesPerGroup) {
          unsigned char* own = own_tiles + 2 * x * kParts * kTileBytes;
          copy_parts<kParts>(own, &maps.q, own_full + i, r.query_tile * kTile, r.h, image(x));
          copy_parts<kParts>(own + kParts * kTileBytes, &maps.dout, own_full + i, r.query_tile * kTile, r.h, image(x));
          copy_bytes(numbers + x * kNumbersBytes,
                     statistics + ((static_cast<std::int64_t>(image(x)) * heads + r.h) * query_tiles +
                                   min(r.query_tile, query_tiles - 1)) *
                                      kStatisticsFloats,
                     kNumbersBytes, own_full + i);
        }
      }
      for (int t = 0; t < key_tiles; ++t, ++step) {
        const int key_tile = key_tile_at(round, t);
        for (int i = 0; i < kTilesPerGroup; ++i) {
          const Step sub = kTilesPerGroup * step + i;
          const int s = sub % kStages;
          if (sub >= kStages) wait(empty + s, (sub / kStages - 1) % 2);
          arrive_and_expect(full + s, 2 * kStageBytes + (kGain && i == 0 ? kRecordBytes : 0));
          // Each block of the cluster loads what one of the two warpgroups needs for both blocks.
          const int x = rank * kImagesPerGroup + (kParts == 1 ? i : 0);
          const int column = kParts == 1 ? 0 : i * kTile;
          copy_box_to((1 << kCluster) - 1, k_tiles + s * kStageBytes + rank * kTileBytes, &maps.k, full + s, column,
                      key_tile * kTile, r.h, image(x));
          // Whoever has released the stage has done with the record of two steps ago; a second image needs it too.
          if constexpr (kGain) {
            static_assert(kStages + kImagesPerGroup - 1 <= kTilesPerGroup * kRecords);
            if (i == 0) {
              copy_bytes(table + step % kRecords * kRecordBytes,
                         records.at(r.g, r.h, query_tiles, key_tiles, min(r.query_tile, query_tiles - 1), key_tile),
                         kRecordBytes, full + s);
            }
          }
          const int v = sub % kVStages;
          if (sub >= kVStages) wait(v_empty + v, (sub / kVStages - 1) % 2);
          copy_box_to((1 << kCluster) - 1, v_tiles + v * kStageBytes + rank * kTileBytes, &maps.v, full + s, column,
                      key_tile * kTile, r.h, image(x));
        }
      }
    }
    cluster_sync_unaligned();
    return;
  }
  take_registers<kConsumerRegisters<kParts>>();

  const int thread = threadIdx.x % kWarpgroup;
  const int lane = threadIdx.x % 32;
  const int local_row = thread / 32 * 16 + lane / 4;
  const float factor = scale * kLog2e;
  // Gains are multiplied by scale * log2(e), and weights, where they are, by the scale.
  const float dq_factor = kScaledWeights ? kLn2 / scale : kGain ? kLn2 : scale;
  const float weight_shift = kScaledWeights ? log2f(scale) : 0;
  float x[32] = {};   // Q K^T
  float dx[32] = {};  // dO V^T
  pin(x);
  pin(dx);
  // i: of the warpgroup's two tiles.
  const auto slot = [&](Step at, int i) { return (kTilesPerGroup * at + i) % kStages; };
  const auto v_slot = [&](Step at, int i) { return (kTilesPerGroup * at + i) % kVStages; };
  const std::uint32_t first_own = low_descriptor(own_tiles) + group * kTilesPerGroup * (2 * kTileBytes >> 4);
  const std::uint32_t first_k = low_descriptor(k_tiles) + group * (kTileBytes >> 4);
  const std::uint32_t first_v = low_descriptor(v_tiles) + group * (kTileBytes >> 4);
  const auto k_tile = [&](Step at, int i) { return first_k + slot(at, i) * (kStageBytes >> 4); };
  // What follows is for an image, given by the first of its tiles.
  const auto await = [&](Step at, int image) {
#pragma unroll
    for (int i = image; i < image + kParts; ++i) wait(full + slot(at, i), (kTilesPerGroup * at + i) / kStages % 2);
  };
  const auto issue = [&](Step at, int image) {
    // Always 0, but the compiler does not know: it would keep the descriptors of all tiles, in registers that are not
    // there.
    const std::uint32_t zero = kGain ? static_cast<std::uint32_t>(at) >> 28 : 0;
    const std::uint32_t own = first_own + zero + image * (2 * kTileBytes >> 4);
    wgmma_fence();
    const auto v_tile = [&](int i) { return first_v + zero + v_slot(at, i) * (kStageBytes >> 4); };
    multiply_rows<T, 4>(x, own, k_tile(at, image));
    if constexpr (kParts == 2) multiply_rows<T, kSteps - 4>(x, own + kTileStep, k_tile(at, 1), true);
    multiply_rows<T, 4>(dx, own + kParts * kTileStep, v_tile(image));
    if constexpr (kParts == 2) multiply_rows<T, kSteps - 4>(dx, own + 3 * kTileStep, v_tile(1), true);
    wgmma_commit();
  };
  const std::uint32_t first_record = shared_address(table);
  // Each lane reads a copy of its own: a range that is the same for all would wait for its way to a uniform register.
  std::uint32_t first_range = first_record + kTileBytes + (kNarrow ? 0 : lane % kRangeCopies * 8);
  asm volatile("" : "+r"(first_range));
  const std::uint32_t offset = record_offset<false>();
  RecordPart record;
  const auto fetch_range = [&](Step at) {
    if constexpr (kGain) load_record_range(record, first_range + at % kRecords * kRecordBytes);
  };
  const auto fetch = [&](auto half, Step at) {
    if constexpr (kGain) {
      load_record_half<false, decltype(half)::value>(record, first_record + at % kRecords * kRecordBytes, offset);
    }
  };
  constexpr std::integral_constant<int, 0> kFirstHalf;
  constexpr std::integral_constant<int, 1> kSecondHalf;
  // Lane 0 and lane 1 of a warp speak for it in a block each.
  std::uint32_t remote_empty = lane < kCluster ? address_in(empty, lane) : 0;
  asm volatile("" : "+r"(remote_empty));
  const std::uint32_t first_number = shared_address(numbers) + statistics_at(local_row) * 4;
  std::uint32_t own_sums = left_pair(shared_address(sums) + group * kSumsBytes, local_row);
  asm volatile("" : "+r"(own_sums));  // not computed again in every step

  const auto release_in_all = [&](int barrier) {
    const std::uint32_t remote = remote_empty + 8 * barrier;
    __syncwarp();
    if constexpr (kSpeakers == 1) {
      if (remote_empty) arrive_at(remote);
    } else {
      for (int block = 0; block < kCluster; ++block) arrive_at(address_in(empty + barrier, block));
    }
  };
  const auto release_k = [&](Step at, int image) {
#pragma unroll
    for (int i = image; i < image + kParts; ++i) release_in_all(slot(at, i));
  };
  const auto release_v = [&](Step at, int image) {
#pragma unroll
    for (int i = image; i < image + kParts; ++i) release_in_all(kStages + v_slot(at, i));
  };

  for (int round = 0; round < count; ++round) {
    for (int i = 0; i < kImagesPerGroup; ++i) wait(own_full + i, round % 2);
    const int first_step = round * key_tiles;
    if (rounds[round % kRounds].query_tile >= walked_tiles) {
      // The second of two tiles does not exist: the other block and those who collect sums wait for this one all the
      // same.
      for (int i = 0; i < kImagesPerGroup; ++i) release(own_empty + i);
      for (int step = first_step; step < first_step + key_tiles; ++step) {
        for (int i = 0; i < kImagesPerGroup; ++i) {
          await(step, i);
          release_k(step, i);
          release_v(step, i);
        }
        if (want_table) {
          turns.await_place(step, group);
          turns.announce(step);
        }
      }
      continue;
    }
    float lse[kImagesPerGroup][2], delta[kImagesPerGroup][2];
    {
      const Round r = rounds[round % kRounds];
#pragma unroll
      for (int i = 0; i < kImagesPerGroup; ++i) {
        const int x = group * kImagesPerGroup + i;
        const bool valid = r.first_image + x < images;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float number[2];
          asm volatile("ld.shared.f32 %0, [%2];\nld.shared.f32 %1, [%2 + 8];"
                       : "=f"(number[0]), "=f"(number[1])
                       : "r"(first_number + x * kNumbersBytes + 64 * half));
          lse[i][half] = valid ? number[0] - weight_shift : INFINITY;
          delta[i][half] = number[1];
        }
      }
    }
    float dq[kTilesPerGroup][32] = {};
    float dgain[32] = {};  // of this warpgroup's images

    const auto leave_pair = [&](Step step, int n) {
      leave_sums(own_sums + step % kSumsPlaces * 2 * kSumsBytes, n, dgain[2 * n], dgain[2 * n + 1]);
    };
    await(first_step, 0);
    fetch_range(first_step);
    fetch(kFirstHalf, first_step);
    fetch(kSecondHalf, first_step);
    issue(first_step, 0);
    wgmma_wait<0>();
    release_v(first_step, 0);
    pin(x);
    pin(dx);
    pin(dq[0]);
    pin_first<kLast / 2>(dq[1]);
    if (key_tiles == 1) release(own_empty);  // of the first image
    Fragments dproducts = {};
    for (int t = 0; t < key_tiles; ++t) {
      const int step = first_step + t;
      const int key_tile = key_tile_at(round, t);
#pragma unroll
      for (int i = 0; i < kImagesPerGroup; ++i) {
        const bool more = i + 1 < kImagesPerGroup || t + 1 < key_tiles;
        const int next_step = i + 1 < kImagesPerGroup ? step : step + 1;
        constexpr int kNext[] = {kImagesPerGroup - 1, 0};
        const bool leaves = kGain && i + 1 == kImagesPerGroup && want_table;
        if constexpr (kGain) {
          if (i == 0) start_record(record, factor);
          if (!kNarrow && leaves) turns.await_place(step, group);
        }
        const auto weigh = [&](auto from, auto to) {
#pragma unroll
          for (int pair = decltype(from)::value / 2; pair < decltype(to)::value / 2; ++pair) {
            float gradient[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int at = 2 * pair + e;
              const int half = pair % 2;
              float gain = factor;
              if constexpr (kGain) gain = fmaf(unpack<T>(record, at / 8, at % 8), record.slope, record.base);
              const float weight = power2(fmaf(x[at], gain, -lse[i][half]));
              gradient[e] = weight * (dx[at] - delta[i][half]);
              if constexpr (kGain) {
                dgain[at] = i == 0 && !kNarrow ? gradient[e] * x[at] : fmaf(gradient[e], x[at], dgain[at]);
                gradient[e] *= gain;
              }
            }
            dproducts[pair / 4][pair % 4] = pack<T>(gradient[0], gradient[1]);
            if constexpr (kGain && !kNarrow) {
              if (i + 1 == kImagesPerGroup) leave_pair(step, pair);
            }
          }
        };
        // The record is fetched again for a second image: 32 gains are too many to keep.
        const auto fetch_next = [&] {
          if (!more) return;
          if constexpr (!kAwaitsLate) await(next_step, kNext[i]);
          if (i + 1 == kImagesPerGroup) fetch_range(next_step);
          fetch(kFirstHalf, next_step);
        };
        constexpr std::integral_constant<int, kNarrowColumns / 2> kNarrowEnd;
        if constexpr (kNarrow) {
          weigh(std::integral_constant<int, 0>(), kNarrowEnd);
          if (key_tile + 1 < key_tiles) {
            weigh(kNarrowEnd, std::integral_constant<int, 16>());
            fetch_next();
            weigh(std::integral_constant<int, 16>(), std::integral_constant<int, 32>());
          } else {
            keep_branch();
            fetch_next();
#pragma unroll
            for (int q = kNarrowColumns / 16; q < 4; ++q)
#pragma unroll
              for (int e = 0; e < 4; ++e) dproducts[q][e] = 0;
          }
        } else {
          weigh(std::integral_constant<int, 0>(), std::integral_constant<int, 16>());
          fetch_next();
          weigh(std::integral_constant<int, 16>(), std::integral_constant<int, 32>());
        }
        if constexpr (kGain) {
          if (i + 1 < kImagesPerGroup) pin(dgain);  // or the compiler would put its products off, and copy x for them
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
        multiply_add<T, kTile>(dq[i], dproducts, k_tile(step, i));
        if constexpr (kParts == 2) multiply_add<T, kLast>(dq[1], dproducts, k_tile(step, 1));
        wgmma_commit();
        if constexpr (kAwaitsLate) {
          if (more) await(next_step, kNext[i]);
        }
        if (more) issue(next_step, kNext[i]);
        if (more) {
          wgmma_wait<1>();
          release_k(step, i);
        }
        if constexpr (kGain) {
          if (kNarrow && leaves) {
            turns.await_place(step, group);
#pragma unroll
            for (int n = 0; n < 16; ++n) leave_pair(step, n);
#pragma unroll
            for (int n = 0; n < 32; ++n) dgain[n] = 0;  // a narrow tile does not set them all
          }
          if (leaves) turns.announce(step);
        }
        wgmma_wait<0>();
        pin(x);
        pin(dx);
        pin(dq[i]);
        if constexpr (kParts == 2) pin_first<kLast / 2>(dq[1]);
        if (more) {
          release_v(next_step, kNext[i]);
        } else {
          release_k(step, i);
        }
        // The last product with the next image's Q and dO is done: those of the next round may come.
        if (more && next_step + 1 == first_step + key_tiles) release(own_empty + kNext[i]);
      }
    }
    if (p.dq.data) {
      const Round r = rounds[round % kRounds];
#pragma unroll
      for (int i = 0; i < kImagesPerGroup; ++i) {
        const int x = r.first_image + group * kImagesPerGroup + i;
        if (x < images) {
          const std::int64_t b = r.g + static_cast<std::int64_t>(x) * p.shape.groups;
          T* to = head_of<T>(p.dq, b, r.h);
          const int row = r.query_tile * kTile + local_row;
          const int d = static_cast<int>(p.shape.dim);
          store_rows<T, kTile>(dq[i], to, p.dq.token, row, nq, d, dq_factor);
          if constexpr (kParts == 2) store_rows<T, kLast>(dq[1], to + kTile, p.dq.token, row, nq, d - kTile, dq_factor);
        }
      }
    }
  }
  cluster_sync_unaligned();
  await_previous();
}

// Whether kernels that overlap can be captured in a graph.
bool driver_overlaps() {
  static const bool overlaps = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12030;
  }();
  return overlaps;
}

template <class T, int kSteps, bool kGain>
cudaError_t start(const AttentionBackward& p, const Maps& maps, const Work& work, bool after_dkv, cudaStream_t stream) {
  constexpr int kParts = kPartsOf<kSteps>;
  constexpr int kBytes = kSharedBytes<kParts, kGain>;
  auto kernel = dq_kernel<T, kSteps, kGain, false>;
  if constexpr (kParts == 1) {
    // Over many tiles a faster loop gains more than a last tile that is done in part.
    constexpr std::int64_t kLongWalk = 512;
    if (ends_narrow(p.shape.keys) && p.shape.keys < kLongWalk) kernel = dq_kernel<T, kSteps, kGain, true>;
  }
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(work.schedule.clusters * kCluster);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = after_dkv && driver_overlaps() ? 1 : 0;
  e = cudaLaunchKernelEx(&config, kernel, p, maps, work.records, work.statistics, work.schedule, work.sums, work.strips,
                         static_cast<int>(p.shape.queries) - work.tail.queries);
  if (e != cudaSuccess) cudaGetLastError();  // reported here, not again to whoever asks next
  return e;
}

template <class T>
cudaError_t start(const AttentionBackward& p, const Maps& maps, const Work& work, bool after_dkv, cudaStream_t stream) {
  return with_steps(p.shape, [&](auto steps) {
    constexpr int kSteps = decltype(steps)::value;
    return work.records.data ? start<T, kSteps, true>(p, maps, work, after_dkv, stream)
                             : start<T, kSteps, false>(p, maps, work, after_dkv, stream);
  });
}

}  // namespace

cudaError_t start_dq(const AttentionBackward& p, const Maps& maps, const Work& work, bool after_dkv,
                     cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? start<__half>(p, maps, work, after_dkv, stream)
                                    : start<__nv_bfloat16>(p, maps, work, after_dkv, stream);
}

}  // namespace violin::kernels::cuda::sm90
