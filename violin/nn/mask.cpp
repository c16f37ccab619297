#include "violin/nn/mask.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/nn/layers.h"

namespace violin::nn {
namespace {

constexpr std::size_t kMaxGrids = 16;  // kept per layer

// max(rate, 0) whose gradient is that of rate everywhere, so that a decay that starts at the bound can leave it.
at::Tensor bounded(const at::Tensor& rate) {
  return rate + (rate.clamp_min(0) - rate).detach();
}

at::Tensor in_full(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? parameter : parameter.to(at::kFloat);
}

// A table of the masked heads among all heads; the others keep `neutral`, which changes nothing.
ops::MaybeTensor spread_heads(const ops::MaybeTensor& table, const std::vector<std::int64_t>& heads,
                              std::int64_t layer_heads, double neutral) {
  if (!table || static_cast<std::int64_t>(heads.size()) == layer_heads) return table;
  const at::Tensor index = at::tensor(heads, at::kLong).to(table->device());
  const at::Tensor all = at::full({layer_heads, table->size(1), table->size(2)}, neutral, table->options());
  return all.index_copy(0, index, *table);
}

}  // namespace

Mask::Mask(const MaskConfig& config, std::int64_t heads, const Size& native, std::shared_ptr<TableBudget> budget)
    : config_(config),
      strategy_(ops::parse_strategy(config.strategy)),
      layer_heads_(heads),
      heads_(config.heads),
      native_tokens_(native.height * native.width),
      budget_(std::move(budget)) {
  check(config);
  if (heads_.empty()) {
    heads_.resize(static_cast<std::size_t>(heads));
    std::iota(heads_.begin(), heads_.end(), std::int64_t{0});
  }
  std::sort(heads_.begin(), heads_.end());
  const auto masked = static_cast<std::int64_t>(heads_.size());
  std::int64_t axes = 1;
  std::vector<double> units;  // per curve
  if (!config.curves.empty()) {
    const std::vector<curves::Curve> parsed = curves::parse_curves(config.curves);
    const curves::Coordinates coordinates = curves::coordinates(parsed, curves::Grid{0, native.height, native.width});
    axes = coordinates.axes;
    const std::int64_t per_curve = axes * coordinates.tokens;
    for (std::size_t c = 0; c < parsed.size(); ++c) {
      names_.push_back(parsed[c].name());
      curve_list_ += (c == 0 ? "" : ",") + parsed[c].name();
      const auto begin = coordinates.values.begin() + static_cast<std::int64_t>(c) * per_curve;
      units.push_back(std::max(1, *std::max_element(begin, begin + per_curve)));
    }
  }
  const auto count = static_cast<std::int64_t>(names_.size());
  const auto parameter = [&](const char* name, at::IntArrayRef sizes) {
    return register_parameter(name, at::empty(sizes, at::kFloat));
  };
  if (count > 0) {
    const std::vector<std::int64_t> decay_sizes = config.decay_per_axis ? std::vector<std::int64_t>{count, axes, masked}
                                                                        : std::vector<std::int64_t>{count, masked};
    if (config.decay) {
      gamma = register_buffer("gamma", at::full(decay_sizes, *config.decay, at::kFloat));
    } else if (config.uses_rate()) {
      rate = parameter("rate", decay_sizes);
      std::vector<std::int64_t> shape(decay_sizes.size(), 1);
      shape[0] = count;
      units_ = at::tensor(units, at::kFloat).view(shape);
    } else {
      beta = parameter("beta", decay_sizes);
    }
    if (config.curve_weights) curve_weight = parameter("curve_weight", {count, masked});
  }
  if (config.alpha) alpha = parameter("alpha", {masked});
  if (config.learned_prefix_decay) {
    if (config.uses_rate()) {
      prefix_rate = parameter("prefix_rate", {masked});
    } else {
      prefix_beta = parameter("prefix_beta", {masked});
    }
  }
}

Mask::~Mask() {
  drop_locked();
}

void Mask::initialise(std::uint64_t seed, const std::string& name) {
  const torch::NoGradGuard no_grad;
  const auto draw = [&](at::Tensor& parameter, const char* short_name, const auto& fill) {
    if (!parameter.defined()) return;
    at::Tensor values = at::empty(parameter.sizes(), at::kFloat);
    fill(values, generator_for(seed, name + "." + short_name));
    parameter.copy_(values);
  };
  const std::string& init = config_.init;
  // Decay lengths from four patches to the whole grid, one per head, growing by equal factors.
  const auto spread = [&](at::Tensor& values, bool as_rate) {
    const std::int64_t heads = values.size(-1);
    for (std::int64_t h = 0; h < heads; ++h) {
      const double share = heads == 1 ? 0.5 : static_cast<double>(h) / static_cast<double>(heads - 1);
      const double shortest = std::min<double>(4, static_cast<double>(native_tokens_));
      const double length = shortest * std::pow(static_cast<double>(native_tokens_) / shortest, share);
      // log gamma = -1/length = -softplus(-beta): beta = -log(expm1(1/length))
      if (as_rate) {
        values.select(-1, h).copy_((units_ / length).select(-1, 0));
      } else {
        values.select(-1, h).fill_(-std::log(std::expm1(1 / length)));
      }
    }
  };
  const auto fill_beta = [&](at::Tensor& values, const at::Generator& generator) {
    if (init == "pretrain") values.uniform_(5, 9, generator);
    if (init == "finetune") values.uniform_(15, 20, generator);
    if (init == "none") values.normal_(0, 0.5, generator);
    if (init == "spread") spread(values, false);
  };
  draw(beta, "beta", fill_beta);
  draw(prefix_beta, "prefix_beta", [&](at::Tensor& values, const at::Generator& generator) {
    init == "spread" ? values.fill_(9.0) : (fill_beta(values, generator), values);
  });
  draw(rate, "rate", [&](at::Tensor& values, const at::Generator& generator) {
    if (init == "identity") {
      values.zero_();
    } else if (init == "spread") {
      spread(values, true);
    } else {
      // The same decay as the other parameterisation would start with.
      fill_beta(values, generator);
      values.copy_(-at::log_sigmoid(values) * units_.to(at::kCPU, at::kFloat));
    }
  });
  draw(prefix_rate, "prefix_rate", [&](at::Tensor& values, const at::Generator&) { values.zero_(); });
  draw(curve_weight, "curve_weight",
       [&](at::Tensor& values, const at::Generator&) { values.fill_(1.0 / static_cast<double>(names_.size())); });
  draw(alpha, "alpha", [&](at::Tensor& values, const at::Generator& generator) {
    if (init == "pretrain" || init == "none") values.normal_(0, 0.5, generator);
    if (init == "finetune") values.normal_(1, 0.02, generator);
    if (init == "spread") values.fill_(1);
    if (init == "identity") {
      const bool adds = strategy_ == ops::Strategy::kMulV2 || strategy_ == ops::Strategy::kAddV1 ||
                        strategy_ == ops::Strategy::kAddAfterSm;
      values.fill_(adds ? 0 : 1);
    }
  });
  drop_tables();
}

at::Tensor Mask::log_decay() const {
  if (gamma.defined()) return in_full(gamma).log();
  if (beta.defined()) return at::log_sigmoid(in_full(beta));
  if (!rate.defined()) throw Error("this mask has no curves and so no decay");
  return -bounded(in_full(rate)) / units_;
}

void Mask::set_log_decay(const at::Tensor& log_decay) {
  const torch::NoGradGuard no_grad;
  if (!rate.defined()) throw Error("only masks with the parameterisation 'rate' take a given decay");
  rate.copy_(-log_decay * units_);
  drop_tables();
}

at::Tensor Mask::prefix_decay() const {
  if (prefix_beta.defined()) return at::log_sigmoid(in_full(prefix_beta));
  if (prefix_rate.defined()) return -bounded(in_full(prefix_rate));
  return {};
}

at::Tensor Mask::any_parameter() const {
  for (const at::Tensor* tensor : {&beta, &rate, &gamma, &alpha})
    if (tensor->defined()) return *tensor;
  return {};
}

at::Tensor Mask::ranks(const Size& grid, const at::Device& device) {
  for (const auto& [size, tensor] : ranks_)
    if (size == grid && tensor.device() == device) return tensor;
  if (ranks_.size() >= kMaxGrids) ranks_.erase(ranks_.begin());
  const at::Tensor made = ops::curve_ranks(curve_list_, {grid.height, grid.width}).to(device);
  ranks_.emplace_back(grid, made);
  return made;
}

at::Tensor Mask::mask(const Size& grid, std::int64_t prefix) {
  const std::lock_guard lock(mutex_);
  return mask_locked(grid, prefix);
}

at::Tensor Mask::mask_locked(const Size& grid, std::int64_t prefix) {
  const bool log_space = ops::wants_log_mask(strategy_);
  if (names_.empty()) {
    const std::int64_t tokens = prefix + grid.height * grid.width;
    const at::Tensor like = in_full(any_parameter());
    return at::full({static_cast<std::int64_t>(heads_.size()), tokens, tokens}, log_space ? 0.0 : 1.0,
                    like.options().requires_grad(false));
  }
  const at::Tensor decay = log_decay();
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? ops::MaybeTensor(tensor) : std::nullopt;
  };
  const at::Tensor weight = curve_weight.defined() ? in_full(curve_weight) : at::Tensor();
  return ops::decay_mask(ranks(grid, decay.device()), decay, optional(weight), prefix, optional(prefix_decay()),
                         log_space);
}

ops::Tables Mask::build(const Size& grid, std::int64_t prefix) {
  const ops::MaybeTensor factor = alpha.defined() ? ops::MaybeTensor(in_full(alpha)) : std::nullopt;
  ops::Tables tables = ops::compose(strategy_, mask_locked(grid, prefix), factor);
  tables.gain = spread_heads(tables.gain, heads_, layer_heads_, 1);
  tables.bias = spread_heads(tables.bias, heads_, layer_heads_, 0);
  tables.gate = spread_heads(tables.gate, heads_, layer_heads_, 1);
  tables.after = spread_heads(tables.after, heads_, layer_heads_, 0);
  return tables;
}

std::vector<std::pair<const void*, std::int64_t>> Mask::state() const {
  std::vector<std::pair<const void*, std::int64_t>> result;
  for (const at::Tensor* tensor : {&beta, &rate, &gamma, &alpha, &curve_weight, &prefix_beta, &prefix_rate}) {
    if (!tensor->defined()) continue;
    const std::int64_t version = tensor->is_inference() ? 0 : static_cast<std::int64_t>(tensor->_version());
    result.emplace_back(tensor->const_data_ptr(), version);
  }
  return result;
}

bool Mask::needs_gradient() const {
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor* tensor : {&beta, &rate, &alpha, &curve_weight, &prefix_beta, &prefix_rate})
    if (tensor->defined() && tensor->requires_grad()) return true;
  return false;
}

ops::Tables Mask::tables(const Size& grid, std::int64_t prefix) {
  const std::lock_guard lock(mutex_);
  if (!frozen_ && (is_training() || needs_gradient())) return build(grid, prefix);
  const auto now = state();
  for (auto entry = kept_.begin(); entry != kept_.end(); ++entry) {
    if (entry->grid != grid || entry->prefix != prefix) continue;
    if (frozen_ || entry->state == now) {
      kept_.splice(kept_.begin(), kept_, entry);
      return kept_.front().tables;
    }
    drop_locked();  // parameters changed: every table is stale
    break;
  }
  // Ordinary tensors even inside an inference-mode block, so that later calls may use them anywhere.
  const c10::InferenceMode ordinary(false);
  const torch::NoGradGuard no_grad;
  Kept entry{grid, prefix, now, build(grid, prefix), 0};
  for (const ops::MaybeTensor* table :
       {&entry.tables.gain, &entry.tables.bias, &entry.tables.gate, &entry.tables.after})
    if (*table) entry.bytes += static_cast<std::int64_t>((*table)->nbytes());
  ops::Tables result = entry.tables;
  while (!frozen_ && kept_.size() >= kMaxGrids) {
    budget_->used -= kept_.back().bytes;
    kept_.pop_back();
  }
  if (frozen_ || budget_->used + entry.bytes <= budget_->limit) {
    budget_->used += entry.bytes;
    kept_.push_front(std::move(entry));
  }
  return result;
}

void Mask::freeze(const Size& grid, std::int64_t prefix) {
  {
    const std::lock_guard lock(mutex_);
    frozen_ = true;
  }
  for (at::Tensor& parameter : parameters()) parameter.requires_grad_(false);
  tables(grid, prefix);
}

void Mask::thaw() {
  for (at::Tensor& parameter : parameters()) parameter.requires_grad_(true);
  const std::lock_guard lock(mutex_);
  frozen_ = false;
  drop_locked();
}

void Mask::drop_tables() {
  const std::lock_guard lock(mutex_);
  if (!frozen_) drop_locked();
}

void Mask::drop_locked() {
  for (const Kept& entry : kept_) budget_->used -= entry.bytes;
  kept_.clear();
}

std::int64_t Mask::kept_tables() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(kept_.size());
}

void Mask::train(bool on) {
  torch::nn::Module::train(on);
  drop_tables();
}

void Mask::moved() {
  const std::lock_guard lock(mutex_);
  drop_locked();
  if (rate.defined()) units_ = units_.to(in_full(rate).options());
}

void Mask::to(at::Device device, at::ScalarType dtype, bool non_blocking) {
  torch::nn::Module::to(device, dtype, non_blocking);
  moved();
}

void Mask::to(at::ScalarType dtype, bool non_blocking) {
  torch::nn::Module::to(dtype, non_blocking);
  moved();
}

void Mask::to(at::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking);
  moved();
}

}  // namespace violin::nn
