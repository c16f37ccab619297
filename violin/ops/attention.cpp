// The public attention operators: autograd, autocast, kernels for tensors without data, and the backend-free relatives.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "violin/ops/attention_backend.h"
#include "violin/ops/checks.h"
#include "violin/ops/device.h"
#include "violin/ops/path.h"

namespace violin::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Which of the first tensors that were saved somebody wants a gradient of; that of the gain, at kGain, may be wanted by
// the handle, the last argument. The context counts only tensors that were given.
template <std::size_t n, std::size_t kGain>
std::array<bool, n> needed(AutogradContext* context, const variable_list& saved) {
  std::array<bool, n> need{};
  std::size_t edge = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (saved[i].defined()) need[i] = context->needs_input_grad(edge++);
  }
  if (context->saved_data["handle"].toBool()) need[kGain] = context->needs_input_grad(edge);
  return need;
}

// The gain as both passes read it. Kernels for 16 bits on CUDA want it packed, and less is kept for the backward pass.
at::Tensor gain_for(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                    const MaybeTensor& bias, const MaybeTensor& gate) {
  at::Tensor table = or_undefined(gain);
  if (!table.defined() || is_packed_gain(table) || !on_gpu(q) || !at::isReducedFloatingType(q.scalar_type()) ||
      !packs_gains()) {
    return table;
  }
  check_attention(q, k, v, gain, bias, gate);
  return q.sym_size(-1) <= kLargestFusedHead ? pack_gain(table, q) : table;
}

// What the gradient of a gain that was packed has to become: like the gain, or like the handle.
void remember_form(AutogradContext* context, const MaybeTensor& gain, const at::Tensor& taken,
                   const MaybeTensor& handle) {
  const at::Tensor asks = or_undefined(handle);
  context->saved_data["handle"] = asks.defined();
  const at::Tensor table = asks.defined() ? asks : or_undefined(gain);
  if (!taken.defined() || !is_packed_gain(taken) || is_packed_gain(table)) return;
  const TableForm form = form_of(table);
  context->saved_data["gain"] =
      std::vector<std::int64_t>{form.dim, form.one_group, form.one_head, static_cast<std::int64_t>(form.type)};
}
// Of the gain and of the handle: one of them.
Tensors2 gain_gradients(AutogradContext* context, at::Tensor gradient) {
  const auto found = context->saved_data.find("gain");
  if (found != context->saved_data.end() && gradient.defined()) {
    const std::vector<std::int64_t> form = found->second.toIntVector();
    gradient = like_table(gradient, {form[0], form[1] != 0, form[2] != 0, static_cast<at::ScalarType>(form[3])});
  }
  if (context->saved_data["handle"].toBool()) return {at::Tensor(), gradient};
  return {gradient, at::Tensor()};
}

void check_handle(const MaybeTensor& handle, const MaybeTensor& gain, const AttentionSizes& sizes) {
  const at::Tensor given = or_undefined(handle);
  if (!given.defined()) return;
  const at::Tensor table = or_undefined(gain);
  TORCH_CHECK_VALUE(table.defined() && is_packed_gain(table) && (given.dim() == 3 || given.dim() == 4) &&
                        given.sym_size(-3) == table.sym_size(1) && given.sym_size(-2) == sizes.queries &&
                        given.sym_size(-1) == sizes.keys,
                    "violin::attention: handle has shape ", given.sym_sizes(),
                    "; expected the one that came with the packed gain");
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                               std::optional<double> scale, const MaybeTensor& handle) {
    at::AutoDispatchBelowADInplaceOrView below;
    if (handle) check_handle(handle, gain, check_attention(q, k, v, gain, bias, gate));
    const at::Tensor taken = gain_for(q, k, v, gain, bias, gate);
    auto [out, lse] = attention_forward(q, k, v, or_nothing(taken), bias, gate, scale);
    context->save_for_backward({q, k, v, taken, or_undefined(bias), or_undefined(gate), out, lse});
    context->saved_data["scale"] = scale;
    remember_form(context, gain, taken, handle);
    context->mark_non_differentiable({lse});
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    auto [dq, dk, dv, dgain, dbias, dgate] = attention_backward(
        gradients[0], saved[0], saved[1], saved[2], or_nothing(saved[3]), or_nothing(saved[4]), or_nothing(saved[5]),
        saved[6], saved[7], context->saved_data["scale"].to<std::optional<double>>(), needed<6, 3>(context, saved));
    auto [of_gain, of_handle] = gain_gradients(context, dgain);
    return {dq, dk, dv, of_gain, dbias, dgate, at::Tensor(), of_handle};
  }
};

struct AttentionQkv : torch::autograd::Function<AttentionQkv> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& qkv, const MaybeTensor& gain,
                            const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale,
                            const MaybeTensor& handle) {
    at::AutoDispatchBelowADInplaceOrView below;
    check_packed(qkv);
    const at::Tensor q = unpack(qkv, 0), k = unpack(qkv, 1), v = unpack(qkv, 2);
    if (handle) check_handle(handle, gain, check_attention(q, k, v, gain, bias, gate));
    const at::Tensor taken = gain_for(q, k, v, gain, bias, gate);
    auto [out, lse] = attention_forward(q, k, v, or_nothing(taken), bias, gate, scale);
    at::Tensor result = out.transpose(1, 2);
    context->save_for_backward({qkv, taken, or_undefined(bias), or_undefined(gate), result, lse});
    context->saved_data["scale"] = scale;
    remember_form(context, gain, taken, handle);
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    auto [dqkv, dgain, dbias, dgate] =
        attention_qkv_backward(gradients[0].transpose(1, 2), saved[0], or_nothing(saved[1]), or_nothing(saved[2]),
                               or_nothing(saved[3]), saved[4].transpose(1, 2), saved[5],
                               context->saved_data["scale"].to<std::optional<double>>(), needed<4, 1>(context, saved));
    auto [of_gain, of_handle] = gain_gradients(context, dgain);
    return {dqkv, of_gain, dbias, dgate, at::Tensor(), of_handle};
  }
};

// Attention without tables is torch's own where VIOLIN_PATH=torch asks for that.
bool is_for_torch(const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                  const MaybeTensor& handle) {
  return leaves_attention_to_torch() && !gain && !bias && !gate && !handle;
}

at::Tensor attention_of_torch(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              std::optional<double> scale) {
  check_attention(q, k, v, {}, {}, {});
  return at::scaled_dot_product_attention(q, k, v, {}, 0, false, scale);
}

at::Tensor attention_qkv_of_torch(const at::Tensor& qkv, std::optional<double> scale) {
  check_packed(qkv);
  const std::vector<at::Tensor> parts = qkv.unbind(2);  // one copy on the way back, not one of everything for each
  const auto heads = [&](std::size_t which) { return parts[which].transpose(1, 2); };
  return attention_of_torch(heads(0), heads(1), heads(2), scale).transpose(1, 2).contiguous();
}

// Below autograd, on every device.
at::Tensor attention_any(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                         const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale,
                         const MaybeTensor& handle) {
  if (handle) check_handle(handle, gain, check_attention(q, k, v, gain, bias, gate));
  if (is_for_torch(gain, bias, gate, handle)) return attention_of_torch(q, k, v, scale);
  return std::get<0>(attention_forward(q, k, v, gain, bias, gate, scale));
}

at::Tensor attention_qkv_any(const at::Tensor& qkv, const MaybeTensor& gain, const MaybeTensor& bias,
                             const MaybeTensor& gate, std::optional<double> scale, const MaybeTensor& handle) {
  if (is_for_torch(gain, bias, gate, handle)) return attention_qkv_of_torch(qkv, scale);
  check_packed(qkv);
  return attention_any(unpack(qkv, 0), unpack(qkv, 1), unpack(qkv, 2), gain, bias, gate, scale, handle).transpose(1, 2);
}

// Whether the call is one that autograd has to know of. Where it is not, nothing is kept, and a gain is packed only
// where the kernels of the forward pass want it so.
template <class... Tensors>
bool is_recorded(const Tensors&... tensors) {
  return torch::autograd::compute_requires_grad(or_undefined(tensors)...) ||
         (torch::autograd::isFwGradDefined(or_undefined(tensors)) || ...);
}

Tensors2 attention_with_lse_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                                     std::optional<double> scale) {
  if (!is_recorded(q, k, v, gain, bias, gate)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return attention_forward(q, k, v, gain, bias, gate, scale);
  }
  variable_list results = Attention::apply(q, k, v, gain, bias, gate, scale, MaybeTensor());
  return {results[0], results[1]};
}

at::Tensor attention_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                              const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale,
                              const MaybeTensor& handle) {
  if (is_for_torch(gain, bias, gate, handle)) return attention_of_torch(q, k, v, scale);
  if (!is_recorded(q, k, v, gain, bias, gate, handle)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return attention_any(q, k, v, gain, bias, gate, scale, handle);
  }
  return Attention::apply(q, k, v, gain, bias, gate, scale, handle)[0];
}

at::Tensor attention_qkv_autograd(const at::Tensor& qkv, const MaybeTensor& gain, const MaybeTensor& bias,
                                  const MaybeTensor& gate, std::optional<double> scale, const MaybeTensor& handle) {
  if (is_for_torch(gain, bias, gate, handle)) return attention_qkv_of_torch(qkv, scale);
  if (!is_recorded(qkv, gain, bias, gate, handle)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return attention_qkv_any(qkv, gain, bias, gate, scale, handle);
  }
  return AttentionQkv::apply(qkv, gain, bias, gate, scale, handle);
}

// Autocast makes q, k and v 16 bits wide. Tables stay what they are: a mask close to 1 has no 16-bit form.
template <c10::DeviceType device>
struct Autocast {
  static at::Tensor cast(const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  }
  static constexpr c10::DispatchKey kKey =
      device == at::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;

  static at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                              const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale,
                              const MaybeTensor& handle) {
    c10::impl::ExcludeDispatchKeyGuard without_autocast(kKey);
    return ops::attention(cast(q), cast(k), cast(v), gain, bias, gate, scale, handle);
  }
  static Tensors2 attention_with_lse(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                                     std::optional<double> scale) {
    c10::impl::ExcludeDispatchKeyGuard without_autocast(kKey);
    return ops::attention_with_lse(cast(q), cast(k), cast(v), gain, bias, gate, scale);
  }
  static at::Tensor attention_qkv(const at::Tensor& qkv, const MaybeTensor& gain, const MaybeTensor& bias,
                                  const MaybeTensor& gate, std::optional<double> scale, const MaybeTensor& handle) {
    c10::impl::ExcludeDispatchKeyGuard without_autocast(kKey);
    return ops::attention_qkv(cast(qkv), gain, bias, gate, scale, handle);
  }
  static void add_to(torch::Library& library) {
    library.impl("attention", attention);
    library.impl("attention_with_lse", attention_with_lse);
    library.impl("attention_qkv", attention_qkv);
  }
};

// Tensors without data: sizes, strides and types as the backends return them.

at::Tensor empty_heads_meta(const at::Tensor& like) {
  const auto sizes = like.sym_sizes();
  return at::empty_symint({sizes[0], sizes[2], sizes[1], sizes[3]}, like.options()).transpose(1, 2);
}

at::Tensor empty_table_meta(bool need, const MaybeTensor& table, const AttentionSizes& sizes) {
  const at::Tensor like = or_undefined(table);
  if (!need || !like.defined()) return {};
  if (is_packed_gain(like)) {
    return at::empty_symint({sizes.groups, sizes.heads, sizes.queries, sizes.keys}, like.options().dtype(at::kFloat));
  }
  return at::empty_symint(like.sym_sizes(), like.options());
}

Tensors2 forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                      const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double>) {
  const AttentionSizes sizes = check_attention(q, k, v, gain, bias, gate);
  return {empty_heads_meta(q), at::empty_symint({sizes.batch, sizes.heads, sizes.queries},
                                                q.options().dtype(accumulate_type(q.scalar_type())))};
}

Tensors6 backward_meta(const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate, const at::Tensor&,
                       const at::Tensor&, std::optional<double>, std::array<bool, 6> need) {
  const AttentionSizes sizes = check_attention(q, k, v, gain, bias, gate);
  return {need[0] ? empty_heads_meta(q) : at::Tensor(), need[1] ? empty_heads_meta(k) : at::Tensor(),
          need[2] ? empty_heads_meta(v) : at::Tensor(), empty_table_meta(need[3], gain, sizes),
          empty_table_meta(need[4], bias, sizes),       empty_table_meta(need[5], gate, sizes)};
}

Tensors4 qkv_backward_meta(const at::Tensor&, const at::Tensor& qkv, const MaybeTensor& gain, const MaybeTensor& bias,
                           const MaybeTensor& gate, const at::Tensor&, const at::Tensor&, std::optional<double>,
                           std::array<bool, 4> need) {
  check_packed(qkv);
  const AttentionSizes sizes = check_attention(unpack(qkv, 0), unpack(qkv, 1), unpack(qkv, 2), gain, bias, gate);
  return {need[0] ? at::empty_symint(qkv.sym_sizes(), qkv.options()) : at::Tensor(),
          empty_table_meta(need[1], gain, sizes), empty_table_meta(need[2], bias, sizes),
          empty_table_meta(need[3], gate, sizes)};
}

// The reference on devices that have no kernels.

Tensors2 forward_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                           const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale) {
  return forward_with(kReferenceAttention, q, k, v, gain, bias, gate, scale);
}

Tensors6 backward_reference(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                            const at::Tensor& out, const at::Tensor& lse, std::optional<double> scale,
                            std::array<bool, 6> need) {
  return backward_with(kReferenceAttention, dout, q, k, v, gain, bias, gate, out, lse, scale, need);
}

Tensors4 qkv_backward_reference(const at::Tensor& dout, const at::Tensor& qkv, const MaybeTensor& gain,
                                const MaybeTensor& bias, const MaybeTensor& gate, const at::Tensor& out,
                                const at::Tensor& lse, std::optional<double> scale, std::array<bool, 4> need) {
  return qkv_backward_with(kReferenceAttention, dout, qkv, gain, bias, gate, out, lse, scale, need);
}

TORCH_LIBRARY_IMPL(violin, CompositeExplicitAutograd, library) {
  library.impl("attention", attention_any);
  library.impl("attention_with_lse", attention_forward);
  library.impl("attention_qkv", attention_qkv_any);
  library.impl("_attention_forward", forward_reference);
  library.impl("_attention_backward", backward_reference);
  library.impl("_attention_qkv_backward", qkv_backward_reference);
}

TORCH_LIBRARY_IMPL(violin, Meta, library) {
  library.impl("_pack_gain", empty_packed);
  library.impl("_attention_forward", forward_meta);
  library.impl("_attention_backward", backward_meta);
  library.impl("_attention_qkv_backward", qkv_backward_meta);
}

TORCH_LIBRARY_IMPL(violin, Autograd, library) {
  library.impl("attention", attention_autograd);
  library.impl("attention_with_lse", attention_with_lse_autograd);
  library.impl("attention_qkv", attention_qkv_autograd);
}

TORCH_LIBRARY_IMPL(violin, AutocastCPU, library) {
  Autocast<at::kCPU>::add_to(library);
}
TORCH_LIBRARY_IMPL(violin, AutocastCUDA, library) {
  Autocast<at::kCUDA>::add_to(library);
}

}  // namespace
}  // namespace violin::ops
