// Fused attention on the CPU: forward and backward of violin/kernels/attention.h over tiles that stay in cache.
//
// A computation is a Work: a few phases whose tasks are independent of each other. The caller owns threads and memory:
// it runs all tasks of a phase, in any order and on any threads, before the next phase begins. The tasks depend on the
// shape alone and every sum has a fixed order, so the result has the same bits whatever the number of threads.
#pragma once

#include <cstdint>

#include "violin/kernels/attention.h"
#include "violin/kernels/cpu/level.h"
#include "violin/kernels/cpu/row_ops.h"

namespace violin::kernels::cpu {

// Tile products, row-major with leading dimensions in elements: C[m,n] = A[m,k] B[k,n], plus C when `accumulate`.
// The kernels bring none of their own; the BLAS inside of LibTorch is handed in.
struct MatMul {
  template <class E, class T>
  using Function = void (*)(std::int64_t m, std::int64_t n, std::int64_t k, const E* a, std::int64_t lda, const E* b,
                            std::int64_t ldb, T* c, std::int64_t ldc, bool accumulate);
  Function<float, float> f32 = nullptr;
  Function<double, double> f64 = nullptr;
  Function<BFloat16, float> bf16 = nullptr;  // null where the hardware has no bfloat16 products
};

struct Work {
  int phases = 0;
  std::int64_t tasks[4] = {0, 0, 0, 0};
  std::int64_t thread_scratch_bytes = 0;  // for each thread that runs tasks
  std::int64_t shared_scratch_bytes = 0;  // one for all, kept between phases
};

// Both aligned to 64 bytes.
struct Scratch {
  void* shared = nullptr;
  void* thread = nullptr;
};

Work plan(const AttentionForward& call, const MatMul& matmul);
Work plan(const AttentionBackward& call, const MatMul& matmul);

// Runs tasks [begin, end) of one phase.
void run(const AttentionForward& call, Level level, const MatMul& matmul, int phase, std::int64_t begin,
         std::int64_t end, Scratch scratch);
void run(const AttentionBackward& call, Level level, const MatMul& matmul, int phase, std::int64_t begin,
         std::int64_t end, Scratch scratch);

}  // namespace violin::kernels::cpu
