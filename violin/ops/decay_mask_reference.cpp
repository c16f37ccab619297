// The decay mask in plain tensor operations: a power per element and curve, [G,C,h,N,N] at a time.
#include <ATen/ATen.h>

#include "violin/ops/decay_mask_backend.h"

namespace violin::ops {
namespace {

using at::indexing::Slice;

// |ranks_i - ranks_j| as [G,C,A,1,N,N]: the size-1 dimension is the heads'.
at::Tensor distances(const DecayMaskCall& call) {
  const at::Tensor ranks = call.ranks.to(call.log_decay.scalar_type());
  return (ranks.unsqueeze(-1) - ranks.unsqueeze(-2)).abs().unsqueeze(3);
}

// sum_a log_decay * distance: [G,C,h,N,N]. A decay of -inf at distance 0 is no decay.
at::Tensor exponents(const DecayMaskCall& call, const at::Tensor& distance) {
  const at::Tensor decay = call.decay_per_axis ? call.log_decay : call.log_decay.unsqueeze(1);
  const at::Tensor along = call.decay_per_axis ? distance : distance.sum(2, true);
  const at::Tensor product = decay.unsqueeze(-1).unsqueeze(-1) * along;
  return product.masked_fill(along == 0, 0.0).sum(2);
}

// [C,h,1,1]
at::Tensor weights(const DecayMaskCall& call) {
  if (call.weight.defined()) return call.weight.unsqueeze(-1).unsqueeze(-1);
  const std::int64_t curves = call.ranks.size(1);
  return at::full({curves, call.log_decay.size(-1), 1, 1}, 1.0 / static_cast<double>(curves), call.log_decay.options());
}

struct LogSum {
  at::Tensor shifted;  // exp(s_c - m) [G,C,h,N,N]
  at::Tensor total;    // sum_c w_c exp(s_c - m) [G,1,h,N,N]
  at::Tensor largest;  // m
};

LogSum log_sum(const at::Tensor& s, const at::Tensor& w) {
  LogSum result;
  result.largest = (s + w.abs().log()).amax(1, true).clamp_min(-1e30);
  result.shifted = (s - result.largest).clamp_max(80.0).exp();
  result.total = (w * result.shifted).sum(1, true);
  return result;
}

void forward(const DecayMaskCall& call) {
  const std::int64_t prefix = call.prefix;
  const at::Tensor s = exponents(call, distances(call)), w = weights(call);
  at::Tensor patches;
  if (call.log_space) {
    const LogSum sum = log_sum(s, w);
    patches = (sum.largest + sum.total.log()).squeeze(1);
  } else {
    patches = call.weight.defined() ? (w * s.exp()).sum(1) : s.exp().mean(1);
  }
  at::Tensor outside = at::zeros({call.log_decay.size(-1), 1, 1}, call.log_decay.options());
  if (call.prefix_decay.defined()) outside = call.prefix_decay.unsqueeze(-1).unsqueeze(-1);
  call.mask.copy_(call.log_space ? outside : outside.exp());
  call.mask.diagonal(0, 2, 3).fill_(call.log_space ? 0 : 1);
  call.mask.index({Slice(), Slice(), Slice(prefix), Slice(prefix)}).copy_(patches);
}

void backward(const DecayMaskBackwardCall& call) {
  const std::int64_t prefix = call.prefix;
  if (call.dprefix_decay.defined()) {
    at::Tensor outside = call.dmask.clone();
    outside.index({Slice(), Slice(), Slice(prefix), Slice(prefix)}).zero_();
    outside.diagonal(0, 2, 3).zero_();
    const at::Tensor sum = outside.sum({0, 2, 3});
    call.dprefix_decay.copy_(call.log_space ? sum : sum * call.prefix_decay.exp());
  }
  if (!call.dlog_decay.defined() && !call.dweight.defined()) return;
  const at::Tensor distance = distances(call), w = weights(call);
  at::Tensor slope = exponents(call, distance);  // of the mask by the weight of each curve, [G,C,h,N,N]
  if (call.log_space) {
    const LogSum sum = log_sum(slope, w);
    slope = sum.shifted / sum.total;
  } else {
    slope = slope.exp();
  }
  slope = slope * call.dmask.index({Slice(), Slice(), Slice(prefix), Slice(prefix)}).unsqueeze(1);
  if (call.dweight.defined()) call.dweight.copy_(slope.sum({0, 3, 4}));
  if (!call.dlog_decay.defined()) return;
  // [G,C,A or 1,h,N,N] summed to [C,A,h] or [C,h]
  const at::Tensor along = call.decay_per_axis ? distance : distance.sum(2, true);
  const at::Tensor sum = ((w * slope).unsqueeze(2) * along).sum({0, 4, 5});
  call.dlog_decay.copy_(call.decay_per_axis ? sum : sum.squeeze(1));
}

}  // namespace

const DecayMaskBackend kReferenceDecayMask = {forward, backward};

}  // namespace violin::ops
