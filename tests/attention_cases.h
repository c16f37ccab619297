// The table of attention calls in attention_cases.json, and the tensors of a case.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "violin/ops/strategies.h"

namespace violin::tests {

struct AttentionCase {
  std::string name;  // with the entries that were chosen from lists: "tokens, queries 17"
  std::int64_t batch, heads, queries, keys, dim, groups, prefix;
  at::ScalarType dtype;
  double magnitude, beta_low, beta_high;
  std::optional<double> scale;
  std::string gain, bias, gate;  // empty: none
  std::string heads_of_tables, strategy, layout;
};

// Every case that is tested, lists expanded.
const std::vector<AttentionCase>& attention_cases();

// The calls that violin bench times.
const std::vector<AttentionCase>& bench_cases();

// Leaves of one call. dout is what is propagated back.
struct AttentionInputs {
  at::Tensor q, k, v, dout;  // [B,h,N,d] in the case's layout and type
  ops::Tables tables;        // leaves of float32, float64 beside float64
  std::optional<double> scale;
};
AttentionInputs make_inputs(const AttentionCase& test_case);

// log gamma = -softplus(-beta) for `curves` x `heads` decay parameters spread over [low, high]; float64.
at::Tensor spread_log_decay(std::int64_t curves, std::int64_t heads, double low, double high);

// int32 ranks [8,1,tokens] of the published curves, on a grid near to a square.
at::Tensor published_ranks(std::int64_t tokens);

}  // namespace violin::tests
