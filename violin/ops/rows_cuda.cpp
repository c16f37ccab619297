#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "violin/kernels/cuda/rows.h"
#include "violin/ops/attention_backend.h"
#include "violin/ops/device.h"
#include "violin/ops/device_cuda.h"
#include "violin/ops/path.h"
#include "violin/ops/rows.h"

namespace violin::ops {
namespace {

namespace cuda = kernels::cuda;

// In one piece, and aligned for loads of four numbers.
at::Tensor whole(const at::Tensor& x) {
  const at::Tensor dense = x.contiguous();
  return reinterpret_cast<std::uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

at::Tensor in_float(const at::Tensor& x) {
  return whole(x.to(at::kFloat));
}

}  // namespace

bool has_row_kernels(const at::Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  return on_gpu(x) && x.dim() > 0 && x.size(-1) % 4 == 0 && x.size(-1) <= cuda::kMostNormColumns &&
         (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) &&
         choose_path(at::kCUDA) != Path::kReference;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor& given, const at::Tensor& weight,
                                                          const at::Tensor& bias, double eps, at::ScalarType type) {
  const c10::DeviceGuard guard(given.device());
  const at::Tensor x = whole(given), w = in_float(weight), b = in_float(bias);
  cuda::LayerNormForward p;
  p.columns = x.size(-1);
  p.rows = p.columns == 0 ? 0 : x.numel() / p.columns;
  const at::Tensor y = at::empty(x.sizes(), x.options().dtype(type));
  const at::Tensor mean = at::empty({p.rows}, x.options().dtype(at::kFloat));
  const at::Tensor rstd = at::empty_like(mean);
  p.eps = eps;
  p.x_type = kernel_type(x.scalar_type());
  p.y_type = kernel_type(type);
  p.x = x.const_data_ptr();
  p.weight = w.const_data_ptr<float>();
  p.bias = b.const_data_ptr<float>();
  p.y = y.mutable_data_ptr();
  p.mean = mean.mutable_data_ptr<float>();
  p.rstd = rstd.mutable_data_ptr<float>();
  check_launch(cuda::launch(p, current_stream(x)), "layer norm");
  return {y, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(const at::Tensor& gradient, const at::Tensor& given,
                                                                   const at::Tensor& mean, const at::Tensor& rstd,
                                                                   const at::Tensor& weight) {
  const c10::DeviceGuard guard(given.device());
  const at::Tensor x = whole(given), dy = whole(gradient), w = in_float(weight);
  const at::Tensor dx = at::empty(x.sizes(), x.options());
  cuda::LayerNormBackward p;
  p.columns = x.size(-1);
  p.rows = mean.numel();
  const at::Tensor dweight = at::empty({p.columns}, mean.options()), dbias = at::empty_like(dweight);
  p.x_type = kernel_type(x.scalar_type());
  p.y_type = kernel_type(dy.scalar_type());
  p.dy = dy.const_data_ptr();
  p.x = x.const_data_ptr();
  p.mean = mean.const_data_ptr<float>();
  p.rstd = rstd.const_data_ptr<float>();
  p.weight = w.const_data_ptr<float>();
  p.dx = dx.mutable_data_ptr();
  p.dweight = dweight.mutable_data_ptr<float>();
  p.dbias = dbias.mutable_data_ptr<float>();
  const at::Tensor scratch = scratch_for(cuda::scratch_bytes(p), x);
  check_launch(cuda::launch(p, scratch.mutable_data_ptr(), current_stream(x)), "layer norm's gradient");
  return {dx, dweight, dbias};
}

at::Tensor column_sums(const at::Tensor& given) {
  const c10::DeviceGuard guard(given.device());
  const at::Tensor x = whole(given);
  cuda::ColumnSums p;
  p.columns = x.size(-1);
  p.rows = p.columns == 0 ? 0 : x.numel() / p.columns;
  const at::Tensor sums = at::empty({p.columns}, x.options().dtype(at::kFloat));
  p.type = kernel_type(x.scalar_type());
  p.x = x.const_data_ptr();
  p.sums = sums.mutable_data_ptr<float>();
  const at::Tensor scratch = scratch_for(cuda::scratch_bytes(p), x);
  check_launch(cuda::launch(p, scratch.mutable_data_ptr(), current_stream(x)), "sums over rows");
  return sums;
}

}  // namespace violin::ops
