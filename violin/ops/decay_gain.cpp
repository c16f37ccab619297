// The gain that a mask makes, packed at once: autograd, and the kernels for tensors without data. Nothing here
// computes; the kernels are CUDA's alone (decay_gain_cuda.cpp), and models ask first (packs_decay_gains).
#include "violin/ops/decay_gain.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "violin/ops/device.h"
#include "violin/ops/path.h"

namespace violin::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Gains = std::tuple<at::Tensor, std::vector<at::Tensor>>;

// Has the shape of a layer's gain and no numbers: gradients flow through it.
at::Tensor handle_for(const DecayMaskSizes& sizes, std::int64_t prefix, const at::Tensor& log_decay,
                      std::int64_t layers = 1) {
  const c10::SymInt side = sizes.tokens + prefix;
  std::vector<c10::SymInt> shape = {sizes.heads / layers, side, side};
  if (sizes.grouped) shape.insert(shape.begin(), sizes.groups);
  return at::empty({1}, log_decay.options().dtype(at::kFloat)).expand_symint(shape);
}

void check_layers(const DecayMaskSizes& sizes, std::int64_t layers) {
  TORCH_CHECK_VALUE(layers >= 1 && layers <= kMostLayersTogether && sizes.heads % layers == 0,
                    "violin::_decay_gains: layers is ", layers, " beside ", sizes.heads, " heads; expected one to ",
                    kMostLayersTogether, " with as many heads each");
}

struct DecayGain : torch::autograd::Function<DecayGain> {
  static variable_list forward(AutogradContext* context, const at::Tensor& ranks, const at::Tensor& log_decay,
                               const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                               const MaybeTensor& alpha, bool plus_one, at::ScalarType dtype, std::int64_t layers) {
    at::AutoDispatchBelowADInplaceOrView below;
    const DecayMaskSizes sizes = check_decay_gain(ranks, log_decay, weight, prefix, prefix_decay, alpha, dtype);
    check_layers(sizes, layers);
    at::Tensor packed = decay_gain_forward(ranks, log_decay, weight, prefix, prefix_decay, alpha, plus_one, dtype);
    context->save_for_backward(
        {ranks, log_decay, or_undefined(weight), or_undefined(prefix_decay), or_undefined(alpha)});
    context->saved_data["prefix"] = prefix;
    context->mark_non_differentiable({packed});
    context->set_materialize_grads(false);  // zeros for what has no gradient would be as large as the gain
    variable_list results = {packed};
    for (std::int64_t i = 0; i < layers; ++i) results.push_back(handle_for(sizes, prefix, log_decay, layers));
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    // The context counts only tensors that were given; ranks are the first.
    std::array<bool, 4> need{};
    std::size_t edge = 1;
    for (std::size_t i = 0; i < need.size(); ++i) {
      if (saved[i + 1].defined()) need[i] = context->needs_input_grad(edge++);
    }
    variable_list of_layers(gradients.begin() + 1, gradients.end());
    const auto given = std::find_if(of_layers.begin(), of_layers.end(), [](const auto& x) { return x.defined(); });
    if (given == of_layers.end()) return variable_list(9);
    const at::Tensor like = *given;
    for (at::Tensor& gradient : of_layers) {
      if (!gradient.defined()) gradient = at::zeros_like(like);  // a layer that the loss does not depend on
    }
    auto [dlog_decay, dweight, dprefix_decay, dalpha] =
        decay_gain_backward(of_layers, saved[0], saved[1], or_nothing(saved[2]), context->saved_data["prefix"].toInt(),
                            or_nothing(saved[3]), or_nothing(saved[4]), need);
    return {at::Tensor(), dlog_decay,   dweight,      at::Tensor(), dprefix_decay,
            dalpha,       at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

Tensors2 decay_gain_autograd(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                             std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                             bool plus_one, at::ScalarType dtype) {
  variable_list results =
      DecayGain::apply(ranks, log_decay, weight, prefix, prefix_decay, alpha, plus_one, dtype, std::int64_t{1});
  return {results[0], results[1]};
}

Gains decay_gains_autograd(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                           std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                           bool plus_one, at::ScalarType dtype, std::int64_t layers) {
  variable_list results =
      DecayGain::apply(ranks, log_decay, weight, prefix, prefix_decay, alpha, plus_one, dtype, layers);
  return {results[0], variable_list(results.begin() + 1, results.end())};
}

// Below autograd.
Tensors2 decay_gain_any(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                        std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha, bool plus_one,
                        at::ScalarType dtype) {
  const DecayMaskSizes sizes = check_decay_gain(ranks, log_decay, weight, prefix, prefix_decay, alpha, dtype);
  return {decay_gain_forward(ranks, log_decay, weight, prefix, prefix_decay, alpha, plus_one, dtype),
          handle_for(sizes, prefix, log_decay)};
}

Gains decay_gains_any(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                      std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha, bool plus_one,
                      at::ScalarType dtype, std::int64_t layers) {
  const DecayMaskSizes sizes = check_decay_gain(ranks, log_decay, weight, prefix, prefix_decay, alpha, dtype);
  check_layers(sizes, layers);
  std::vector<at::Tensor> handles;
  for (std::int64_t i = 0; i < layers; ++i) handles.push_back(handle_for(sizes, prefix, log_decay, layers));
  return {decay_gain_forward(ranks, log_decay, weight, prefix, prefix_decay, alpha, plus_one, dtype),
          std::move(handles)};
}

at::Tensor forward_meta(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                        std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha, bool,
                        at::ScalarType dtype) {
  return empty_gain(check_decay_gain(ranks, log_decay, weight, prefix, prefix_decay, alpha, dtype), prefix, dtype,
                    log_decay);
}

Tensors4 backward_meta(at::TensorList, const at::Tensor&, const at::Tensor& log_decay, const MaybeTensor& weight,
                       std::int64_t, const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                       std::array<bool, 4> need) {
  const auto wanted = [](bool needed, const MaybeTensor& input) {
    const at::Tensor like = or_undefined(input);
    return needed && like.defined() ? at::empty_symint(like.sym_sizes(), like.options()) : at::Tensor();
  };
  return {wanted(need[0], log_decay), wanted(need[1], weight), wanted(need[2], prefix_decay), wanted(need[3], alpha)};
}

TORCH_LIBRARY_IMPL(violin, CompositeExplicitAutograd, library) {
  library.impl("_decay_gain", decay_gain_any);
  library.impl("_decay_gains", decay_gains_any);
}

TORCH_LIBRARY_IMPL(violin, Meta, library) {
  library.impl("_decay_gain_forward", forward_meta);
  library.impl("_decay_gain_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(violin, Autograd, library) {
  library.impl("_decay_gain", decay_gain_autograd);
  library.impl("_decay_gains", decay_gains_autograd);
}

}  // namespace

bool packs_decay_gains(const at::Tensor& log_decay, std::int64_t axes, at::ScalarType dtype) {
  return on_gpu(log_decay) && log_decay.scalar_type() == at::kFloat && log_decay.dim() == 2 && axes == 1 &&
         at::isReducedFloatingType(dtype) && packs_gains();
}

DecayMaskSizes check_decay_gain(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                                std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                                at::ScalarType dtype) {
  DecayMaskSizes sizes = check_decay_mask(ranks, log_decay, weight, prefix, prefix_decay);
  TORCH_CHECK_VALUE(sizes.axes == 1 && !sizes.decay_per_axis, "violin::_decay_gain: ranks has shape ",
                    ranks.sym_sizes(), " and log_decay ", log_decay.sym_sizes(),
                    "; expected one axis: other masks are made by decay_mask");
  TORCH_CHECK_TYPE(at::isReducedFloatingType(dtype), "violin::_decay_gain: dtype is ", dtype,
                   "; expected float16 or bfloat16, that of q, k and v");
  const at::Tensor a = or_undefined(alpha);
  TORCH_CHECK_VALUE(!a.defined() || (a.dim() == 1 && a.sym_size(0) == sizes.heads),
                    "violin::_decay_gain: alpha has shape ", a.sym_sizes(), "; expected [", sizes.heads, "] (heads)");
  for (const at::Tensor& tensor : {log_decay, or_undefined(weight), or_undefined(prefix_decay), a}) {
    TORCH_CHECK_TYPE(!tensor.defined() || (tensor.scalar_type() == at::kFloat && tensor.device() == ranks.device()),
                     "violin::_decay_gain: a parameter is ", tensor.scalar_type(), " on ", tensor.device(),
                     " beside ranks on ", ranks.device(), "; expected float32 there");
  }
  return sizes;
}

at::Tensor empty_gain(const DecayMaskSizes& sizes, std::int64_t prefix, at::ScalarType dtype, const at::Tensor& like) {
  const c10::SymInt tiles = packed_tiles(sizes.tokens + prefix);
  return at::empty_symint({sizes.groups, sizes.heads, tiles, tiles, packed_size(dtype)},
                          like.options().dtype(packed_type(dtype)));
}

}  // namespace violin::ops
