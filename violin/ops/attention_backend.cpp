#include "violin/ops/attention_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "violin/ops/checks.h"

namespace violin::ops {
namespace {

// [G,h or 1,Nq,Nk] as kernels take it.
at::Tensor kernel_table(const MaybeTensor& maybe_table, at::ScalarType type) {
  at::Tensor table = or_undefined(maybe_table);
  if (!table.defined()) return {};
  if (table.dim() == 3) table = table.unsqueeze(0);
  table = table.to(type);
  return table.size(3) == 1 || table.stride(3) == 1 ? table : table.contiguous();
}

// [B,h,N,d] whose rows are matrices to a BLAS: numbers side by side, and rows that do not overlap (the gradient of a
// sum over tokens is one row N times). contiguous() would leave a stride of 0 where N is 1.
at::Tensor as_rows(const at::Tensor& tensor) {
  const bool side_by_side = tensor.size(3) == 1 || tensor.stride(3) == 1;
  return side_by_side && tensor.stride(2) >= tensor.size(3) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// [B,h,N,d], in memory [B,N,h,d]: what a projection reads next without a copy.
at::Tensor empty_heads(const at::Tensor& like, at::IntArrayRef sizes) {
  return at::empty({sizes[0], sizes[2], sizes[1], sizes[3]}, like.options()).transpose(1, 2);
}

AttentionCall make_call(const AttentionBackend& backend, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                        std::optional<double> scale) {
  const AttentionSizes sizes = check_attention(q, k, v, gain, bias, gate);
  const at::ScalarType type = accumulate_type(q.scalar_type());
  AttentionCall call;
  call.q = as_rows(q);
  call.k = as_rows(k);
  call.v = as_rows(v);
  const bool packed = gain && gain->defined() && is_packed_gain(*gain);
  TORCH_CHECK_NOT_IMPLEMENTED(!packed || backend.takes_packed,
                              "violin::attention: gain is packed, and the reference, which computes heads above ",
                              kLargestFusedHead,
                              " and what VIOLIN_PATH=reference says, takes plain tables alone; unset "
                              "VIOLIN_PATH, or pass the table itself");
  call.gain = packed ? *gain : kernel_table(gain, type);
  call.bias = kernel_table(bias, type);
  call.gate = kernel_table(gate, type);
  call.groups = sizes.groups.expect_int();
  call.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  return call;
}

bool is_empty(const AttentionCall& call) {
  return call.q.numel() == 0 || call.k.numel() == 0;
}

// Sums over one dimension, kept, one slice after another: the same bits for every number of threads.
at::Tensor sum_in_order(const at::Tensor& tensor, std::int64_t dim) {
  const std::int64_t count = tensor.sym_size(dim).guard_int(__FILE__, __LINE__);
  if (count == 0) return tensor.sum(dim, true);
  at::Tensor sum = tensor.narrow(dim, 0, 1).clone(at::MemoryFormat::Contiguous);
  for (std::int64_t i = 1; i < count; ++i) sum += tensor.narrow(dim, i, 1);
  return sum;
}

// Computes into the tensors that the call holds and shapes the gradients of the tables.
std::array<at::Tensor, 3> run_backward(const AttentionBackend& backend, AttentionBackwardCall& call,
                                       const std::array<at::Tensor, 3>& tables, const std::array<bool, 3>& need) {
  const std::array<at::Tensor*, 3> raw = {&call.dgain, &call.dbias, &call.dgate};
  std::array<at::Tensor, 3> gradients;
  const auto options = call.q.options().dtype(accumulate_type(call.q.scalar_type()));
  const std::array<std::int64_t, 4> slices = {call.groups, call.q.size(1), call.q.size(2), call.k.size(2)};
  if (is_empty(call)) {
    for (at::Tensor* gradient : {&call.dq, &call.dk, &call.dv}) {
      if (gradient->defined()) gradient->zero_();
    }
    for (int i = 0; i < 3; ++i) {
      if (!need[i] || !tables[i].defined()) continue;
      gradients[i] =
          is_packed_gain(tables[i]) ? at::zeros(slices, options) : at::zeros(tables[i].sizes(), tables[i].options());
    }
    return gradients;
  }
  bool wanted = call.dq.defined() || call.dk.defined() || call.dv.defined();
  for (int i = 0; i < 3; ++i) {
    if (!need[i] || !tables[i].defined()) continue;
    *raw[i] = at::empty(slices, options);
    wanted = true;
  }
  if (!wanted) return gradients;
  backend.backward(call);
  for (int i = 0; i < 3; ++i) {
    if (raw[i]->defined()) gradients[i] = is_packed_gain(tables[i]) ? *raw[i] : like_table(*raw[i], form_of(tables[i]));
  }
  return gradients;
}

AttentionBackwardCall make_backward_call(const AttentionBackend& backend, const at::Tensor& dout, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                                         const MaybeTensor& bias, const MaybeTensor& gate, const at::Tensor& out,
                                         const at::Tensor& lse, std::optional<double> scale) {
  AttentionBackwardCall call;
  static_cast<AttentionCall&>(call) = make_call(backend, q, k, v, gain, bias, gate, scale);
  TORCH_CHECK_VALUE(dout.sizes() == q.sizes(), "violin::attention: dout has shape ", dout.sizes(), "; expected ",
                    q.sizes());
  TORCH_CHECK_VALUE(out.sizes() == q.sizes(), "violin::attention: out has shape ", out.sizes(), "; expected ",
                    q.sizes());
  TORCH_CHECK_VALUE(lse.sizes() == q.sizes().slice(0, 3), "violin::attention: lse has shape ", lse.sizes(),
                    "; expected ", q.sizes().slice(0, 3));
  call.dout = as_rows(dout.to(q.scalar_type()));
  call.out = as_rows(out.to(q.scalar_type()));
  call.lse = lse.to(accumulate_type(q.scalar_type())).contiguous();
  return call;
}

kernels::ConstHeads const_heads(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

kernels::MutableHeads mutable_heads(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.mutable_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

kernels::Table table_view(const at::Tensor& table) {
  if (!table.defined()) return {};
  if (is_packed_gain(table))
    return {table.const_data_ptr(), table.size(0) == 1 ? 0 : 1, table.size(1) == 1 ? 0 : 1, 0, true};
  return {table.const_data_ptr(), table.size(0) == 1 ? 0 : table.stride(0), table.size(1) == 1 ? 0 : table.stride(1),
          table.stride(2)};
}

void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

// What forward and backward share.
template <class Parameters>
void fill(Parameters& parameters, const AttentionCall& call) {
  parameters.shape = {call.q.size(0), call.q.size(1), call.q.size(2), call.k.size(2), call.q.size(3), call.groups};
  parameters.dtype = kernel_type(call.q.scalar_type());
  parameters.scale = call.scale;
  parameters.q = const_heads(call.q);
  parameters.k = const_heads(call.k);
  parameters.v = const_heads(call.v);
  parameters.gain = table_view(call.gain);
  parameters.bias = table_view(call.bias);
  parameters.gate = table_view(call.gate);
}

}  // namespace

at::Tensor empty_packed(const at::Tensor& gain, const at::Tensor& q) {
  TORCH_CHECK_TYPE(at::isReducedFloatingType(q.scalar_type()), "violin::_pack_gain: q is ", q.scalar_type(),
                   "; expected float16 or bfloat16");
  TORCH_CHECK(gain.device() == q.device(), "violin::_pack_gain: gain is on ", gain.device(), " and q on ", q.device(),
              "; expected one device");
  TORCH_CHECK_VALUE(gain.dim() == 3 || gain.dim() == 4, "violin::_pack_gain: gain has shape ", gain.sym_sizes(),
                    "; expected [heads or 1, queries, keys], with a group dimension in front or without");
  const c10::SymInt groups = gain.dim() == 4 ? gain.sym_size(0) : c10::SymInt(1);
  return at::empty_symint({groups, gain.sym_size(-3), packed_tiles(gain.sym_size(-1)), packed_tiles(gain.sym_size(-2)),
                           packed_size(q.scalar_type())},
                          q.options().dtype(packed_type(q.scalar_type())));
}

TableForm form_of(const at::Tensor& table) {
  return {table.dim(), table.dim() == 3 || table.sym_size(0) == 1, table.sym_size(-3) == 1, table.scalar_type()};
}

at::Tensor like_table(at::Tensor gradient, const TableForm& form) {
  if (form.one_head && gradient.sym_size(1) != 1) gradient = sum_in_order(gradient, 1);
  if (form.one_group && gradient.sym_size(0) != 1) gradient = sum_in_order(gradient, 0);
  if (form.dim == 3) gradient = gradient.squeeze(0);
  return gradient.to(form.type);
}

kernels::DType kernel_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return kernels::DType::kFloat64;
    case at::kBFloat16:
      return kernels::DType::kBFloat16;
    case at::kHalf:
      return kernels::DType::kFloat16;
    default:
      return kernels::DType::kFloat32;
  }
}

Tensors2 forward_with(const AttentionBackend& backend, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                      std::optional<double> scale) {
  AttentionCall call = make_call(backend, q, k, v, gain, bias, gate, scale);
  call.out = empty_heads(q, q.sizes());
  call.lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(accumulate_type(q.scalar_type())));
  if (is_empty(call)) {
    call.out.zero_();
    call.lse.fill_(-std::numeric_limits<double>::infinity());
  } else {
    backend.forward(call);
  }
  return {call.out, call.lse};
}

Tensors6 backward_with(const AttentionBackend& backend, const at::Tensor& dout, const at::Tensor& q,
                       const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain, const MaybeTensor& bias,
                       const MaybeTensor& gate, const at::Tensor& out, const at::Tensor& lse,
                       std::optional<double> scale, std::array<bool, 6> need) {
  AttentionBackwardCall call = make_backward_call(backend, dout, q, k, v, gain, bias, gate, out, lse, scale);
  if (need[0]) call.dq = empty_heads(q, q.sizes());
  if (need[1]) call.dk = empty_heads(k, k.sizes());
  if (need[2]) call.dv = empty_heads(v, v.sizes());
  const auto tables = run_backward(backend, call, {or_undefined(gain), or_undefined(bias), or_undefined(gate)},
                                   {need[3], need[4], need[5]});
  return {call.dq, call.dk, call.dv, tables[0], tables[1], tables[2]};
}

Tensors4 qkv_backward_with(const AttentionBackend& backend, const at::Tensor& dout, const at::Tensor& qkv,
                           const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                           const at::Tensor& out, const at::Tensor& lse, std::optional<double> scale,
                           std::array<bool, 4> need) {
  check_packed(qkv);
  AttentionBackwardCall call = make_backward_call(backend, dout, unpack(qkv, 0), unpack(qkv, 1), unpack(qkv, 2), gain,
                                                  bias, gate, out, lse, scale);
  at::Tensor dqkv;
  if (need[0]) {
    // The three gradients are written where they belong.
    dqkv = at::empty(qkv.sizes(), qkv.options());
    call.dq = unpack(dqkv, 0);
    call.dk = unpack(dqkv, 1);
    call.dv = unpack(dqkv, 2);
  }
  const auto tables = run_backward(backend, call, {or_undefined(gain), or_undefined(bias), or_undefined(gate)},
                                   {need[1], need[2], need[3]});
  return {dqkv, tables[0], tables[1], tables[2]};
}

kernels::AttentionForward kernel_parameters(const AttentionCall& call) {
  kernels::AttentionForward parameters;
  fill(parameters, call);
  parameters.out = mutable_heads(call.out);
  parameters.lse = call.lse.mutable_data_ptr();
  return parameters;
}

kernels::AttentionBackward kernel_parameters(const AttentionBackwardCall& call) {
  kernels::AttentionBackward parameters;
  fill(parameters, call);
  parameters.out = const_heads(call.out);
  parameters.dout = const_heads(call.dout);
  parameters.lse = call.lse.const_data_ptr();
  parameters.dq = mutable_heads(call.dq);
  parameters.dk = mutable_heads(call.dk);
  parameters.dv = mutable_heads(call.dv);
  parameters.dgain = data_or_null(call.dgain);
  parameters.dbias = data_or_null(call.dbias);
  parameters.dgate = data_or_null(call.dgate);
  return parameters;
}

}  // namespace violin::ops
