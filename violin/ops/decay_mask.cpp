// The public decay_mask operator: autograd, the kernel for tensors without data, and the reference on devices without
// kernels.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "violin/ops/checks.h"
#include "violin/ops/decay_mask_backend.h"

namespace violin::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct DecayMask : torch::autograd::Function<DecayMask> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& ranks, const at::Tensor& log_decay,
                            const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                            bool log_space) {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor mask = decay_mask_forward(ranks, log_decay, weight, prefix, prefix_decay, log_space);
    context->save_for_backward({ranks, log_decay, or_undefined(weight), or_undefined(prefix_decay)});
    context->saved_data["prefix"] = prefix;
    context->saved_data["log_space"] = log_space;
    return mask;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    // The context counts only tensors that were given; ranks are the first.
    std::size_t edge = 1;
    const bool decay_needed = context->needs_input_grad(edge++);
    const bool weight_needed = saved[2].defined() && context->needs_input_grad(edge++);
    const bool prefix_needed = saved[3].defined() && context->needs_input_grad(edge++);
    auto [dlog_decay, dweight, dprefix_decay] = decay_mask_backward(
        gradients[0], saved[0], saved[1], or_nothing(saved[2]), context->saved_data["prefix"].toInt(),
        or_nothing(saved[3]), context->saved_data["log_space"].toBool(), {decay_needed, weight_needed, prefix_needed});
    return {at::Tensor(), dlog_decay, dweight, at::Tensor(), dprefix_decay, at::Tensor()};
  }
};

at::Tensor decay_mask_autograd(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                               std::int64_t prefix, const MaybeTensor& prefix_decay, bool log_space) {
  return DecayMask::apply(ranks, log_decay, weight, prefix, prefix_decay, log_space);
}

at::Tensor forward_meta(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                        std::int64_t prefix, const MaybeTensor& prefix_decay, bool) {
  const DecayMaskSizes sizes = check_decay_mask(ranks, log_decay, weight, prefix, prefix_decay);
  const c10::SymInt side = sizes.tokens + prefix;
  const auto options = log_decay.options().dtype(accumulate_type(log_decay.scalar_type()));
  if (!sizes.grouped) return at::empty_symint({sizes.heads, side, side}, options);
  return at::empty_symint({sizes.groups, sizes.heads, side, side}, options);
}

Tensors3 backward_meta(const at::Tensor&, const at::Tensor&, const at::Tensor& log_decay, const MaybeTensor& weight,
                       std::int64_t, const MaybeTensor& prefix_decay, bool, std::array<bool, 3> need) {
  const auto wanted = [](bool needed, const MaybeTensor& input) {
    const at::Tensor like = or_undefined(input);
    return needed && like.defined() ? at::empty_symint(like.sym_sizes(), like.options()) : at::Tensor();
  };
  return {wanted(need[0], log_decay), wanted(need[1], weight), wanted(need[2], prefix_decay)};
}

at::Tensor forward_reference(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                             std::int64_t prefix, const MaybeTensor& prefix_decay, bool log_space) {
  return forward_with(kReferenceDecayMask, ranks, log_decay, weight, prefix, prefix_decay, log_space);
}

Tensors3 backward_reference(const at::Tensor& dmask, const at::Tensor& ranks, const at::Tensor& log_decay,
                            const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                            bool log_space, std::array<bool, 3> need) {
  return backward_with(kReferenceDecayMask, dmask, ranks, log_decay, weight, prefix, prefix_decay, log_space, need);
}

TORCH_LIBRARY_IMPL(violin, CompositeExplicitAutograd, library) {
  library.impl("decay_mask", decay_mask_forward);
  library.impl("_decay_mask_forward", forward_reference);
  library.impl("_decay_mask_backward", backward_reference);
}

TORCH_LIBRARY_IMPL(violin, Meta, library) {
  library.impl("_decay_mask_forward", forward_meta);
  library.impl("_decay_mask_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(violin, Autograd, library) {
  library.impl("decay_mask", decay_mask_autograd);
}

}  // namespace
}  // namespace violin::ops
