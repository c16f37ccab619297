#include "tests/ops/formula.h"

#include <cmath>
#include <limits>

namespace violin::tests {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// [G or nothing, h or 1, Nq, Nk] repeated for every image: [B,h or 1,Nq,Nk].
at::Tensor for_batch(const at::Tensor& table, std::int64_t batch) {
  if (table.dim() == 3) return table.unsqueeze(0);
  return table.repeat({batch / table.size(0), 1, 1, 1});
}

// oneDNN takes processors at their word about AMX, which virtual machines may announce and then refuse: the formula's
// 16-bit products are left to torch's own code.
class WithoutOnednn {
 public:
  WithoutOnednn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOnednn() { at::globalContext().setUserEnabledMkldnn(before_); }
  WithoutOnednn(const WithoutOnednn&) = delete;
  WithoutOnednn& operator=(const WithoutOnednn&) = delete;

 private:
  bool before_ = at::globalContext().userEnabledMkldnn();
};

// scale QK^T o gain + bias [B,h,Nq,Nk]; the product in the type of q and k, the rest in that of the tables.
at::Tensor formula_logits(const at::Tensor& q, const at::Tensor& k, const ops::Tables& tables,
                          std::optional<double> scale) {
  const at::ScalarType wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor z =
      torch::matmul(q, k.transpose(2, 3)).to(wide) * scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  if (tables.gain.has_value()) z = z * for_batch(*tables.gain, q.size(0));
  if (tables.bias.has_value()) z = z + for_batch(*tables.bias, q.size(0));
  return z;
}

}  // namespace

at::Tensor formula_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ops::Tables& tables,
                             std::optional<double> scale) {
  const at::Tensor z = formula_logits(q, k, tables, scale);
  const at::Tensor hopeless = (z == -kInfinity).all(-1, true);
  at::Tensor p = torch::softmax(z.masked_fill(hopeless, 0.0), -1).masked_fill(hopeless, 0.0);
  if (tables.gate.has_value()) p = p * for_batch(*tables.gate, q.size(0));
  if (tables.after.has_value()) p = p + for_batch(*tables.after, q.size(0));
  return torch::matmul(p.to(v.scalar_type()), v);
}

at::Tensor formula_lse(const AttentionInputs& inputs) {
  const WithoutOnednn guard;
  return at::logsumexp(formula_logits(inputs.q, inputs.k, inputs.tables, inputs.scale), -1);
}

Results run(AttentionFunction function, const AttentionInputs& inputs) {
  const WithoutOnednn guard;
  std::vector<std::string> names = {"dq", "dk", "dv"};
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& tensor : {inputs.q, inputs.k, inputs.v}) leaves.push_back(tensor.detach().requires_grad_());
  ops::Tables tables;
  const auto add = [&](const char* name, const ops::MaybeTensor& from, ops::MaybeTensor& to) {
    if (!from.has_value()) return;
    to = from->detach().requires_grad_();
    names.emplace_back(name);
    leaves.push_back(*to);
  };
  add("dgain", inputs.tables.gain, tables.gain);
  add("dbias", inputs.tables.bias, tables.bias);
  add("dgate", inputs.tables.gate, tables.gate);
  add("dafter", inputs.tables.after, tables.after);
  const at::Tensor out = function(leaves[0], leaves[1], leaves[2], tables, inputs.scale);
  const auto gradients = torch::autograd::grad({out}, leaves, {inputs.dout});
  Results results{{"out", out.detach()}};
  for (std::size_t i = 0; i < names.size(); ++i) results[names[i]] = gradients[i];
  return results;
}

AttentionInputs converted(const AttentionInputs& inputs, at::ScalarType type) {
  AttentionInputs result = inputs;
  for (at::Tensor* tensor : {&result.q, &result.k, &result.v, &result.dout}) *tensor = tensor->to(type);
  for (ops::MaybeTensor* table :
       {&result.tables.gain, &result.tables.bias, &result.tables.gate, &result.tables.after}) {
    if (table->has_value()) *table = (*table)->to(type);
  }
  return result;
}

double largest(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0.0 : tensor.to(at::kDouble).abs().max().item<double>();
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return largest(a.to(at::kDouble) - b.to(at::kDouble));
}

at::Tensor formula_mask(const at::Tensor& ranks, const at::Tensor& log_decay, const ops::MaybeTensor& weight,
                        std::int64_t prefix, const ops::MaybeTensor& prefix_decay, bool log_space) {
  using at::indexing::Slice;
  at::Tensor r = ranks.to(at::kDouble);
  if (r.dim() == 2) r = r.unsqueeze(1);
  if (r.dim() == 3) r = r.unsqueeze(0);
  const at::Tensor distance = (r.unsqueeze(-1) - r.unsqueeze(-2)).abs().unsqueeze(3);  // [G,C,A,1,N,N]
  const at::Tensor decay = log_decay.dim() == 3 ? log_decay : log_decay.unsqueeze(1);  // [C,A,h]
  const at::Tensor s = (decay.unsqueeze(-1).unsqueeze(-1) * distance).sum(2);          // [G,C,h,N,N]
  const std::int64_t curves = r.size(1), heads = log_decay.size(-1), side = prefix + r.size(3);
  at::Tensor w =
      weight.has_value() ? *weight : at::full({curves, heads}, 1.0 / static_cast<double>(curves), s.options());
  w = w.unsqueeze(-1).unsqueeze(-1);
  const at::Tensor patches = log_space ? torch::logsumexp(s + w.log(), 1) : (w * s.exp()).sum(1);
  at::Tensor outside = prefix_decay.has_value() ? *prefix_decay : at::zeros({heads}, s.options());
  outside = (log_space ? outside : outside.exp()).view({1, heads, 1, 1});
  at::Tensor mask = outside.expand({r.size(0), heads, side, side}).clone();
  mask.diagonal(0, 2, 3).fill_(log_space ? 0 : 1);
  mask.index_put_({Slice(), Slice(), Slice(prefix), Slice(prefix)}, patches);
  return ranks.dim() == 4 ? mask : mask.squeeze(0);
}

}  // namespace violin::tests
