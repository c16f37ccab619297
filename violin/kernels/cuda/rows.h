// Launchers for layer norm and for sums over the rows of a matrix on CUDA. Rows are contiguous; the number of columns
// is a multiple of 4. No synchronisation, no allocation; the same bits on every run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "violin/kernels/attention.h"

namespace violin::kernels::cuda {

constexpr std::int64_t kMostNormColumns = 1024;

// y = (x - mean) rstd o weight + bias, per row; weight and bias in float32.
struct LayerNormForward {
  std::int64_t rows = 0, columns = 0;
  double eps = 0;
  DType x_type = DType::kFloat32, y_type = DType::kFloat32;  // y_type: float32, or the same or another 16-bit type
  const void* x = nullptr;
  const float* weight = nullptr;
  const float* bias = nullptr;
  void* y = nullptr;
  float* mean = nullptr;  // [rows]
  float* rstd = nullptr;
};

struct LayerNormBackward {
  std::int64_t rows = 0, columns = 0;
  DType x_type = DType::kFloat32, y_type = DType::kFloat32;
  const void* dy = nullptr;  // y_type
  const void* x = nullptr;   // x_type
  const float* mean = nullptr;
  const float* rstd = nullptr;
  const float* weight = nullptr;
  void* dx = nullptr;        // x_type
  float* dweight = nullptr;  // [columns]
  float* dbias = nullptr;
};

struct ColumnSums {
  std::int64_t rows = 0, columns = 0;
  DType type = DType::kFloat32;
  const void* x = nullptr;
  float* sums = nullptr;  // [columns]
};

cudaError_t launch(const LayerNormForward& p, cudaStream_t stream);
std::size_t scratch_bytes(const LayerNormBackward& p);
cudaError_t launch(const LayerNormBackward& p, void* scratch, cudaStream_t stream);
std::size_t scratch_bytes(const ColumnSums& p);
cudaError_t launch(const ColumnSums& p, void* scratch, cudaStream_t stream);

}  // namespace violin::kernels::cuda
