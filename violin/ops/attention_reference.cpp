// Attention in plain tensor operations: the formula as it is written, with everything between the inputs and the
// results in float32 (float64 for float64). It forms [B,h,Nq,Nk], serves every device, and is what the kernels are
// compared with.
#include <ATen/ATen.h>

#include <limits>

#include "violin/ops/attention_backend.h"
#include "violin/ops/checks.h"

namespace violin::ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Splits the batch into [B/G, G] so that image b meets table b mod G by broadcasting.
at::Tensor grouped(const at::Tensor& tensor, std::int64_t groups) {
  return tensor.unflatten(0, {-1, groups});
}

// Q K^T [B,h,Nq,Nk], neither scaled nor multiplied.
at::Tensor products(const AttentionCall& call) {
  const at::ScalarType type = accumulate_type(call.q.scalar_type());
  return at::matmul(call.q.to(type), call.k.to(type).transpose(2, 3));
}

at::Tensor logits(const AttentionCall& call, const at::Tensor& product) {
  at::Tensor result = grouped(product * call.scale, call.groups);
  if (call.gain.defined()) result = result * call.gain;
  if (call.bias.defined()) result = result + call.bias;
  return result.flatten(0, 1);
}

at::Tensor gated(const AttentionCall& call, const at::Tensor& values) {
  return call.gate.defined() ? (grouped(values, call.groups) * call.gate).flatten(0, 1) : values;
}

struct Softmax {
  at::Tensor weights;  // [B,h,Nq,Nk], before the gate
  at::Tensor lse;      // [B,h,Nq]
};

Softmax softmax(const at::Tensor& z) {
  const at::Tensor largest = z.amax(-1, true);
  // A row without a finite logit has weights zero: shifting it by 0 leaves exp(-inf) everywhere.
  const at::Tensor shift = largest.masked_fill(largest == -kInfinity, 0.0);
  const at::Tensor exponentials = (z - shift).exp();
  const at::Tensor sum = exponentials.sum(-1, true);
  return {exponentials / sum.masked_fill(sum == 0, 1.0), (shift + sum.log()).squeeze(-1)};
}

void forward(const AttentionCall& call) {
  const Softmax p = softmax(logits(call, products(call)));
  call.out.copy_(at::matmul(gated(call, p.weights), call.v.to(p.weights.scalar_type())));
  call.lse.copy_(p.lse);
}

void backward(const AttentionBackwardCall& call) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // as in the forward pass
  const at::ScalarType type = accumulate_type(call.q.scalar_type());
  const at::Tensor dout = call.dout.to(type);
  const at::Tensor a = products(call);
  // Not from the saved log-sum-exp, whose last bit is a visible part of a weight where logits are huge.
  const at::Tensor p = softmax(logits(call, a)).weights;
  if (call.dv.defined()) call.dv.copy_(at::matmul(gated(call, p).transpose(2, 3), dout));
  const at::Tensor dweights = at::matmul(dout, call.v.to(type).transpose(2, 3));
  if (call.dgate.defined()) call.dgate.copy_(grouped(p * dweights, call.groups).sum(0));
  const at::Tensor dp = gated(call, dweights);
  const at::Tensor dz = p * (dp - (p * dp).sum(-1, true));
  if (call.dgain.defined()) call.dgain.copy_(grouped(dz * a * call.scale, call.groups).sum(0));
  if (call.dbias.defined()) call.dbias.copy_(grouped(dz, call.groups).sum(0));
  if (!call.dq.defined() && !call.dk.defined()) return;
  at::Tensor da = dz * call.scale;
  if (call.gain.defined()) da = (grouped(da, call.groups) * call.gain).flatten(0, 1);
  if (call.dq.defined()) call.dq.copy_(at::matmul(da, call.k.to(type)));
  if (call.dk.defined()) call.dk.copy_(at::matmul(da.transpose(2, 3), call.q.to(type)));
}

}  // namespace

const AttentionBackend kReferenceAttention = {forward, backward};

}  // namespace violin::ops
