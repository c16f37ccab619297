// Everything elementwise that attention does to a tile, as a table of functions with one implementation per instruction
// set (row_ops_impl.h, compiled three times). The drivers in attention_forward.cpp and attention_backward.cpp see only
// this.
//
// Types: Source is what the tensors hold, Operand what tile products read (Source itself, or float where the hardware
// has no products of the Source type), Real what is accumulated and what tables hold.
#pragma once

#include <cstdint>

#include "violin/kernels/cpu/level.h"

namespace violin::kernels::cpu {

using std::int64_t;

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// Query tiles of the backward pass, and everything laid out beside them, are padded to a multiple of this.
inline constexpr int64_t kLane = 16;

// A row-major matrix with a leading dimension. Rows of tables end where their columns end: nothing may be read behind
// them.
template <class T>
struct Matrix {
  T* data = nullptr;
  int64_t ld = 0;

  T* row(int64_t i) const { return data + i * ld; }
  explicit operator bool() const { return data != nullptr; }
};

// One tile of logits becomes one tile of (unnormalised) probabilities, against a running maximum and sum of each row.
template <class Operand, class Real>
struct SoftmaxTile {
  int64_t rows = 0;
  int64_t columns = 0;
  Matrix<Real> logits;            // QK^T in, finished logits out; rows padded to kLane
  Matrix<Operand> probabilities;  // may be the same memory as logits when the types agree
  Matrix<const Real> gain, bias, gate;
  Real scale = 1;
  // [rows]; before the first tile -inf and 0. `correction` is what earlier partial results must
  // be multiplied by.
  Real* maximum = nullptr;
  Real* sum = nullptr;
  Real* correction = nullptr;
};

// What the softmax of each row is made of, gathered from one tile after another, transposed as in BackwardTile.
template <class Real>
struct StatisticsTile {
  int64_t keys = 0;
  int64_t queries = 0;                  // padded
  Matrix<const Real> products;          // A^T = (QK^T)^T
  Matrix<const Real> dprobabilities;    // (dO V^T)^T
  Matrix<const Real> gain, bias, gate;  // transposed
  Real scale = 1;
  // [queries]; before the first tile -inf, 0 and 0. The largest logit m, sum exp(logit - m), and the same sum
  // with the gradient of each probability as a factor.
  Real* maximum = nullptr;
  Real* sum = nullptr;
  Real* delta = nullptr;
};

// One tile of the backward pass, transposed: a row per key, a column per query, columns padded to kLane.
template <class Operand, class Real>
struct BackwardTile {
  int64_t keys = 0;
  int64_t queries = 0;                  // padded
  Matrix<Real> products;                // A^T = (QK^T)^T
  Matrix<Real> dprobabilities;          // (dO V^T)^T
  Matrix<Operand> weights_out;          // (P o gate)^T, for dV; may be the memory of dprobabilities
  Matrix<Operand> dproducts_out;        // dA^T, for dQ and dK; may be the memory of products
  Matrix<const Real> gain, bias, gate;  // transposed
  Matrix<Real> dgain, dbias, dgate;     // transposed sums, added to; dgain lacks the factor scale
  Real scale = 1;
  // [queries] P = factor * exp(logit - shift): the log-sum-exp and no factor, or the maximum and 1 / sum of
  // StatisticsTile. The shift is +inf where the row has no weight at all.
  const Real* shift = nullptr;
  const Real* factor = nullptr;
  const Real* delta = nullptr;  // [queries] rowsum(P o dP)
  // Where given, as memory of [keys, queries], these are all keys that there are: factor and delta are found on the
  // way, and so is the shift where it is null.
  Matrix<Real> probabilities;
};

template <class Source, class Operand, class Real>
struct RowOps {
  // out[r, c] = in[r, c]
  void (*pack)(const Source* in, int64_t stride, int64_t rows, int64_t columns, Matrix<Operand> out);
  // out[c, r] = in[r, c], and zero for rows <= r < padded
  void (*pack_transposed)(const Source* in, int64_t stride, int64_t rows, int64_t columns, int64_t padded,
                          Matrix<Operand> out);
  void (*softmax)(const SoftmaxTile<Operand, Real>& tile);
  // in[r, :] *= factor[r]
  void (*scale_rows)(Matrix<Real> in, int64_t rows, int64_t columns, const Real* factor);
  // out[r, :] = in[r, :] / sum[r], 0 where the sum is 0; lse[r] = maximum[r] + log(sum[r])
  void (*finish_rows)(Matrix<const Real> in, int64_t rows, int64_t columns, const Real* maximum, const Real* sum,
                      Source* out, int64_t stride, Real* lse);
  // out[r] = sum_c a[r, c] b[r, c]
  void (*dot_rows)(const Source* a, int64_t a_stride, const Source* b, int64_t b_stride, int64_t rows, int64_t columns,
                   Real* out);
  void (*statistics)(const StatisticsTile<Real>& tile);
  void (*backward)(const BackwardTile<Operand, Real>& tile);
  // out[r, c] = in[c, r]
  void (*store_transposed)(Matrix<const Real> in, int64_t rows, int64_t columns, Source* out, int64_t stride);
  // out[r, c] = sum over parts of in[part * part_stride + r * columns + c], plus what is in `first` where given
  void (*store_sum)(const Real* parts, int64_t count, int64_t part_stride, Matrix<const Real> first, int64_t rows,
                    int64_t columns, Source* out, int64_t stride);
  // out[c, r] = in[r, c], zero for rows <= r < padded
  void (*transpose_table)(Matrix<const Real> in, int64_t rows, int64_t columns, int64_t padded, Matrix<Real> out);
  // out[r, c] = factor * sum over parts of in[part * part_stride + c * in.ld + r], added to out when `accumulate`
  void (*sum_transposed_table)(Matrix<const Real> in, int64_t parts, int64_t part_stride, int64_t rows, int64_t columns,
                               Real factor, bool accumulate, Matrix<Real> out);
  // out += in (or out = in), count elements
  void (*add)(const Real* in, int64_t count, bool accumulate, Real* out);
};

// The type combinations that exist.
struct AllRowOps {
  RowOps<float, float, float> f32;
  RowOps<double, double, double> f64;
  RowOps<Float16, float, float> f16;
  RowOps<BFloat16, float, float> bf16;
  RowOps<BFloat16, BFloat16, float> bf16_products;  // where tile products take bfloat16 as it is
};
const AllRowOps& row_ops(Level level);

// One per compiled level, behind row_ops().
const AllRowOps& row_ops_plain();
const AllRowOps& row_ops_avx2();
const AllRowOps& row_ops_avx512();

}  // namespace violin::kernels::cpu
