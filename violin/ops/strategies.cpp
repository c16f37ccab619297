#include "violin/ops/strategies.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "violin/error.h"
#include "violin/text.h"

namespace violin::ops {

const std::vector<std::string>& strategy_names() {
  static const std::vector<std::string> names = {"mul_v1", "mul_v2", "add_v1", "mul_after_sm", "add_after_sm", "log"};
  return names;
}

const char* strategy_name(Strategy strategy) {
  return strategy_names()[static_cast<std::size_t>(strategy)].c_str();
}

Strategy parse_strategy(std::string_view name) {
  const std::vector<std::string>& names = strategy_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return static_cast<Strategy>(found - names.begin());
  throw Error("unknown masking strategy " + in_quotes(name) + did_you_mean(name, names, ".") + " There are " +
              joined(names));
}

bool wants_log_mask(Strategy strategy) {
  return strategy == Strategy::kLog;
}

Tables compose(Strategy strategy, const at::Tensor& mask, const MaybeTensor& alpha) {
  const at::Tensor scaled = alpha.has_value() ? mask * alpha->unsqueeze(-1).unsqueeze(-1) : mask;
  switch (strategy) {
    case Strategy::kMulV1:
      return {.gain = scaled, .bias = {}, .gate = {}, .after = {}, .handle = {}};
    case Strategy::kMulV2:
      return {.gain = scaled + 1, .bias = {}, .gate = {}, .after = {}, .handle = {}};
    case Strategy::kAddV1:
    case Strategy::kLog:
      return {.gain = {}, .bias = scaled, .gate = {}, .after = {}, .handle = {}};
    case Strategy::kMulAfterSm:
      return {.gain = {}, .bias = {}, .gate = scaled, .after = {}, .handle = {}};
    case Strategy::kAddAfterSm:
      return {.gain = {}, .bias = {}, .gate = {}, .after = scaled, .handle = {}};
  }
  throw Error("a masking strategy that does not exist");
}

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tables& tables,
                            std::optional<double> scale) {
  at::Tensor out = attention(q, k, v, tables.gain, tables.bias, tables.gate, scale, tables.handle);
  if (!tables.after.has_value()) return out;
  // In the type of the mask, which 16 bits do not resolve; [G,h or 1,Nq,Nk] against image b = i G + g.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor& after = *tables.after;
  const at::Tensor values = v.to(after.scalar_type());
  const at::Tensor added = after.dim() == 3 ? at::matmul(after, values)
                                            : at::matmul(after, values.unflatten(0, {-1, after.size(0)})).flatten(0, 1);
  return (out + added).to(out.scalar_type());
}

}  // namespace violin::ops
