// Attention and decay mask as formulas in torch's own operations, differentiated by torch: what the operators are
// judged by.
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>

#include "tests/attention_cases.h"
#include "violin/ops/path.h"
#include "violin/ops/strategies.h"

namespace violin::tests {

// softmax(scale QK^T o gain + bias) o gate, plus `after`, times V; products in the type of q, k and v, the rest in that
// of the tables. Rows of the bias that are all -inf give weights zero.
at::Tensor formula_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ops::Tables& tables,
                             std::optional<double> scale);

// "out" and the gradients of sum(out * dout): "dq", "dk", "dv", and "dgain", "dbias", "dgate", "dafter" where there are
// tables.
using Results = std::map<std::string, at::Tensor>;

using AttentionFunction = at::Tensor (*)(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                         const ops::Tables& tables, std::optional<double> scale);
Results run(AttentionFunction function, const AttentionInputs& inputs);

// log(sum(exp(logits))) [B,h,Nq].
at::Tensor formula_lse(const AttentionInputs& inputs);

// The same inputs in another type, exactly.
AttentionInputs converted(const AttentionInputs& inputs, at::ScalarType type);

// Largest absolute value, and largest difference; 0 for empty tensors.
double largest(const at::Tensor& tensor);
double difference(const at::Tensor& a, const at::Tensor& b);

// The mask of violin/kernels/decay_mask.h in float64.
at::Tensor formula_mask(const at::Tensor& ranks, const at::Tensor& log_decay, const ops::MaybeTensor& weight,
                        std::int64_t prefix, const ops::MaybeTensor& prefix_decay, bool log_space);

// Selects a path for the life of the object.
class PathGuard {
 public:
  explicit PathGuard(ops::Path path) { ops::set_path(path); }
  ~PathGuard() { ops::set_path(std::nullopt); }
  PathGuard(const PathGuard&) = delete;
  PathGuard& operator=(const PathGuard&) = delete;
};

}  // namespace violin::tests
