// oneDNN's batch-reduce product (brgemm) generates a kernel per shape, keeps it, and gives the same bits at every
// alignment. It exists on x86 from some instruction set on; elsewhere, and for float64, the BLAS is called.
#include "violin/ops/matmul_cpu.h"

#include <ATen/native/CPUBlas.h>

#include <array>
#include <cmath>

extern "C" {
void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k, const float* alpha,
            const float* a, const int* lda, const float* b, const int* ldb, const float* beta, float* c,
            const int* ldc);
void dgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k, const double* alpha,
            const double* a, const int* lda, const double* b, const int* ldb, const double* beta, double* c,
            const int* ldc);
// MKL's; absent where torch has another BLAS, and then null.
__attribute__((weak)) void gemm_bf16bf16f32_(const char* transa, const char* transb, const int* m, const int* n,
                                             const int* k, const float* alpha, const std::uint16_t* a, const int* lda,
                                             const std::uint16_t* b, const int* ldb, const float* beta, float* c,
                                             const int* ldc);
}

namespace violin::ops {
namespace {

// BLAS is column-major: C^T = B^T A^T is the row-major product.
template <class E, class T, class Gemm>
void blas(Gemm gemm, std::int64_t m, std::int64_t n, std::int64_t k, const E* a, std::int64_t lda, const E* b,
          std::int64_t ldb, T* c, std::int64_t ldc, bool accumulate) {
  const int rows = static_cast<int>(m), columns = static_cast<int>(n), depth = static_cast<int>(k);
  const int stride_a = static_cast<int>(lda), stride_b = static_cast<int>(ldb), stride_c = static_cast<int>(ldc);
  const T one = 1, beta = accumulate ? 1 : 0;
  gemm("N", "N", &columns, &rows, &depth, &one, b, &stride_b, a, &stride_a, &beta, c, &stride_c);
}

void f32_blas(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
              std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  blas(sgemm_, m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

void f32_brgemm(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
                std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, /*is_vnni=*/false);
}

void f64_blas(std::int64_t m, std::int64_t n, std::int64_t k, const double* a, std::int64_t lda, const double* b,
              std::int64_t ldb, double* c, std::int64_t ldc, bool accumulate) {
  blas(dgemm_, m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

void bf16_blas(std::int64_t m, std::int64_t n, std::int64_t k, const kernels::cpu::BFloat16* a, std::int64_t lda,
               const kernels::cpu::BFloat16* b, std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  blas(gemm_bf16bf16f32_, m, n, k, reinterpret_cast<const std::uint16_t*>(a), lda,
       reinterpret_cast<const std::uint16_t*>(b), ldb, c, ldc, accumulate);
}

// Elsewhere MKL emulates these products, slower than float32 would be. (oneDNN's own, through brgemm, wants the tile
// registers of newer processors, which not every virtual machine that reports them lets a program use.)
bool has_bf16() {
#ifdef __x86_64__
  return gemm_bf16bf16f32_ != nullptr && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Whether brgemm runs here, and is right: torch has it on some processors only and throws elsewhere.
bool has_brgemm() {
  constexpr std::int64_t kSize = 16;
  alignas(64) std::array<float, kSize * kSize> a, b, c;
  for (std::int64_t i = 0; i < kSize * kSize; ++i) {
    a[i] = static_cast<float>(i % 7);
    b[i] = i % (kSize + 1) == 0 ? 2.0F : 0.0F;
    c[i] = -1;
  }
  try {
    f32_brgemm(kSize, kSize, kSize, a.data(), kSize, b.data(), kSize, c.data(), kSize, false);
  } catch (const std::exception&) {
    return false;
  }
  for (std::int64_t i = 0; i < kSize * kSize; ++i) {
    if (c[i] != 2 * a[i]) return false;
  }
  return true;
}

}  // namespace

const kernels::cpu::MatMul& cpu_matmul() {
  static const kernels::cpu::MatMul functions = [] {
    kernels::cpu::MatMul matmul{};
    matmul.f32 = has_brgemm() ? f32_brgemm : f32_blas;
    matmul.f64 = f64_blas;
    if (has_bf16()) matmul.bf16 = bf16_blas;
    return matmul;
  }();
  return functions;
}

}  // namespace violin::ops
