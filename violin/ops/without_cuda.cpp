// Without CUDA kernels: nothing is available.
#include <c10/util/Exception.h>

#include "violin/ops/device.h"
#include "violin/ops/rows.h"

namespace violin::ops {

bool is_captured(const c10::Device&) {
  return false;
}

bool has_row_kernels(const at::Tensor&) {
  return false;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                          double, at::ScalarType) {
  TORCH_CHECK(false, "this build has no CUDA kernels");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(const at::Tensor&, const at::Tensor&,
                                                                   const at::Tensor&, const at::Tensor&,
                                                                   const at::Tensor&) {
  TORCH_CHECK(false, "this build has no CUDA kernels");
}

at::Tensor column_sums(const at::Tensor&) {
  TORCH_CHECK(false, "this build has no CUDA kernels");
}

}  // namespace violin::ops
