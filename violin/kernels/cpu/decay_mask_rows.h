// The row loops of the decay mask, as a pair of functions with one implementation per instruction set
// (decay_mask_rows_impl.h, compiled three times), and the layout of memory that they share with decay_mask.cpp.
#pragma once

#include <cstdint>

#include "violin/kernels/cpu/level.h"
#include "violin/kernels/decay_mask.h"

namespace violin::kernels::cpu {

inline constexpr std::int64_t kMaskTile = 16;  // tokens that are handled together
inline constexpr std::int64_t kMaskRows = 8;   // rows of the mask per task of the forward pass

// How a call is cut up, and where its scratch lies. Real: float or double, as the mask; tables of powers are Real in
// the forward pass and double in the backward pass. Plain data: nothing here may be compiled for one instruction set
// and linked into another's code.
struct DecayMaskLayout {
  std::int64_t lanes = 0;    // heads per block: 4, 8 or 16, the last one of them padded
  std::int64_t blocks = 0;   // of heads
  std::int64_t axes = 0;     // that have a decay of their own: A, or 1 when the distances of all axes are added first
  std::int64_t side = 0;     // P + N
  std::int64_t rows = 0;     // G * (P + N)
  std::int64_t entries = 0;  // of a table: powers for distances from 0 on; 0 where powers are taken per element
  bool divide = false;       // the sum over curves is divided by their number at the end

  // Partial sums of one backward task: per curve, a histogram [entries, lanes], or [1 + axes, lanes] with the sum over
  // pairs of dM times the derivative by the weight, and the same times the distance along each axis; then the prefix
  // [lanes].
  bool histogram = false;
  std::int64_t curve_sums = 0;  // in lanes
  std::int64_t sums = 0;        // of a task, in doubles
  std::int64_t runs = 0;        // tasks per block of heads; each takes a run of rows

  // Shared by all tasks, heads innermost.
  double* decay = nullptr;       // [blocks, C, axes, lanes]
  double* weight = nullptr;      // [blocks, C, lanes]
  double* log_weight = nullptr;  // [blocks, C, lanes]: log |weight|
  void* powers = nullptr;        // [blocks, C, axes, entries, lanes]
  double* partial = nullptr;     // [blocks, runs, sums]

  // Of the thread.
  std::int32_t* distance = nullptr;  // [C, axes, kMaskTile]
  double* exponentials = nullptr;    // [C, lanes]
};

struct DecayMaskRows {
  // Task = (block of heads, run of kMaskRows rows).
  void (*forward)(const DecayMaskForward& call, const DecayMaskLayout& layout, std::int64_t begin, std::int64_t end);
  // Task = (block of heads, run of rows).
  void (*backward)(const DecayMaskBackward& call, const DecayMaskLayout& layout, std::int64_t begin, std::int64_t end);
};
const DecayMaskRows& decay_mask_rows(Level level);

// One per compiled level, behind decay_mask_rows().
const DecayMaskRows& decay_mask_rows_plain();
const DecayMaskRows& decay_mask_rows_avx2();
const DecayMaskRows& decay_mask_rows_avx512();

}  // namespace violin::kernels::cpu
