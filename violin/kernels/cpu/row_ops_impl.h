// The one implementation of row_ops.h, compiled once per instruction set: the including file sets VIOLIN_ROW_OPS_NAME
// (the function to define) and VIOLIN_VECTOR_BYTES, and its compiler flags decide what the compiler may use. GCC's
// vector extensions carry the arithmetic, so the same text is SSE2, AVX2, AVX-512 or NEON; intrinsics appear only where
// the extensions have no word for the instruction (partial loads and 2^n scaling).
//
// Everything here has internal linkage: a function of the AVX-512 build must never be picked for another level by the
// linker.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "violin/kernels/cpu/row_ops.h"
#include "violin/kernels/cpu/vector_impl.h"

namespace violin::kernels::cpu {
namespace {

// -- The functions of the table -------------------------------------------------------------------------------------

template <class Source, class Operand, class Real>
struct Implementation {
  using Mat = Matrix<Real>;
  using ConstMat = Matrix<const Real>;

  static void pack(const Source* in, int64_t stride, int64_t rows, int64_t columns, Matrix<Operand> out) {
    for (int64_t r = 0; r < rows; ++r) {
      const Source* from = in + r * stride;
      Operand* to = out.row(r);
      int64_t c = 0;
      for (; c + kWidth<Real> <= columns; c += kWidth<Real>) {
        store_as<Real>(to + c, load_as<Real>(from + c));
      }
      for (; c < columns; ++c) to[c] = to_operand<Operand>(from[c]);
    }
  }

  static void pack_transposed(const Source* in, int64_t stride, int64_t rows, int64_t columns, int64_t padded,
                              Matrix<Operand> out) {
    transpose_blocks<Real>(
        rows, columns, [&](int64_t r, int64_t c) { return load_as<Real>(in + r * stride + c); },
        [&](int64_t c, int64_t r, Vec<Real> v) { store_as<Real>(out.row(c) + r, v); },
        [&](int64_t r, int64_t c) { out.row(c)[r] = to_operand<Operand>(in[r * stride + c]); });
    for (int64_t c = 0; c < columns && rows < padded; ++c) {
      for (int64_t r = rows; r < padded; ++r) out.row(c)[r] = Operand{};
    }
  }

  template <bool kGain, bool kBias, bool kGate>
  static void softmax_rows(const SoftmaxTile<Operand, Real>& tile) {
    constexpr int64_t w = kWidth<Real>;
    const int64_t whole = tile.columns / w * w;
    const int64_t rest = tile.columns - whole;
    const auto is_padding = iota<Real>() >= static_cast<Real>(rest);

    for (int64_t r = 0; r < tile.rows; ++r) {
      Real* logits = tile.logits.row(r);
      const Real* gain = kGain ? tile.gain.row(r) : nullptr;
      const Real* bias = kBias ? tile.bias.row(r) : nullptr;
      const Real* gate = kGate ? tile.gate.row(r) : nullptr;

      Vec<Real> most[2] = {fill(-kInfinity<Real>), fill(-kInfinity<Real>)};
      const auto logit = [&](int64_t c, const auto& table) {
        Vec<Real> x = load(logits + c);
        if constexpr (kGain) x = x * table(gain + c);
        x = x * tile.scale;
        if constexpr (kBias) x = x + table(bias + c);
        return x;
      };
      int64_t c = 0;
      // Tables that do not stay in cache come in rows too short for the hardware to see a stream in time.
      const int64_t next = r + 1 < tile.rows ? 1 : 0;
      const auto step = [&](int64_t at, Vec<Real>& m) {
        if constexpr (kGain) __builtin_prefetch(gain + next * tile.gain.ld + at);
        if constexpr (kBias) __builtin_prefetch(bias + next * tile.bias.ld + at);
        const Vec<Real> x = logit(at, [](const Real* p) { return load(p); });
        store(logits + at, x);
        m = max<Real>(m, x);
      };
      for (; c + 2 * w <= whole; c += 2 * w) {
        step(c, most[0]);
        step(c + w, most[1]);
      }
      for (; c < whole; c += w) step(c, most[0]);
      if (rest > 0) {
        Vec<Real> x = logit(whole, [&](const Real* p) { return load_first(p, rest); });
        x = is_padding ? fill(-kInfinity<Real>) : x;
        store(logits + whole, x);
        most[0] = max<Real>(most[0], x);
      }

      const Real old_maximum = tile.maximum[r];
      const Real row_maximum = horizontal_max<Real>(max<Real>(most[0], most[1]));
      const Real maximum = row_maximum > old_maximum ? row_maximum : old_maximum;
      // A row that is -inf throughout stays empty: any finite offset makes its probabilities 0.
      const Real offset = maximum == -kInfinity<Real> ? Real{0} : maximum;
      Vec<Real> total[2] = {};
      Operand* out = tile.probabilities.row(r);
      const auto finish = [&](int64_t at, Vec<Real>& t, const auto& table) {
        Vec<Real> p = exp_vector(load(logits + at) - offset);
        t = t + p;
        if constexpr (kGate) p = p * table(gate + at);
        store_as<Real>(out + at, p);
      };
      const auto whole_table = [](const Real* p) { return load(p); };
      c = 0;
      for (; c + 2 * w <= whole; c += 2 * w) {
        finish(c, total[0], whole_table);
        finish(c + w, total[1], whole_table);
      }
      for (; c < whole; c += w) finish(c, total[0], whole_table);
      if (rest > 0) finish(whole, total[0], [&](const Real* p) { return load_first(p, rest); });

      const Real correction = old_maximum == -kInfinity<Real> ? Real{0} : exp_scalar<Real>(old_maximum - offset);
      tile.correction[r] = correction;
      tile.sum[r] = tile.sum[r] * correction + horizontal_sum<Real>(total[0] + total[1]);
      tile.maximum[r] = maximum;
    }
  }

  static void softmax(const SoftmaxTile<Operand, Real>& tile) {
    const auto with_gate = [&]<bool kGain, bool kBias>() {
      tile.gate ? softmax_rows<kGain, kBias, true>(tile) : softmax_rows<kGain, kBias, false>(tile);
    };
    if (tile.gain) {
      tile.bias ? with_gate.template operator()<true, true>() : with_gate.template operator()<true, false>();
    } else {
      tile.bias ? with_gate.template operator()<false, true>() : with_gate.template operator()<false, false>();
    }
  }

  static void scale_rows(Mat in, int64_t rows, int64_t columns, const Real* factor) {
    for (int64_t r = 0; r < rows; ++r) {
      if (factor[r] == Real{1}) continue;
      for (int64_t c = 0; c < columns; ++c) in.row(r)[c] *= factor[r];
    }
  }

  static void finish_rows(ConstMat in, int64_t rows, int64_t columns, const Real* maximum, const Real* sum, Source* out,
                          int64_t stride, Real* lse) {
    for (int64_t r = 0; r < rows; ++r) {
      const Real* from = in.row(r);
      Source* to = out + r * stride;
      const Real factor = sum[r] == Real{0} ? Real{0} : Real{1} / sum[r];
      int64_t c = 0;
      for (; c + kWidth<Real> <= columns; c += kWidth<Real>) store_as<Real>(to + c, load(from + c) * factor);
      for (; c < columns; ++c) to[c] = convert<Source>(from[c] * factor);
      lse[r] = maximum[r] + std::log(sum[r]);
    }
  }

  static void dot_rows(const Source* a, int64_t a_stride, const Source* b, int64_t b_stride, int64_t rows,
                       int64_t columns, Real* out) {
    for (int64_t r = 0; r < rows; ++r) {
      const Source* x = a + r * a_stride;
      const Source* y = b + r * b_stride;
      Vec<Real> total{};
      int64_t c = 0;
      for (; c + kWidth<Real> <= columns; c += kWidth<Real>)
        total = total + load_as<Real>(x + c) * load_as<Real>(y + c);
      Real sum = horizontal_sum<Real>(total);
      for (; c < columns; ++c) sum += to_real(x[c]) * to_real(y[c]);
      out[r] = sum;
    }
  }

  // Logits of a place in a transposed tile. Rounded, so that the largest logit of a row minus the row's
  // maximum is exactly 0: with huge logits the last bit is a visible part of a weight.
  template <class Tile>
  static Vec<Real> rounded_logit(const Tile& tile, int64_t k, int64_t c, Vec<Real> product) {
    Vec<Real> x = tile.gain ? product * load(tile.gain.row(k) + c) : product;
    x = rounded<Real>(x * tile.scale);
    return tile.bias ? x + load(tile.bias.row(k) + c) : x;
  }

  static void statistics(const StatisticsTile<Real>& tile) {
    constexpr int64_t w = kWidth<Real>;
    constexpr int64_t kSums = 4;  // of every fourth key each: shorter sums round less
    for (int64_t c = 0; c < tile.queries; c += w) {
      const auto logit = [&](int64_t k) { return rounded_logit(tile, k, c, load(tile.products.row(k) + c)); };
      const Vec<Real> old_maximum = load(tile.maximum + c);
      Vec<Real> maximum = old_maximum;
      for (int64_t k = 0; k < tile.keys; ++k) maximum = max<Real>(maximum, logit(k));
      // A row that is -inf throughout stays empty: any finite offset makes its probabilities 0.
      const Vec<Real> offset = maximum == -kInfinity<Real> ? Vec<Real>{} : maximum;
      Vec<Real> sum[kSums] = {};
      Vec<Real> delta[kSums] = {};
      for (int64_t k = 0; k < tile.keys; ++k) {
        const Vec<Real> p = exp_vector(logit(k) - offset);
        Vec<Real> dp = load(tile.dprobabilities.row(k) + c);
        if (tile.gate) dp = dp * load(tile.gate.row(k) + c);
        sum[k % kSums] = sum[k % kSums] + p;
        delta[k % kSums] = delta[k % kSums] + p * dp;
      }
      const Vec<Real> correction = exp_vector(old_maximum - offset);
      const auto total = [&](const Vec<Real>(&parts)[kSums]) { return (parts[0] + parts[1]) + (parts[2] + parts[3]); };
      store(tile.sum + c, load(tile.sum + c) * correction + total(sum));
      store(tile.delta + c, load(tile.delta + c) * correction + total(delta));
      store(tile.maximum + c, maximum);
    }
  }

  // What follows from one vector of probabilities.
  template <bool kGain, bool kGeneral>
  static void backward_one(const BackwardTile<Operand, Real>& tile, int64_t k, int64_t c, Vec<Real> p,
                           Vec<Real> product, Vec<Real> delta) {
    const Vec<Real> ungated = load(tile.dprobabilities.row(k) + c);
    Vec<Real> dp = ungated;
    Vec<Real> weight = p;
    if (kGeneral && tile.gate) {
      const Vec<Real> gate = load(tile.gate.row(k) + c);
      dp = dp * gate;
      weight = weight * gate;
    }
    const Vec<Real> dlogit = p * (dp - delta);
    if (tile.dgain) {
      Real* sum = tile.dgain.row(k) + c;
      store(sum, load(sum) + dlogit * product);
    }
    if (kGeneral && tile.dbias) {
      Real* sum = tile.dbias.row(k) + c;
      store(sum, load(sum) + dlogit);
    }
    if (kGeneral && tile.dgate) {
      Real* sum = tile.dgate.row(k) + c;
      store(sum, load(sum) + p * ungated);
    }
    store_as<Real>(tile.weights_out.row(k) + c, weight);
    Vec<Real> dproduct = dlogit * tile.scale;
    if constexpr (kGain) dproduct = dproduct * load(tile.gain.row(k) + c);
    store_as<Real>(tile.dproducts_out.row(k) + c, dproduct);
  }

  template <bool kGain, bool kGeneral>
  static void backward_rows(const BackwardTile<Operand, Real>& tile) {
    for (int64_t k = 0; k < tile.keys; ++k) {
      for (int64_t c = 0; c < tile.queries; c += kWidth<Real>) {
        const Vec<Real> product = load(tile.products.row(k) + c);
        Vec<Real> p;
        if (kGeneral && tile.factor != nullptr) {
          p = exp_vector(rounded_logit(tile, k, c, product) - load(tile.shift + c)) * load(tile.factor + c);
        } else {
          Vec<Real> logit = product;
          if constexpr (kGain) logit = logit * load(tile.gain.row(k) + c);
          Vec<Real> offset = -load(tile.shift + c);
          if (kGeneral && tile.bias) offset = offset + load(tile.bias.row(k) + c);
          p = exp_vector(logit * tile.scale + offset);
        }
        backward_one<kGain, kGeneral>(tile, k, c, p, product, load(tile.delta + c));
      }
    }
  }

  // All keys at once: the sums that make P and delta are taken here. Strips of columns stay in cache meanwhile.
  template <bool kGain, bool kGeneral>
  static void backward_whole(const BackwardTile<Operand, Real>& tile) {
    for (int64_t c = 0; c < tile.queries; c += kWidth<Real>) {
      const auto logit = [&](int64_t k) {
        Vec<Real> x = load(tile.products.row(k) + c);
        if constexpr (kGain) x = x * load(tile.gain.row(k) + c);
        x = rounded<Real>(x * tile.scale);
        return kGeneral && tile.bias ? x + load(tile.bias.row(k) + c) : x;
      };
      Vec<Real> shift;
      if (tile.shift != nullptr) {
        shift = load(tile.shift + c);
      } else {
        shift = fill(-kInfinity<Real>);
        for (int64_t k = 0; k < tile.keys; ++k) shift = max<Real>(shift, logit(k));
        shift = shift == -kInfinity<Real> ? Vec<Real>{} : shift;  // a row that is -inf throughout: P is 0 at any shift
      }
      Vec<Real> sum[2] = {};
      Vec<Real> delta[2] = {};
      const auto add = [&](int64_t k, int part) {
        const Vec<Real> p = exp_vector(logit(k) - shift);
        store(tile.probabilities.row(k) + c, p);
        Vec<Real> dp = load(tile.dprobabilities.row(k) + c);
        if (kGeneral && tile.gate) dp = dp * load(tile.gate.row(k) + c);
        sum[part] = sum[part] + p;
        delta[part] = delta[part] + p * dp;
      };
      int64_t k = 0;
      for (; k + 2 <= tile.keys; k += 2) {
        add(k, 0);
        add(k + 1, 1);
      }
      if (k < tile.keys) add(k, 0);
      const Vec<Real> total = sum[0] + sum[1];
      const auto is_empty = total == Real{0};
      const Vec<Real> factor = is_empty ? Vec<Real>{} : Real{1} / (is_empty ? fill(Real{1}) : total);
      const Vec<Real> mean = (delta[0] + delta[1]) / (is_empty ? fill(Real{1}) : total);
      for (k = 0; k < tile.keys; ++k) {
        backward_one<kGain, kGeneral>(tile, k, c, load(tile.probabilities.row(k) + c) * factor,
                                      load(tile.products.row(k) + c), mean);
      }
    }
  }

  static void backward(const BackwardTile<Operand, Real>& tile) {
    const auto run = [&]<bool kGain, bool kGeneral>() {
      tile.probabilities ? backward_whole<kGain, kGeneral>(tile) : backward_rows<kGain, kGeneral>(tile);
    };
    const bool is_general = tile.factor != nullptr || tile.bias || tile.gate || tile.dbias || tile.dgate;
    if (is_general) {
      tile.gain ? run.template operator()<true, true>() : run.template operator()<false, true>();
    } else {
      tile.gain ? run.template operator()<true, false>() : run.template operator()<false, false>();
    }
  }

  static void store_transposed(ConstMat in, int64_t rows, int64_t columns, Source* out, int64_t stride) {
    transpose_blocks<Real>(
        columns, rows, [&](int64_t c, int64_t r) { return load(in.row(c) + r); },
        [&](int64_t r, int64_t c, Vec<Real> v) { store_as<Real>(out + r * stride + c, v); },
        [&](int64_t c, int64_t r) { out[r * stride + c] = convert<Source>(in.row(c)[r]); });
  }

  static void store_sum(const Real* parts, int64_t count, int64_t part_stride, ConstMat first, int64_t rows,
                        int64_t columns, Source* out, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) {
      const auto one = [&](int64_t c) {
        Real sum = first ? first.row(r)[c] : Real{0};
        for (int64_t part = 0; part < count; ++part) sum += parts[part * part_stride + r * columns + c];
        return sum;
      };
      int64_t c = 0;
      for (; c + kWidth<Real> <= columns; c += kWidth<Real>) {
        Vec<Real> sum = first ? load(first.row(r) + c) : Vec<Real>{};
        for (int64_t part = 0; part < count; ++part) sum = sum + load(parts + part * part_stride + r * columns + c);
        store_as<Real>(out + r * stride + c, sum);
      }
      for (; c < columns; ++c) out[r * stride + c] = convert<Source>(one(c));
    }
  }

  static void transpose_table(ConstMat in, int64_t rows, int64_t columns, int64_t padded, Mat out) {
    transpose_blocks<Real>(
        rows, columns,
        [&](int64_t r, int64_t c) {
          __builtin_prefetch(in.row(r) + c + 4 * kWidth<Real>);
          return load(in.row(r) + c);
        },
        [&](int64_t c, int64_t r, Vec<Real> v) { store(out.row(c) + r, v); },
        [&](int64_t r, int64_t c) { out.row(c)[r] = in.row(r)[c]; });
    for (int64_t c = 0; c < columns && rows < padded; ++c) {
      for (int64_t r = rows; r < padded; ++r) out.row(c)[r] = Real{0};
    }
  }

  static void sum_transposed_table(ConstMat in, int64_t parts, int64_t part_stride, int64_t rows, int64_t columns,
                                   Real factor, bool accumulate, Mat out) {
    transpose_blocks<Real>(
        columns, rows,
        [&](int64_t c, int64_t r) {
          Vec<Real> sum = load(in.row(c) + r);
          for (int64_t part = 1; part < parts; ++part) sum = sum + load(in.row(c) + r + part * part_stride);
          return sum * factor;
        },
        [&](int64_t r, int64_t c, Vec<Real> v) {
          Real* to = out.row(r) + c;
          if (accumulate) {
            store(to, load(to) + v);
          } else {
            store_once(to, v);
          }
        },
        [&](int64_t c, int64_t r) {
          Real sum = in.row(c)[r];
          for (int64_t part = 1; part < parts; ++part) sum += in.row(c)[r + part * part_stride];
          Real& to = out.row(r)[c];
          to = accumulate ? to + sum * factor : sum * factor;
        });
    finish_stores();
  }

  static void add(const Real* in, int64_t count, bool accumulate, Real* out) {
    if (!accumulate) {
      std::memcpy(out, in, count * sizeof(Real));
      return;
    }
    for (int64_t i = 0; i < count; ++i) out[i] += in[i];
  }

  static constexpr RowOps<Source, Operand, Real> kTable = {
      pack,     pack_transposed,  softmax,   scale_rows,      finish_rows,          dot_rows, statistics,
      backward, store_transposed, store_sum, transpose_table, sum_transposed_table, add};
};

}  // namespace

const AllRowOps& VIOLIN_ROW_OPS_NAME() {
  static constexpr AllRowOps kAll = {
      Implementation<float, float, float>::kTable, Implementation<double, double, double>::kTable,
      Implementation<Float16, float, float>::kTable, Implementation<BFloat16, float, float>::kTable,
      Implementation<BFloat16, BFloat16, float>::kTable};
  return kAll;
}

}  // namespace violin::kernels::cpu
