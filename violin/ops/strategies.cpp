#include "violin/ops/strategies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "violin/error.h"

namespace violin::ops {
namespace {

// Insertions, deletions and replacements between two names.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

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
  const auto nearest = std::min_element(names.begin(), names.end(), [&](const auto& a, const auto& b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
  std::string all;
  for (const std::string& known : names) all += (all.empty() ? "" : ", ") + known;
  throw Error("unknown masking strategy '" + std::string(name) + "'; did you mean '" + *nearest + "'? There are " +
              all);
}

bool wants_log_mask(Strategy strategy) {
  return strategy == Strategy::kLog;
}

Tables compose(Strategy strategy, const at::Tensor& mask, const MaybeTensor& alpha) {
  const at::Tensor scaled = alpha.has_value() ? mask * alpha->unsqueeze(-1).unsqueeze(-1) : mask;
  switch (strategy) {
    case Strategy::kMulV1:
      return {.gain = scaled, .bias = {}, .gate = {}, .after = {}};
    case Strategy::kMulV2:
      return {.gain = scaled + 1, .bias = {}, .gate = {}, .after = {}};
    case Strategy::kAddV1:
    case Strategy::kLog:
      return {.gain = {}, .bias = scaled, .gate = {}, .after = {}};
    case Strategy::kMulAfterSm:
      return {.gain = {}, .bias = {}, .gate = scaled, .after = {}};
    case Strategy::kAddAfterSm:
      return {.gain = {}, .bias = {}, .gate = {}, .after = scaled};
  }
  throw Error("a masking strategy that does not exist");
}

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tables& tables,
                            std::optional<double> scale) {
  at::Tensor out = attention(q, k, v, tables.gain, tables.bias, tables.gate, scale);
  if (!tables.after.has_value()) return out;
  // In the type of the mask, which 16 bits do not resolve; [G,h or 1,Nq,Nk] against image b = i G + g.
  const at::Tensor& after = *tables.after;
  const at::Tensor values = v.to(after.scalar_type());
  const at::Tensor added = after.dim() == 3 ? at::matmul(after, values)
                                            : at::matmul(after, values.unflatten(0, {-1, after.size(0)})).flatten(0, 1);
  return (out + added).to(out.scalar_type());
}

}  // namespace violin::ops
