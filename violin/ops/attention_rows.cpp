// Rows of the attention map from the saved log-sum-exp, in plain tensor operations and without gradients.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "violin/ops/checks.h"
#include "violin/ops/library.h"

namespace violin::ops {
namespace {

// [B,h,R,Nk] in float32, or float64 beside float64.
at::Tensor rows_any(const at::Tensor& q, const at::Tensor& k, const at::Tensor& lse, const at::Tensor& rows,
                    const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                    std::optional<double> scale) {
  check_rows(q, k, lse, rows, gain, bias, gate);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // lse is of the full logits
  const at::ScalarType type = accumulate_type(q.scalar_type());
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  // [B/G,G,...] against [G,h or 1,R,Nk]: image b meets table b mod G.
  const auto combine = [&](const at::Tensor& weights, const MaybeTensor& maybe_table, bool add) {
    at::Tensor table = or_undefined(maybe_table);
    if (!table.defined()) return weights;
    if (table.dim() == 3) table = table.unsqueeze(0);
    table = table.index_select(2, rows).to(type);
    const at::Tensor grouped = weights.unflatten(0, {weights.size(0) / table.size(0), table.size(0)});
    return (add ? grouped + table : grouped * table).flatten(0, 1);
  };
  at::Tensor weights = at::matmul(q.index_select(2, rows).to(type), k.to(type).transpose(2, 3)) * factor;
  weights = combine(combine(weights, gain, false), bias, true);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor sums = lse.index_select(2, rows).unsqueeze(-1);
  weights = (weights - sums.masked_fill(sums == -kInfinity, kInfinity)).exp();
  return combine(weights, gate, false);
}

at::Tensor rows_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& lse, const at::Tensor& rows,
                    const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                    std::optional<double> scale) {
  check_rows(q, k, lse, rows, gain, bias, gate);
  if (rows.numel() > 0) {
    const std::int64_t lowest = rows.min().item<std::int64_t>(), highest = rows.max().item<std::int64_t>();
    TORCH_CHECK_VALUE(lowest >= 0 && highest < q.size(2), "violin::attention_rows: rows reach from ", lowest, " to ",
                      highest, "; expected query tokens from 0 to ", q.size(2) - 1);
  }
  return rows_any(q, k, lse, rows, gain, bias, gate, scale);
}

at::Tensor rows_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& lse, const at::Tensor& rows,
                     const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double>) {
  check_rows(q, k, lse, rows, gain, bias, gate);
  return at::empty_symint({q.sym_size(0), q.sym_size(1), rows.sym_size(0), k.sym_size(2)},
                          q.options().dtype(accumulate_type(q.scalar_type())));
}

TORCH_LIBRARY_IMPL(violin, CPU, library) {
  library.impl("attention_rows", rows_cpu);
}
TORCH_LIBRARY_IMPL(violin, Meta, library) {
  library.impl("attention_rows", rows_meta);
}
TORCH_LIBRARY_IMPL(violin, CompositeExplicitAutograd, library) {
  library.impl("attention_rows", rows_any);
}

}  // namespace
}  // namespace violin::ops
