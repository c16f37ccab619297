#include "violin/ops/decay_mask_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "violin/ops/checks.h"

namespace violin::ops {
namespace {

DecayMaskCall make_call(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                        std::int64_t prefix, const MaybeTensor& prefix_decay, bool log_space) {
  const DecayMaskSizes sizes = check_decay_mask(ranks, log_decay, weight, prefix, prefix_decay);
  const at::ScalarType type = accumulate_type(log_decay.scalar_type());
  const auto prepared = [&](const MaybeTensor& tensor) {
    const at::Tensor given = or_undefined(tensor);
    return given.defined() ? given.to(type).contiguous() : given;
  };
  DecayMaskCall call;
  call.ranks = ranks.contiguous();
  if (ranks.dim() == 2) call.ranks = call.ranks.unsqueeze(1);
  if (!sizes.grouped) call.ranks = call.ranks.unsqueeze(0);
  call.log_decay = prepared(log_decay);
  call.weight = prepared(weight);
  call.prefix_decay = prepared(prefix_decay);
  call.prefix = prefix;
  call.log_space = log_space;
  call.decay_per_axis = sizes.decay_per_axis;
  return call;
}

kernels::DecayMask kernel_mask(const DecayMaskCall& call) {
  kernels::DecayMask mask;
  mask.groups = call.ranks.size(0);
  mask.curves = call.ranks.size(1);
  mask.axes = call.ranks.size(2);
  mask.tokens = call.ranks.size(3);
  mask.heads = call.log_decay.size(-1);
  mask.prefix = call.prefix;
  mask.dtype = call.log_decay.scalar_type() == at::kDouble ? kernels::DType::kFloat64 : kernels::DType::kFloat32;
  mask.log_space = call.log_space;
  mask.decay_per_axis = call.decay_per_axis;
  mask.ranks = call.ranks.const_data_ptr<std::int32_t>();
  mask.log_decay = call.log_decay.const_data_ptr();
  mask.weight = call.weight.defined() ? call.weight.const_data_ptr() : nullptr;
  mask.prefix_decay = call.prefix_decay.defined() ? call.prefix_decay.const_data_ptr() : nullptr;
  return mask;
}

void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

}  // namespace

at::Tensor forward_with(const DecayMaskBackend& backend, const at::Tensor& ranks, const at::Tensor& log_decay,
                        const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                        bool log_space) {
  DecayMaskCall call = make_call(ranks, log_decay, weight, prefix, prefix_decay, log_space);
  const std::int64_t side = prefix + call.ranks.size(3);
  call.mask = at::empty({call.ranks.size(0), log_decay.size(-1), side, side}, call.log_decay.options());
  if (call.mask.numel() > 0) backend.forward(call);
  return ranks.dim() == 4 ? call.mask : call.mask.squeeze(0);
}

Tensors3 backward_with(const DecayMaskBackend& backend, const at::Tensor& dmask, const at::Tensor& ranks,
                       const at::Tensor& log_decay, const MaybeTensor& weight, std::int64_t prefix,
                       const MaybeTensor& prefix_decay, bool log_space, std::array<bool, 3> need) {
  DecayMaskBackwardCall call;
  static_cast<DecayMaskCall&>(call) = make_call(ranks, log_decay, weight, prefix, prefix_decay, log_space);
  const std::int64_t side = prefix + call.ranks.size(3);
  const std::vector<std::int64_t> shape = {call.ranks.size(0), log_decay.size(-1), side, side};
  TORCH_CHECK_VALUE(dmask.numel() == c10::multiply_integers(shape) && dmask.dim() == (ranks.dim() == 4 ? 4 : 3),
                    "violin::decay_mask: dmask has shape ", dmask.sizes(), "; expected ", shape);
  call.dmask = dmask.to(call.log_decay.scalar_type()).contiguous().view(shape);
  const auto wanted = [](bool needed, const at::Tensor& input) {
    return needed && input.defined() ? at::empty_like(input) : at::Tensor();
  };
  call.dlog_decay = wanted(need[0], call.log_decay);
  call.dweight = wanted(need[1], call.weight);
  call.dprefix_decay = wanted(need[2], call.prefix_decay);
  std::array<at::Tensor*, 3> gradients = {&call.dlog_decay, &call.dweight, &call.dprefix_decay};
  if (dmask.numel() > 0) {
    if (call.dlog_decay.defined() || call.dweight.defined() || call.dprefix_decay.defined()) backend.backward(call);
  } else {
    for (at::Tensor* gradient : gradients) {
      if (gradient->defined()) gradient->zero_();
    }
  }
  const auto like = [](const at::Tensor& gradient, const MaybeTensor& input) {
    return gradient.defined() ? gradient.to(or_undefined(input).scalar_type()) : gradient;
  };
  return {like(call.dlog_decay, log_decay), like(call.dweight, weight), like(call.dprefix_decay, prefix_decay)};
}

kernels::DecayMaskForward kernel_parameters(const DecayMaskCall& call) {
  return {kernel_mask(call), call.mask.mutable_data_ptr()};
}

kernels::DecayMaskBackward kernel_parameters(const DecayMaskBackwardCall& call) {
  return {kernel_mask(call), call.dmask.const_data_ptr(), data_or_null(call.dlog_decay), data_or_null(call.dweight),
          data_or_null(call.dprefix_decay)};
}

}  // namespace violin::ops
