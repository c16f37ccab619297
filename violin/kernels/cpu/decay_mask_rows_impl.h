// The one implementation of decay_mask_rows.h, compiled once per instruction set: the including file sets
// VIOLIN_MASK_ROWS_NAME (the function to define) and VIOLIN_VECTOR_BYTES. GCC's vector extensions carry the arithmetic.
//
// The distance of a pair of tokens is found once and fetches the powers of all heads of a block with one load, because
// heads lie innermost in the tables. Tiles of 16 tokens by a block of heads are transposed between that order and the
// mask's.
//
// Everything here has internal linkage and uses no inline function of a header: what is compiled for AVX-512 must never
// be picked for another level by the linker.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "violin/kernels/cpu/decay_mask_rows.h"

#define VIOLIN_INLINE [[gnu::always_inline]] static inline

namespace violin::kernels::cpu {
namespace {

using std::int64_t;

// -- W numbers, one per head of a block, in as few vectors as they take
// ------------------------------------------------

template <class T, int W>
struct Lanes {
  static constexpr int kStep = W * sizeof(T) <= VIOLIN_VECTOR_BYTES ? W : VIOLIN_VECTOR_BYTES / sizeof(T);
  static constexpr int kCount = W / kStep;
  typedef T V __attribute__((vector_size(sizeof(T) * kStep)));
  V v[kCount];
};

// For each vector i of a Lanes. Unrolled at once, or the compiler keeps the vectors in memory.
#define VIOLIN_EACH(lanes) _Pragma("GCC unroll 16") for (int i = 0; i < (lanes).kCount; ++i)

template <class T, int W>
VIOLIN_INLINE void load(Lanes<T, W>& to, const T* from) {
  VIOLIN_EACH(to) std::memcpy(&to.v[i], from + i * to.kStep, sizeof(to.v[i]));
}
template <class T, int W>
VIOLIN_INLINE void store(T* to, const Lanes<T, W>& from) {
  VIOLIN_EACH(from) std::memcpy(to + i * from.kStep, &from.v[i], sizeof(from.v[i]));
}
// Between double and what the mask holds.
template <class T, int W>
VIOLIN_INLINE void load_converted(Lanes<double, W>& to, const T* from) {
  typedef T Source __attribute__((vector_size(sizeof(T) * Lanes<double, W>::kStep)));
  VIOLIN_EACH(to) {
    Source source;
    std::memcpy(&source, from + i * to.kStep, sizeof(source));
    to.v[i] = __builtin_convertvector(source, typename Lanes<double, W>::V);
  }
}
template <class T, int W>
VIOLIN_INLINE void store_converted(T* to, const Lanes<double, W>& from) {
  typedef T Target __attribute__((vector_size(sizeof(T) * Lanes<double, W>::kStep)));
  VIOLIN_EACH(from) {
    const Target target = __builtin_convertvector(from.v[i], Target);
    std::memcpy(to + i * from.kStep, &target, sizeof(target));
  }
}
template <class T, int W>
VIOLIN_INLINE void fill(Lanes<T, W>& to, T value) {
  VIOLIN_EACH(to) to.v[i] = typename Lanes<T, W>::V{} + value;
}
template <class T, int W>
VIOLIN_INLINE void add(Lanes<T, W>& to, const Lanes<T, W>& other) {
  VIOLIN_EACH(to) to.v[i] += other.v[i];
}
template <class T, int W>
VIOLIN_INLINE void multiply(Lanes<T, W>& to, const Lanes<T, W>& other) {
  VIOLIN_EACH(to) to.v[i] *= other.v[i];
}
// to += factor * other
template <class T, int W>
VIOLIN_INLINE void add_product(Lanes<T, W>& to, T factor, const Lanes<T, W>& other) {
  VIOLIN_EACH(to) to.v[i] += factor * other.v[i];
}
template <class T, int W>
VIOLIN_INLINE void add_product(Lanes<T, W>& to, const Lanes<T, W>& factor, const Lanes<T, W>& other) {
  VIOLIN_EACH(to) to.v[i] += factor.v[i] * other.v[i];
}
template <class T, int W>
VIOLIN_INLINE void add_to_memory(T* to, const Lanes<T, W>& other) {
  Lanes<T, W> sum;
  load(sum, to);
  add(sum, other);
  store(to, sum);
}

// -- Transposition ---------------------------------------------------------------------------------------------------

template <class V, int... i>
VIOLIN_INLINE void interleave(const V& a, const V& b, V& low, V& high, std::integer_sequence<int, i...>) {
  constexpr int kWidth = sizeof...(i);
  low = __builtin_shufflevector(a, b, (i % 2 == 0 ? i / 2 : kWidth + i / 2)...);
  high = __builtin_shufflevector(a, b, (i % 2 == 0 ? kWidth / 2 + i / 2 : kWidth + kWidth / 2 + i / 2)...);
}

// out[c * out_stride + r] = in[r * in_stride + c] for a square of one vector's width: interleaving the upper with the
// lower half of the rows, log2(width) times.
template <class V, class T>
VIOLIN_INLINE void transpose_square(const T* in, int64_t in_stride, T* out, int64_t out_stride) {
  constexpr int kWidth = sizeof(V) / sizeof(T);
  V a[kWidth], b[kWidth];
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r) std::memcpy(&a[r], in + r * in_stride, sizeof(V));
#pragma GCC unroll 16
  for (int round = 1; round < kWidth; round *= 2) {
#pragma GCC unroll 16
    for (int r = 0; r < kWidth / 2; ++r) {
      interleave(a[r], a[r + kWidth / 2], b[2 * r], b[2 * r + 1], std::make_integer_sequence<int, kWidth>());
    }
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; ++r) a[r] = b[r];
  }
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r) std::memcpy(out + r * out_stride, &a[r], sizeof(V));
}

// out[c, r] = in[r, c], both dense; rows and columns are multiples of the narrower side's vector.
template <class T, int rows, int columns>
VIOLIN_INLINE void transpose(const T* in, T* out) {
  using V = typename Lanes<T, (rows < columns ? rows : columns)>::V;
  constexpr int kWidth = sizeof(V) / sizeof(T);
  for (int r = 0; r < rows; r += kWidth) {
    for (int c = 0; c < columns; c += kWidth) {
      transpose_square<V>(in + r * columns + c, columns, out + c * rows + r, rows);
    }
  }
}

// -- exp and log of doubles, to a relative error of about 1e-15
// ----------------------------------------------------------

template <class V>
struct BitsOf {
  typedef int64_t Type __attribute__((vector_size(sizeof(V))));
};
template <class To, class From>
VIOLIN_INLINE void reinterpret(To& to, const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
}

template <class V>
VIOLIN_INLINE V vector_exp(const V& x) {
  constexpr double kLowest = -708, kHighest = 709;  // 0 below, clamped above
  constexpr double kLog2e = 1.4426950408889634074;
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  constexpr double kRound =
      6755399441055744.0;  // 1.5 * 2^52: adding it leaves the nearest whole number in the low bits
  V clamped = x < kLowest ? V{} + kLowest : x;
  clamped = clamped > kHighest ? V{} + kHighest : clamped;
  const V shifted = clamped * kLog2e + kRound;
  const V n = shifted - kRound;
  const V r = (clamped - n * kLn2High) - n * kLn2Low;
  // The Taylor series: |r| <= ln(2) / 2, so 13 terms leave less than 2e-16.
  V p = r * (1.0 / 6227020800.0) + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  typename BitsOf<V>::Type bits;
  V power;
  reinterpret(bits, shifted);
  bits = (bits + 1023) << 52;
  reinterpret(power, bits);
  return x < kLowest ? V{} : p * power;
}

// For normal positive numbers; -inf for 0, NaN for what is negative or NaN.
template <class V>
VIOLIN_INLINE V vector_log(const V& x) {
  using Bits = typename BitsOf<V>::Type;
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  constexpr int64_t kHalfRoot = 0x3FE6A09E667F3BCD;  // sqrt(1/2): the mantissa is taken between it and its double
  Bits bits;
  reinterpret(bits, x);
  bits -= kHalfRoot;
  const V n = __builtin_convertvector(bits >> 52, V);
  V m;
  reinterpret(m, Bits((bits & 0x000FFFFFFFFFFFFF) + kHalfRoot));
  // log m = 2 artanh f with f = (m - 1) / (m + 1), |f| < 0.172.
  const V f = (m - 1.0) / (m + 1.0);
  const V f2 = f * f;
  V p = f2 * (1.0 / 21) + 1.0 / 19;
  p = p * f2 + 1.0 / 17;
  p = p * f2 + 1.0 / 15;
  p = p * f2 + 1.0 / 13;
  p = p * f2 + 1.0 / 11;
  p = p * f2 + 1.0 / 9;
  p = p * f2 + 1.0 / 7;
  p = p * f2 + 1.0 / 5;
  p = p * f2 + 1.0 / 3;
  const V result = n * kLn2High + (2.0 * f + (2.0 * f * f2 * p + n * kLn2Low));
  const V at_zero = V{} - __builtin_inf(), elsewhere = V{} + __builtin_nan("");
  return x > 0 ? result : (x == 0 ? at_zero : elsewhere);
}

// -- Distances -------------------------------------------------------------------------------------------------------

// From token i to tokens [j, j + kMaskTile) along every curve, [C, axes, kMaskTile]. Columns behind the last token
// repeat it, so that they read valid entries.
VIOLIN_INLINE void find_distances(const DecayMask& mask, const DecayMaskLayout& layout, int64_t group, int64_t i,
                                  int64_t j, int64_t count) {
  const std::int32_t* rank = mask.ranks + group * mask.curves * mask.axes * mask.tokens;
  std::int32_t* row = layout.distance;
  for (int64_t c = 0; c < mask.curves; ++c) {
    for (int64_t axis = 0; axis < mask.axes; ++axis, rank += mask.tokens) {
      std::int32_t found[kMaskTile];
      if (count == kMaskTile) {
        for (int64_t t = 0; t < kMaskTile; ++t) found[t] = std::abs(rank[i] - rank[j + t]);
      } else {
        for (int64_t t = 0; t < kMaskTile; ++t) found[t] = std::abs(rank[i] - rank[j + (t < count ? t : count - 1)]);
      }
      const bool added = layout.axes == 1 && axis > 0;
      for (int64_t t = 0; t < kMaskTile; ++t) row[t] = added ? row[t] + found[t] : found[t];
      if (layout.axes > 1 || axis == mask.axes - 1) row += kMaskTile;
    }
  }
}

// -- One pair of tokens, all heads of a block: `at` points to its distances, [C, axes] in steps of kMaskTile
// ----------------

// sum_a decay * distance. A decay of -inf at distance 0 is no decay.
template <int W>
VIOLIN_INLINE void exponents(const DecayMaskLayout& layout, const double* decay, const std::int32_t* at,
                             Lanes<double, W>& result) {
  fill(result, 0.0);
  for (int64_t axis = 0; axis < layout.axes; ++axis) {
    const std::int32_t k = at[axis * kMaskTile];
    if (k == 0) continue;
    Lanes<double, W> rate;
    load(rate, decay + axis * W);
    add_product(result, static_cast<double>(k), rate);
  }
}

// With s_c the exponents and w_c the weights: e_c = exp(s_c - m), m = max_c (s_c + log |w_c|), total = sum_c w_c e_c,
// so that log M = m + log(total). e goes to layout.exponentials.
template <int W>
VIOLIN_INLINE void log_sum(const DecayMask& mask, const DecayMaskLayout& layout, int64_t block, const std::int32_t* at,
                           Lanes<double, W>& largest, Lanes<double, W>& total) {
  constexpr double kHighest = 700;  // a curve of weight 0 may lie far above the others
  const int64_t first = block * mask.curves;
  Lanes<double, W> s, w;
  fill(largest, -1e300);
  for (int64_t c = 0; c < mask.curves; ++c) {
    exponents(layout, layout.decay + (first + c) * layout.axes * W, at + c * layout.axes * kMaskTile, s);
    store(layout.exponentials + c * W, s);
    load(w, layout.log_weight + (first + c) * W);
    add(w, s);
    VIOLIN_EACH(s) largest.v[i] = w.v[i] > largest.v[i] ? w.v[i] : largest.v[i];
  }
  fill(total, 0.0);
  for (int64_t c = 0; c < mask.curves; ++c) {
    load(s, layout.exponentials + c * W);
    load(w, layout.weight + (first + c) * W);
    VIOLIN_EACH(s) {
      using V = typename Lanes<double, W>::V;
      const V x = s.v[i] - largest.v[i];
      s.v[i] = vector_exp<V>(x > kHighest ? V{} + kHighest : x);
    }
    store(layout.exponentials + c * W, s);
    add_product(total, w, s);
  }
}

// The product of the powers of a curve along its axes, the first axis with what is folded into its table.
template <class T, int W>
VIOLIN_INLINE void gather(const DecayMaskLayout& layout, int64_t curve, const std::int32_t* at, Lanes<T, W>& result) {
  const int64_t size = layout.entries * W;
  const T* const powers = static_cast<const T*>(layout.powers) + curve * layout.axes * size;
  load(result, powers + int64_t{at[0]} * W);
  for (int64_t axis = 1; axis < layout.axes; ++axis) {
    Lanes<T, W> power;
    load(power, powers + axis * size + int64_t{at[axis * kMaskTile]} * W);
    multiply(result, power);
  }
}

template <class T, int W>
VIOLIN_INLINE void finish_sum(const DecayMask& mask, const DecayMaskLayout& layout, Lanes<T, W>& sum, T* result) {
  if (layout.divide) {
    VIOLIN_EACH(sum) sum.v[i] /= static_cast<T>(mask.curves);
  }
  store(result, sum);
}

// A whole tile [kMaskTile, W] where every curve has one decay. A few pairs at a time keep their sums in registers while
// one table after another is visited.
template <class T, int W>
VIOLIN_INLINE void mask_of_tile(const DecayMask& mask, const DecayMaskLayout& layout, int64_t block, T* tile) {
  constexpr int kPairs = Lanes<T, W>::kCount > 2 ? 2 : Lanes<T, W>::kCount == 2 ? 4 : 8;
  const int64_t size = layout.entries * W;
  const T* const first = static_cast<const T*>(layout.powers) + block * mask.curves * size;
  for (int64_t t = 0; t < kMaskTile; t += kPairs) {
    const std::int32_t* at = layout.distance + t;
    const T* table = first;
    Lanes<T, W> sums[kPairs];
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) load(sums[pair], table + int64_t{at[pair]} * W);
    for (int64_t c = 1; c < mask.curves; ++c) {
      at += kMaskTile;
      table += size;
#pragma GCC unroll 8
      for (int pair = 0; pair < kPairs; ++pair) {
        Lanes<T, W> term;
        load(term, table + int64_t{at[pair]} * W);
        add(sums[pair], term);
      }
    }
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) finish_sum(mask, layout, sums[pair], tile + (t + pair) * W);
  }
}

// The mask of the pair for all heads of the block, [W].
template <class T, int W>
VIOLIN_INLINE void mask_of_pair(const DecayMask& mask, const DecayMaskLayout& layout, int64_t block,
                                const std::int32_t* at, T* result) {
  const int64_t first = block * mask.curves;
  if (layout.entries > 0) {
    Lanes<T, W> sum;
    gather(layout, first, at, sum);
    for (int64_t c = 1; c < mask.curves; ++c) {
      Lanes<T, W> term;
      gather(layout, first + c, at + c * layout.axes * kMaskTile, term);
      add(sum, term);
    }
    return finish_sum(mask, layout, sum, result);
  }
  Lanes<double, W> sum;
  if (mask.log_space) {
    const double shift = mask.weight == nullptr ? std::log(static_cast<double>(mask.curves)) : 0.0;
    Lanes<double, W> largest;
    log_sum(mask, layout, block, at, largest, sum);
    VIOLIN_EACH(sum) sum.v[i] = largest.v[i] + (vector_log(sum.v[i]) - shift);
  } else {
    fill(sum, 0.0);
    for (int64_t c = 0; c < mask.curves; ++c) {
      Lanes<double, W> s, w;
      exponents(layout, layout.decay + (first + c) * layout.axes * W, at + c * layout.axes * kMaskTile, s);
      load(w, layout.weight + (first + c) * W);
      VIOLIN_EACH(s) sum.v[i] += w.v[i] * vector_exp(s.v[i]);
    }
    if (layout.divide) {
      VIOLIN_EACH(sum) sum.v[i] /= static_cast<double>(mask.curves);
    }
  }
  store_converted(result, sum);
}

// Adds what one pair contributes to the partial sums of a task.
template <int W>
VIOLIN_INLINE void gradient_of_pair(const DecayMask& mask, const DecayMaskLayout& layout, int64_t block,
                                    const std::int32_t* at, const Lanes<double, W>& dmask, double* sums) {
  const int64_t first = block * mask.curves;
  if (layout.histogram) {
    for (int64_t c = 0; c < mask.curves; ++c) {
      add_to_memory(sums + (c * layout.entries + at[c * kMaskTile]) * W, dmask);
    }
    return;
  }
  Lanes<double, W> total;
  fill(total, 1.0);
  if (mask.log_space) {
    Lanes<double, W> largest;
    log_sum(mask, layout, block, at, largest, total);
  }
  for (int64_t c = 0; c < mask.curves; ++c) {
    const std::int32_t* const along = at + c * layout.axes * kMaskTile;
    Lanes<double, W> term;  // the derivative of the mask by the weight of the curve, times dmask
    if (mask.log_space) {
      load(term, layout.exponentials + c * W);
      VIOLIN_EACH(term) term.v[i] /= total.v[i];
    } else if (layout.entries > 0) {
      gather(layout, first + c, along, term);
    } else {
      exponents(layout, layout.decay + (first + c) * layout.axes * W, along, term);
      VIOLIN_EACH(term) term.v[i] = vector_exp(term.v[i]);
    }
    multiply(term, dmask);
    double* const sum = sums + c * layout.curve_sums * W;
    add_to_memory(sum, term);
    for (int64_t axis = 0; axis < layout.axes; ++axis) {
      Lanes<double, W> slope;
      load(slope, sum + (1 + axis) * W);
      add_product(slope, static_cast<double>(along[axis * kMaskTile]), term);
      store(sum + (1 + axis) * W, slope);
    }
  }
}

// -- Rows ------------------------------------------------------------------------------------------------------------

template <class T, int W>
void forward_rows(const DecayMaskForward& call, const DecayMaskLayout& layout, int64_t begin, int64_t end) {
  const DecayMask& mask = call.mask;
  const int64_t plane = layout.side * layout.side, runs = (layout.rows + kMaskRows - 1) / kMaskRows;
  const T* const prefix_decay = static_cast<const T*>(mask.prefix_decay);
  alignas(64) T tile[kMaskTile * W];
  alignas(64) T turned[W * kMaskTile];
  for (int64_t task = begin; task < end; ++task) {
    const int64_t block = task / runs, first_head = block * W;
    const int64_t heads = mask.heads - first_head < W ? mask.heads - first_head : W;
    for (int64_t row = task % runs * kMaskRows; row < layout.rows && row < (task % runs + 1) * kMaskRows; ++row) {
      const int64_t group = row / layout.side, line = row % layout.side, i = line - mask.prefix;
      T* const out = static_cast<T*>(call.out) + (group * mask.heads + first_head) * plane + line * layout.side;
      // What no curve reaches: the whole row of a prefix token, the prefix columns of a patch.
      const int64_t columns = i < 0 ? layout.side : mask.prefix;
      for (int64_t lane = 0; lane < heads; ++lane) {
        const T decay = prefix_decay == nullptr ? T(0) : prefix_decay[first_head + lane];
        const T value = mask.log_space ? decay : std::exp(decay);
        for (int64_t j = 0; j < columns; ++j) out[lane * plane + j] = value;
        if (i < 0) out[lane * plane + line] = mask.log_space ? T(0) : T(1);
      }
      if (i < 0) continue;
      for (int64_t j = 0; j < mask.tokens; j += kMaskTile) {
        const int64_t count = mask.tokens - j < kMaskTile ? mask.tokens - j : kMaskTile;
        find_distances(mask, layout, group, i, j, count);
        if (layout.histogram) {
          mask_of_tile<T, W>(mask, layout, block, tile);
        } else {
          for (int64_t t = 0; t < kMaskTile; ++t) {
            mask_of_pair<T, W>(mask, layout, block, layout.distance + t, tile + t * W);
          }
        }
        transpose<T, kMaskTile, W>(tile, turned);
        T* const to = out + mask.prefix + j;
        if (count == kMaskTile) {
          for (int64_t lane = 0; lane < heads; ++lane) {
            std::memcpy(to + lane * plane, turned + lane * kMaskTile, kMaskTile * sizeof(T));
          }
        } else {
          for (int64_t lane = 0; lane < heads; ++lane) {
            for (int64_t t = 0; t < count; ++t) to[lane * plane + t] = turned[lane * kMaskTile + t];
          }
        }
      }
    }
  }
}

template <class T, int W>
void backward_rows(const DecayMaskBackward& call, const DecayMaskLayout& layout, int64_t begin, int64_t end) {
  const DecayMask& mask = call.mask;
  const int64_t plane = layout.side * layout.side;
  const bool curves_wanted = call.dlog_decay != nullptr || call.dweight != nullptr;
  alignas(64) T tile[W * kMaskTile] = {};  // rows of heads that do not exist stay zero
  alignas(64) T turned[kMaskTile * W];
  for (int64_t task = begin; task < end; ++task) {
    const int64_t block = task / layout.runs, run = task % layout.runs, first_head = block * W;
    const int64_t heads = mask.heads - first_head < W ? mask.heads - first_head : W;
    double* const sums = layout.partial + task * layout.sums;
    double* const prefix_sum = sums + mask.curves * layout.curve_sums * W;
    for (int64_t n = 0; n < layout.sums; ++n) sums[n] = 0;
    if (heads < W) {
      for (int64_t n = heads * kMaskTile; n < W * kMaskTile; ++n) tile[n] = 0;
    }
    const int64_t last = (run + 1) * layout.rows / layout.runs;
    for (int64_t row = run * layout.rows / layout.runs; row < last; ++row) {
      const int64_t group = row / layout.side, line = row % layout.side, i = line - mask.prefix;
      const T* const in =
          static_cast<const T*>(call.dout) + (group * mask.heads + first_head) * plane + line * layout.side;
      if (call.dprefix_decay != nullptr) {
        const int64_t columns = i < 0 ? layout.side : mask.prefix;
        for (int64_t lane = 0; lane < heads; ++lane) {
          for (int64_t j = 0; j < columns; ++j) {
            if (j != line) prefix_sum[lane] += static_cast<double>(in[lane * plane + j]);
          }
        }
      }
      if (i < 0 || !curves_wanted) continue;
      for (int64_t j = 0; j < mask.tokens; j += kMaskTile) {
        const int64_t count = mask.tokens - j < kMaskTile ? mask.tokens - j : kMaskTile;
        find_distances(mask, layout, group, i, j, count);
        const T* const from = in + mask.prefix + j;
        if (count == kMaskTile) {
          for (int64_t lane = 0; lane < heads; ++lane) {
            std::memcpy(tile + lane * kMaskTile, from + lane * plane, kMaskTile * sizeof(T));
          }
        } else {
          for (int64_t lane = 0; lane < heads; ++lane) {
            for (int64_t t = 0; t < count; ++t) tile[lane * kMaskTile + t] = from[lane * plane + t];
          }
        }
        transpose<T, W, kMaskTile>(tile, turned);
        for (int64_t t = 0; t < count; ++t) {
          Lanes<double, W> dmask;
          load_converted(dmask, turned + t * W);
          gradient_of_pair(mask, layout, block, layout.distance + t, dmask, sums);
        }
      }
    }
  }
}

// The mask's type and the lanes of a block as template arguments.
void forward(const DecayMaskForward& call, const DecayMaskLayout& layout, int64_t begin, int64_t end) {
  if (call.mask.dtype == DType::kFloat64) {
    return layout.lanes == 4 ? forward_rows<double, 4>(call, layout, begin, end)
                             : forward_rows<double, 8>(call, layout, begin, end);
  }
  if (layout.lanes == 4) return forward_rows<float, 4>(call, layout, begin, end);
  if (layout.lanes == 8) return forward_rows<float, 8>(call, layout, begin, end);
  forward_rows<float, 16>(call, layout, begin, end);
}

void backward(const DecayMaskBackward& call, const DecayMaskLayout& layout, int64_t begin, int64_t end) {
  if (call.mask.dtype == DType::kFloat64) {
    return layout.lanes == 4 ? backward_rows<double, 4>(call, layout, begin, end)
                             : backward_rows<double, 8>(call, layout, begin, end);
  }
  if (layout.lanes == 4) return backward_rows<float, 4>(call, layout, begin, end);
  if (layout.lanes == 8) return backward_rows<float, 8>(call, layout, begin, end);
  backward_rows<float, 16>(call, layout, begin, end);
}

}  // namespace

const DecayMaskRows& VIOLIN_MASK_ROWS_NAME() {
  static constexpr DecayMaskRows kRows = {forward, backward};
  return kRows;
}

}  // namespace violin::kernels::cpu
