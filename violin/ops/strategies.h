// The published ways of combining a mask M with attention logits A = scale QK^T, as tables of the attention operator.
// alpha [h] multiplies M; without one it is 1.
//
//   mul_v1        softmax(A o alpha M) V            gain = alpha M
//   mul_v2        softmax(A o (1 + alpha M)) V      gain = 1 + alpha M
//   add_v1        softmax(A + alpha M) V            bias = alpha M
//   mul_after_sm  (softmax(A) o alpha M) V          gate = alpha M
//   add_after_sm  softmax(A) V + (alpha M) V        after = alpha M: one more product
//   log           softmax(A + alpha log M) V        bias = alpha log M; the mask comes from decay_mask with log_space
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "violin/ops/ops.h"

namespace violin::ops {

enum class Strategy { kMulV1, kMulV2, kAddV1, kMulAfterSm, kAddAfterSm, kLog };

const char* strategy_name(Strategy strategy);
const std::vector<std::string>& strategy_names();

// Throws violin::Error on an unknown name and suggests the nearest.
Strategy parse_strategy(std::string_view name);

// Whether compose() wants log M instead of M.
bool wants_log_mask(Strategy strategy);

struct Tables {
  MaybeTensor gain, bias, gate;
  MaybeTensor after;   // added to the attention weights behind the softmax
  MaybeTensor handle;  // of a gain that is packed: takes its gradient
};

// mask [h or 1,N,N], with G in front or without.
Tables compose(Strategy strategy, const at::Tensor& mask, const MaybeTensor& alpha = {});

// [B,h,Nq,d] like attention(), with the product of `after` added where there is one.
at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tables& tables,
                            std::optional<double> scale = {});

}  // namespace violin::ops
