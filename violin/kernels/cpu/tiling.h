// How attention is cut into tiles and tasks. Depends on the shape alone, never on the number of threads, so that
// results have the same bits on every machine that uses the same instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "violin/kernels/cpu/attention.h"
#include "violin/kernels/cpu/row_ops.h"

namespace violin::kernels::cpu {

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline int64_t round_up(int64_t a, int64_t unit) {
  return divide_up(a, unit) * unit;
}

// [0, length) cut into `count` nearly equal pieces whose borders are multiples of `unit`.
class Tiles {
 public:
  Tiles(int64_t length, int64_t largest, int64_t unit)
      : length_(length), unit_(unit), units_(divide_up(length, unit)), count_(divide_up(units_, largest / unit)) {}

  int64_t count() const { return count_; }
  int64_t begin(int64_t tile) const { return tile * units_ / count_ * unit_; }
  int64_t size(int64_t tile) const { return std::min(begin(tile + 1), length_) - begin(tile); }
  int64_t padded(int64_t tile) const { return begin(tile + 1) - begin(tile); }
  int64_t largest() const { return count_ == 0 ? 0 : divide_up(units_, count_) * unit_; }
  int64_t padded_length() const { return units_ * unit_; }

 private:
  int64_t length_, unit_, units_, count_;
};

// Splits `length` items into `count` runs; run i is [begin(i), begin(i + 1)).
inline int64_t run_begin(int64_t length, int64_t count, int64_t i) {
  return i * length / count;
}

// A task count that keeps many cores busy and costs little where there are few.
inline constexpr int64_t kTasksWanted = 16;

// Hands out 64-byte aligned pieces of a scratch buffer; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Where image b, head h of a tensor begins, and the rows of a table of group g, head h.
template <class T, class Void>
T* at(const Heads<Void>& tensor, int64_t b, int64_t h, int64_t token = 0) {
  return static_cast<T*>(tensor.data) + b * tensor.batch + h * tensor.head + token * tensor.token;
}
template <class Real>
Matrix<const Real> at(const Table& table, int64_t g, int64_t h, int64_t row, int64_t column) {
  if (table.data == nullptr) return {};
  return {static_cast<const Real*>(table.data) + g * table.group + h * table.head + row * table.row + column,
          table.row};
}

// Calls body.template operator()<Source, Operand, Real>(ops, product) for the types of a call.
template <class Body>
void with_types(DType dtype, Level level, const MatMul& matmul, const Body& body) {
  const AllRowOps& all = row_ops(level);
  switch (dtype) {
    case DType::kFloat32:
      return body(all.f32, matmul.f32);
    case DType::kFloat64:
      return body(all.f64, matmul.f64);
    case DType::kFloat16:
      return body(all.f16, matmul.f32);
    case DType::kBFloat16:
      if (matmul.bf16 != nullptr) return body(all.bf16_products, matmul.bf16);
      return body(all.bf16, matmul.f32);
  }
}

}  // namespace violin::kernels::cpu
