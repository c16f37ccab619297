// Phases of the decay mask on the CPU, around the row loops of decay_mask_rows.h.
//
// Forward: the powers of every (curve, axis, head) become tables; then rows of the mask gather from them.
// Backward: tables again; then each task adds its rows of dM to a histogram over distances, in double; then the
// histograms of all tasks are added in order and contracted with the powers. With one decay per axis the powers of the
// other axes differ from pair to pair, so there, and for log M, a task forms the sums over its pairs directly.
//
// Where distances are far larger than the number of tokens a table would be mostly unused: powers are then taken per
// element.
#include "violin/kernels/cpu/decay_mask.h"

#include <algorithm>
#include <cmath>

#include "violin/kernels/cpu/decay_mask_rows.h"
#include "violin/kernels/cpu/tiling.h"

namespace violin::kernels::cpu {
namespace {

using Layout = DecayMaskLayout;

constexpr int64_t kPowerBlock = 32;  // gamma^k = gamma^(k / 32 * 32) * gamma^(k % 32)

bool is_power_of_two(int64_t n) {
  return (n & (n - 1)) == 0;
}

// `backward`: tables are double, and there are partial sums. Both scratches may be null; `used` receives their sizes.
Layout lay_out(const DecayMask& mask, int64_t span, bool backward, Scratch scratch, Work* used = nullptr) {
  const bool is_double = mask.dtype == DType::kFloat64;
  Layout layout;
  layout.lanes = mask.heads <= 4 ? 4 : mask.heads <= 8 || is_double ? 8 : 16;
  layout.blocks = divide_up(mask.heads, layout.lanes);
  layout.axes = mask.decay_per_axis ? mask.axes : 1;
  layout.side = mask.prefix + mask.tokens;
  layout.rows = mask.groups * layout.side;
  layout.entries = !mask.log_space && span < 64 * (mask.tokens + 64) ? span + 1 : 0;
  // Without weights the sum over curves is divided by their number, so that a sum of ones is exactly one; the
  // reciprocal of a power of two may as well stand in the tables.
  layout.divide = mask.weight == nullptr && !mask.log_space && !is_power_of_two(mask.curves);

  layout.histogram = layout.entries > 0 && layout.axes == 1;
  layout.curve_sums = layout.histogram ? layout.entries : 1 + layout.axes;
  layout.sums = (mask.curves * layout.curve_sums + 1) * layout.lanes;
  // Enough tasks for many cores where there is enough work, within 32 MiB.
  const int64_t bytes = std::max<int64_t>(layout.blocks, 1) * layout.sums * static_cast<int64_t>(sizeof(double));
  const int64_t work = layout.rows * mask.tokens * mask.curves / 32768;
  layout.runs = std::clamp<int64_t>(std::min(work, (int64_t{32} << 20) / bytes), 1, 32);

  Arena shared(scratch.shared), own(scratch.thread);
  layout.decay = shared.take<double>(layout.blocks * mask.curves * layout.axes * layout.lanes);
  layout.weight = shared.take<double>(layout.blocks * mask.curves * layout.lanes);
  layout.log_weight = shared.take<double>(layout.blocks * mask.curves * layout.lanes);
  const int64_t powers = layout.blocks * mask.curves * layout.axes * layout.entries * layout.lanes;
  if (backward || is_double) {
    layout.powers = shared.take<double>(powers);
  } else {
    layout.powers = shared.take<float>(powers);
  }
  if (backward) layout.partial = shared.take<double>(layout.blocks * layout.runs * layout.sums);
  layout.distance = own.take<std::int32_t>(mask.curves * layout.axes * kMaskTile);
  layout.exponentials = own.take<double>(mask.curves * layout.lanes);
  if (used != nullptr) {
    used->shared_scratch_bytes = shared.used();
    used->thread_scratch_bytes = own.used();
  }
  return layout;
}

double load(const void* data, DType dtype, int64_t index) {
  return dtype == DType::kFloat64 ? static_cast<const double*>(data)[index] : static_cast<const float*>(data)[index];
}

void store(void* data, DType dtype, int64_t index, double value) {
  if (dtype == DType::kFloat64) {
    static_cast<double*>(data)[index] = value;
  } else {
    static_cast<float*>(data)[index] = static_cast<float>(value);
  }
}

// What multiplies the sum of a curve inside of the row loops.
double inner_weight(const DecayMask& mask, const Layout& layout, int64_t curve, int64_t head) {
  if (mask.weight != nullptr) return load(mask.weight, mask.dtype, curve * mask.heads + head);
  return layout.divide || mask.log_space ? 1.0 : 1.0 / static_cast<double>(mask.curves);
}

// Phase 0, task = (block, curve, axis): parameters and powers with heads innermost. In the tables of the forward pass
// the first axis carries the weight of its curve.
template <class T>
void prepare(const DecayMask& mask, const Layout& layout, bool weighted, int64_t task) {
  const int64_t block = task / (mask.curves * layout.axes), curve = task / layout.axes % mask.curves;
  const int64_t axis = task % layout.axes, lanes = layout.lanes;
  T* const powers = static_cast<T*>(layout.powers) + task * layout.entries * lanes;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t head = block * lanes + lane;
    double decay = 0, weight = 0;
    if (head < mask.heads) {
      decay = load(mask.log_decay, mask.dtype, (curve * layout.axes + axis) * mask.heads + head);
      weight = inner_weight(mask, layout, curve, head);
    }
    layout.decay[task * lanes + lane] = decay;
    if (axis == 0) {
      layout.weight[(block * mask.curves + curve) * lanes + lane] = weight;
      layout.log_weight[(block * mask.curves + curve) * lanes + lane] = std::log(std::abs(weight));
    }
    const double factor = weighted && axis == 0 ? weight : 1.0;
    double fine[kPowerBlock] = {1.0};  // not exp(0 * decay): the decay may be -inf
    for (int64_t i = 1; i < kPowerBlock; ++i) fine[i] = std::exp(decay * static_cast<double>(i));
    for (int64_t k = 0; k < layout.entries; k += kPowerBlock) {
      const double coarse = factor * (k == 0 ? 1.0 : std::exp(decay * static_cast<double>(k)));
      for (int64_t i = 0; i < std::min(kPowerBlock, layout.entries - k); ++i) {
        powers[(k + i) * lanes + lane] = static_cast<T>(coarse * fine[i]);
      }
    }
  }
}

// Phase 2 of backward, task = (block, curve), and one more per block for the prefix: partial sums become gradients.
void contract(const DecayMaskBackward& call, const Layout& layout, int64_t task) {
  const DecayMask& mask = call.mask;
  const int64_t block = task / (mask.curves + 1), curve = task % (mask.curves + 1), lanes = layout.lanes;
  const double* const first = layout.partial + block * layout.runs * layout.sums + curve * layout.curve_sums * lanes;
  // One of the sums, over all tasks in order.
  const auto total = [&](int64_t index, int64_t lane) {
    double sum = 0;
    for (int64_t run = 0; run < layout.runs; ++run) sum += first[run * layout.sums + index * lanes + lane];
    return sum;
  };
  for (int64_t lane = 0; lane < std::min(lanes, mask.heads - block * lanes); ++lane) {
    const int64_t head = block * lanes + lane, place = curve * mask.heads + head;
    if (curve == mask.curves) {
      if (call.dprefix_decay == nullptr) continue;
      const double slope =
          mask.log_space || mask.prefix_decay == nullptr ? 1.0 : std::exp(load(mask.prefix_decay, mask.dtype, head));
      store(call.dprefix_decay, mask.dtype, head, slope * total(0, lane));
      continue;
    }
    double weight = inner_weight(mask, layout, curve, head);
    if (layout.divide) weight /= static_cast<double>(mask.curves);
    double plain = 0;
    if (layout.histogram) {
      const double* const powers =
          static_cast<const double*>(layout.powers) + (block * mask.curves + curve) * layout.entries * lanes + lane;
      double slope = 0;
      for (int64_t k = 0; k < layout.entries; ++k) {
        const double term = powers[k * lanes] * total(k, lane);
        plain += term;
        slope += static_cast<double>(k) * term;
      }
      if (call.dlog_decay != nullptr) store(call.dlog_decay, mask.dtype, place, weight * slope);
    } else {
      plain = total(0, lane);
      for (int64_t axis = 0; axis < layout.axes && call.dlog_decay != nullptr; ++axis) {
        store(call.dlog_decay, mask.dtype, (curve * layout.axes + axis) * mask.heads + head,
              weight * total(1 + axis, lane));
      }
    }
    if (call.dweight != nullptr) store(call.dweight, mask.dtype, place, plain);
  }
}

}  // namespace

const DecayMaskRows& decay_mask_rows(Level level) {
#ifdef VIOLIN_X86
  if (level == Level::kAvx2) return decay_mask_rows_avx2();
  if (level == Level::kAvx512) return decay_mask_rows_avx512();
#endif
  static_cast<void>(level);
  return decay_mask_rows_plain();
}

int64_t largest_distance(const DecayMask& mask) {
  int64_t largest = 0;
  for (int64_t curve = 0; curve < mask.groups * mask.curves && mask.tokens > 0; ++curve) {
    int64_t together = 0;
    for (int64_t axis = 0; axis < mask.axes; ++axis) {
      const std::int32_t* const ranks = mask.ranks + (curve * mask.axes + axis) * mask.tokens;
      const auto [low, high] = std::minmax_element(ranks, ranks + mask.tokens);
      const int64_t range = int64_t{*high} - *low;
      together = mask.decay_per_axis ? std::max(together, range) : together + range;
    }
    largest = std::max(largest, together);
  }
  return largest;
}

Work plan(const DecayMaskForward& call, int64_t span) {
  Work work;
  const Layout layout = lay_out(call.mask, span, false, {}, &work);
  work.phases = 2;
  work.tasks[0] = layout.blocks * call.mask.curves * layout.axes;
  work.tasks[1] = layout.blocks * divide_up(layout.rows, kMaskRows);
  return work;
}

void run(const DecayMaskForward& call, int64_t span, Level level, int phase, int64_t begin, int64_t end,
         Scratch scratch) {
  const Layout layout = lay_out(call.mask, span, false, scratch);
  if (phase == 1) return decay_mask_rows(level).forward(call, layout, begin, end);
  for (int64_t task = begin; task < end; ++task) {
    if (call.mask.dtype == DType::kFloat64) {
      prepare<double>(call.mask, layout, true, task);
    } else {
      prepare<float>(call.mask, layout, true, task);
    }
  }
}

Work plan(const DecayMaskBackward& call, int64_t span) {
  Work work;
  const Layout layout = lay_out(call.mask, span, true, {}, &work);
  work.phases = 3;
  work.tasks[0] = layout.blocks * call.mask.curves * layout.axes;
  work.tasks[1] = layout.blocks * layout.runs;
  work.tasks[2] = layout.blocks * (call.mask.curves + 1);
  return work;
}

void run(const DecayMaskBackward& call, int64_t span, Level level, int phase, int64_t begin, int64_t end,
         Scratch scratch) {
  const Layout layout = lay_out(call.mask, span, true, scratch);
  if (phase == 1) return decay_mask_rows(level).backward(call, layout, begin, end);
  for (int64_t task = begin; task < end; ++task) {
    if (phase == 0) {
      prepare<double>(call.mask, layout, false, task);
    } else {
      contract(call, layout, task);
    }
  }
}

}  // namespace violin::kernels::cpu
