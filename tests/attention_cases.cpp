#include "tests/attention_cases.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/attention_cases_json.h"
#include "violin/error.h"

namespace violin::tests {
namespace {

using Json = nlohmann::json;

// One object for each choice among the entries of lists, in the order of the keys. A beta of two numbers is one value.
std::vector<Json> expand(const Json& object) {
  for (const auto& [key, value] : object.items()) {
    const bool is_choice = value.is_array() && (key != "beta" || value.at(0).is_array());
    if (!is_choice) continue;
    std::vector<Json> result;
    for (const Json& entry : value) {
      Json chosen = object;
      chosen[key] = entry;
      std::string text = entry.is_string() ? entry.get<std::string>() : entry.is_null() ? "none" : entry.dump();
      std::string name = chosen["name"].get<std::string>();
      name.append(", ").append(key).append(" ").append(text);
      chosen["name"] = name;
      for (Json& deeper : expand(chosen)) result.push_back(std::move(deeper));
    }
    return result;
  }
  return {object};
}

at::ScalarType parse_dtype(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "float64") return at::kDouble;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  throw Error("attention_cases.json names the type '" + name + "'");
}

AttentionCase parse_case(const Json& json) {
  const auto word = [&](const char* key) {
    return json.at(key).is_null() ? std::string() : json.at(key).get<std::string>();
  };
  AttentionCase result;
  result.name = word("name");
  result.batch = json.at("batch");
  result.heads = json.at("heads");
  result.queries = json.at("queries");
  result.keys = json.at("keys").is_null() ? result.queries : json.at("keys").get<std::int64_t>();
  result.dim = json.at("dim");
  result.groups = json.at("groups");
  result.prefix = json.at("prefix");
  result.dtype = parse_dtype(word("dtype"));
  result.magnitude = json.at("magnitude");
  result.beta_low = json.at("beta").at(0);
  result.beta_high = json.at("beta").at(1);
  if (!json.at("scale").is_null()) result.scale = json.at("scale").get<double>();
  result.gain = word("gain");
  result.bias = word("bias");
  result.gate = word("gate");
  result.heads_of_tables = word("heads_of_tables");
  result.strategy = word("strategy");
  result.layout = word("layout");
  return result;
}

// Every case of one list of the table.
std::vector<AttentionCase> parse_list(const char* list) {
  const Json json = Json::parse(kAttentionCasesJson);
  std::vector<AttentionCase> result;
  for (const Json& entry : json.at(list)) {
    Json complete = json.at("defaults");
    complete.update(entry);
    for (const Json& one : expand(complete)) result.push_back(parse_case(one));
  }
  return result;
}

// q, k and v as the layout says, before the type is set: [B,h,N,d].
std::vector<at::Tensor> make_heads(const AttentionCase& c, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  if (c.layout == "packed") {
    at::Tensor qkv = at::randn({c.batch, c.queries, 3, c.heads, c.dim}, options);
    qkv.select(2, 0).mul_(c.magnitude);
    qkv = qkv.to(dtype);
    return {qkv.select(2, 0).transpose(1, 2), qkv.select(2, 1).transpose(1, 2), qkv.select(2, 2).transpose(1, 2)};
  }
  std::vector<at::Tensor> result;
  for (const std::int64_t tokens : {c.queries, c.keys, c.keys}) {
    const double factor = result.empty() ? c.magnitude : 1.0;
    if (c.layout == "tokens") {
      result.push_back((at::randn({c.batch, tokens, c.heads, c.dim}, options) * factor).to(dtype).transpose(1, 2));
    } else if (c.layout == "padded") {
      const at::Tensor wide = (at::randn({c.batch, c.heads, tokens, c.dim + 5}, options) * factor).to(dtype);
      result.push_back(wide.narrow(3, 3, c.dim));
    } else {
      result.push_back((at::randn({c.batch, c.heads, tokens, c.dim}, options) * factor).to(dtype));
    }
  }
  return result;
}

at::Tensor decay_mask_of(const AttentionCase& c, bool log_space) {
  const at::Tensor ranks = published_ranks(c.queries - c.prefix);
  const at::Tensor log_decay = spread_log_decay(ranks.size(0), c.heads, c.beta_low, c.beta_high);
  return ops::decay_mask(ranks, log_decay, {}, c.prefix, {}, log_space);
}

ops::MaybeTensor make_table(const AttentionCase& c, const std::string& kind, const char* which, at::ScalarType type) {
  if (kind.empty()) return {};
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const std::int64_t heads = c.heads_of_tables == "one" ? 1 : c.heads, groups = std::max<std::int64_t>(c.groups, 1);
  at::Tensor table;
  if (kind == "mask") {
    table = decay_mask_of(c, false).unsqueeze(0).expand({groups, heads, c.queries, c.keys}).contiguous();
  } else if (std::string(which) == "gain") {
    table = at::rand({groups, heads, c.queries, c.keys}, options) * 1.6 - 0.1;
  } else if (std::string(which) == "gate") {
    table = at::rand({groups, heads, c.queries, c.keys}, options) * 1.5;
  } else {
    table = at::randn({groups, heads, c.queries, c.keys}, options);
  }
  if (kind == "rows") {
    const double infinity = std::numeric_limits<double>::infinity();
    table.masked_fill_(at::rand(table.sizes(), options) < 0.2, -infinity);
    // Every third row, the first among them, has no key at all.
    for (std::int64_t row = 0; row < c.queries; row += 3) table.select(2, row).fill_(-infinity);
  }
  if (c.groups == 0) table = table.squeeze(0);
  return table.to(type);
}

}  // namespace

const std::vector<AttentionCase>& attention_cases() {
  static const std::vector<AttentionCase> cases = parse_list("cases");
  return cases;
}

const std::vector<AttentionCase>& bench_cases() {
  static const std::vector<AttentionCase> cases = parse_list("bench");
  return cases;
}

at::Tensor spread_log_decay(std::int64_t curves, std::int64_t heads, double low, double high) {
  const at::Tensor beta = at::linspace(low, high, curves * heads, at::kDouble).view({curves, heads});
  return -at::softplus(-beta);
}

at::Tensor published_ranks(std::int64_t tokens) {
  auto height = static_cast<std::int64_t>(std::sqrt(static_cast<double>(tokens)));
  while (height > 1 && tokens % height != 0) --height;
  return ops::curve_ranks("violin", {height, tokens / height});
}

AttentionInputs make_inputs(const AttentionCase& c) {
  torch::manual_seed(std::hash<std::string>{}(c.name));
  const at::ScalarType table_type = c.dtype == at::kDouble ? at::kDouble : at::kFloat;
  AttentionInputs inputs;
  const std::vector<at::Tensor> heads = make_heads(c, c.dtype);
  inputs.q = heads[0];
  inputs.k = heads[1];
  inputs.v = heads[2];
  inputs.dout = at::randn({c.batch, c.heads, c.queries, c.dim}, at::kDouble).to(c.dtype);
  inputs.scale = c.scale;
  if (!c.strategy.empty()) {
    const ops::Strategy strategy = ops::parse_strategy(c.strategy);
    const at::Tensor mask = decay_mask_of(c, ops::wants_log_mask(strategy));
    const at::Tensor alpha = at::randn({c.heads}, at::kDouble) * 0.3 + 1;
    inputs.tables = ops::compose(strategy, mask, alpha);
    for (ops::MaybeTensor* table :
         {&inputs.tables.gain, &inputs.tables.bias, &inputs.tables.gate, &inputs.tables.after}) {
      if (table->has_value()) *table = (*table)->to(table_type);
    }
  } else {
    inputs.tables.gain = make_table(c, c.gain, "gain", table_type);
    inputs.tables.bias = make_table(c, c.bias, "bias", table_type);
    inputs.tables.gate = make_table(c, c.gate, "gate", table_type);
  }
  return inputs;
}

}  // namespace violin::tests
