// Layer norm, and sums over rows, on a GPU: what torch's own kernels take a quarter of a small model's training step
// for. Inside of other operators' derivatives; nothing here is differentiable itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace violin::ops {

// Whether the functions below take rows of this tensor: on a GPU, of at most 1024 columns, a multiple of 4.
bool has_row_kernels(const at::Tensor& x);

// (x - mean) rstd o weight + bias over the last dimension, as `type`: x's own, or a 16-bit one where x is float32. Also
// mean and rstd, one per row.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor& x, const at::Tensor& weight,
                                                          const at::Tensor& bias, double eps, at::ScalarType type);
// Gradients of x, weight and bias; the last two in float32.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                                                   const at::Tensor& mean, const at::Tensor& rstd,
                                                                   const at::Tensor& weight);
// Over all but the last dimension, in float32; any number of columns that is a multiple of 4.
at::Tensor column_sums(const at::Tensor& x);

}  // namespace violin::ops
