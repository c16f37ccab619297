#include "violin/nn/mask.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/nn/layers.h"
#include "violin/ops/decay_gain.h"
#include "violin/ops/device.h"
#include "violin/ops/path.h"

namespace violin::nn {
namespace {

constexpr std::size_t kMaxGrids = 16;                        // kept per layer
constexpr std::int64_t kTogether = std::int64_t{256} << 20;  // bytes of tables that layers build in one call
// The same where gains are packed: what is there at the same time is their gradients.
constexpr std::int64_t kPackedTogether = std::int64_t{512} << 20;

constexpr std::array kMaskParameters = {
    &MaskParameters::beta,         &MaskParameters::rate,        &MaskParameters::gamma,      &MaskParameters::alpha,
    &MaskParameters::curve_weight, &MaskParameters::prefix_beta, &MaskParameters::prefix_rate};

// max(rate, 0) whose gradient is that of rate everywhere, so that a decay that starts at the bound can leave it.
at::Tensor bounded(const at::Tensor& rate) {
  return rate + (rate.clamp_min(0) - rate).detach();
}

at::Tensor in_full(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? parameter : parameter.to(at::kFloat);
}

at::ScalarType wide_enough(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

template <class Tables>
auto each(Tables& tables) {
  return std::array{&tables.gain, &tables.bias, &tables.gate, &tables.after};
}

ops::MaybeTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? ops::MaybeTensor(in_full(tensor)) : std::nullopt;
}

// Parameters of layers side by side along the heads. Of their gradient every layer gets a part that is contiguous, so
// that nobody copies it once more.
struct HeadsJoined : torch::autograd::Function<HeadsJoined> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::TensorList parts) {
    context->saved_data["layers"] = static_cast<std::int64_t>(parts.size());
    return at::cat(parts, -1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const std::int64_t layers = context->saved_data["layers"].toInt();
    return gradients[0].unflatten(-1, {layers, -1}).movedim(-2, 0).contiguous().unbind(0);
  }
};

at::Tensor log_prefix_decay(const MaskParameters& parameters) {
  if (parameters.prefix_beta.defined()) return at::log_sigmoid(in_full(parameters.prefix_beta));
  if (parameters.prefix_rate.defined()) return -bounded(in_full(parameters.prefix_rate));
  return {};
}

// A table of the masked heads among all heads; the others keep `neutral`, which changes nothing.
ops::MaybeTensor spread_heads(const ops::MaybeTensor& table, const at::Tensor& heads, std::int64_t layer_heads,
                              double neutral) {
  if (!table || heads.size(0) == layer_heads) return table;
  const at::Tensor all = at::full({layer_heads, table->size(1), table->size(2)}, neutral, table->options());
  return all.index_copy(0, heads.to(table->device()), *table);
}

// The device of what `tables` hold, if it is a GPU.
template <class Tables>
std::optional<at::Device> gpu_of(const Tables& tables) {
  for (const ops::MaybeTensor* table : each(tables))
    if (*table && (*table)->is_cuda()) return (*table)->device();  // all are there
  return std::nullopt;
}

c10::Stream gpu_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device);
}

// What one thread's stream has made another's may read, and its memory is then not given away before that is done.
void read_in_this_stream(const at::Tensor& tensor, const c10::Stream& made_in) {
  const c10::Stream reader = gpu_stream(made_in.device());
  if (reader != made_in) tensor.record_stream(reader);
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
  head_index_ = at::tensor(heads_, at::kLong);
  const auto masked = static_cast<std::int64_t>(heads_.size());
  std::int64_t axes = 1;
  std::vector<double> units;  // per curve: the largest coordinate
  if (!config.curves.empty()) {
    curves::check_grid({0, native.height, native.width});
    for (const curves::Curve& curve : curves::parse_curves(config.curves)) {
      curve_list_ += (names_.empty() ? "" : ",") + curve.name();
      names_.push_back(curve.name());
      const bool by_axis = curve.kind == curves::Kind::kManhattan;
      if (by_axis) axes = 2;
      const std::int64_t last = (by_axis ? std::max(native.height, native.width) : native_tokens_) - 1;
      units.push_back(static_cast<double>(std::max<std::int64_t>(1, last)));
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
  forget(kept_);
  forget(frozen_);
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
    // What add_v1 adds must differ within a row, or neither the decay nor alpha, which is 0, ever has a gradient.
    if (init == "identity" && strategy_ != ops::Strategy::kAddV1) {
      values.zero_();
    } else if (init == "identity" || init == "spread") {
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
  return log_decay(*this);
}

at::Tensor Mask::log_decay(const MaskParameters& parameters) const {
  if (parameters.gamma.defined()) return in_full(parameters.gamma).log();
  if (parameters.beta.defined()) return at::log_sigmoid(in_full(parameters.beta));
  if (!parameters.rate.defined()) throw Error("this mask has no curves and so no decay");
  return -bounded(in_full(parameters.rate)) / units_;
}

void Mask::set_log_decay(const at::Tensor& log_decay) {
  const torch::NoGradGuard no_grad;
  if (!rate.defined()) throw Error("only masks with the parameterisation 'rate' take a given decay");
  rate.copy_(-log_decay * units_);
  drop_tables();
}

at::Tensor Mask::ranks(const Size& grid, const at::Device& device) {
  for (const Ranks& known : ranks_) {
    if (known.grid != grid || known.tensor.device() != device) continue;
    if (known.stream) read_in_this_stream(known.tensor, *known.stream);
    return known.tensor;
  }
  if (ranks_.size() >= kMaxGrids) ranks_.erase(ranks_.begin());
  const c10::InferenceMode ordinary(false);  // kept, and saved for backward passes
  Ranks made{grid, ops::curve_ranks(curve_list_, {grid.height, grid.width}).to(device)};
  if (device.is_cuda()) made.stream = gpu_stream(device);
  ranks_.push_back(made);
  return made.tensor;
}

at::Tensor Mask::mask(const Size& grid, std::int64_t prefix) {
  const std::lock_guard lock(mutex_);
  return mask_locked(*this, grid, prefix);
}

at::Tensor Mask::mask_locked(const MaskParameters& parameters, const Size& grid, std::int64_t prefix) {
  const bool log_space = ops::wants_log_mask(strategy_);
  if (names_.empty()) {
    const std::int64_t tokens = prefix + grid.height * grid.width;
    const at::Tensor like = in_full(parameters.alpha);
    return at::full({like.size(0), tokens, tokens}, log_space ? 0.0 : 1.0, like.options().requires_grad(false));
  }
  const at::Tensor decay = log_decay(parameters);
  return ops::decay_mask(ranks(grid, decay.device()), decay, optional(parameters.curve_weight), prefix,
                         optional(log_prefix_decay(parameters)), log_space);
}

std::vector<ops::Tables> Mask::build(const MaskParameters& parameters, std::size_t layers, const Size& grid,
                                     std::int64_t prefix) {
  const ops::Tables all = ops::compose(strategy_, mask_locked(parameters, grid, prefix), optional(parameters.alpha));
  std::vector<ops::Tables> result(layers);
  const auto give = [&](ops::MaybeTensor ops::Tables::* table, double neutral) {
    if (!(all.*table)) return;
    const auto heads = static_cast<std::int64_t>(heads_.size());
    std::vector<at::Tensor> parts = {*(all.*table)};
    if (layers > 1) parts = parts[0].split(heads, 0);
    for (std::size_t i = 0; i < layers; ++i)
      result[i].*table = spread_heads(parts[i], head_index_, layer_heads_, neutral);
  };
  give(&ops::Tables::gain, 1);
  give(&ops::Tables::bias, 0);
  give(&ops::Tables::gate, 1);
  give(&ops::Tables::after, 0);
  return result;
}

Mask::State Mask::state() const {
  State result;
  for (const auto parameter : kMaskParameters) {
    const at::Tensor& tensor = this->*parameter;
    if (tensor.defined()) result.emplace_back(tensor.const_data_ptr(), static_cast<std::int64_t>(tensor._version()));
  }
  return result;
}

bool Mask::parameters_on_gpu() const {
  const auto wide = [](const at::Tensor& tensor) { return tensor.defined() && tensor.scalar_type() == at::kDouble; };
  const at::Tensor& decay = beta.defined() ? beta : rate.defined() ? rate : gamma;
  return ops::on_gpu(decay) && std::none_of(kMaskParameters.begin(), kMaskParameters.end(),
                                            [&](const auto parameter) { return wide(this->*parameter); });
}

bool Mask::needs_gradient() const {
  if (!at::GradMode::is_enabled()) return false;
  return std::any_of(kMaskParameters.begin(), kMaskParameters.end(), [this](const auto parameter) {
    return (this->*parameter).defined() && (this->*parameter).requires_grad();
  });
}

const Mask::Kept* Mask::frozen(const Size& grid, std::int64_t prefix, at::ScalarType packed) const {
  for (const Kept& entry : frozen_)
    if (entry.grid == grid && entry.prefix == prefix && entry.packed == packed) return &entry;
  return nullptr;
}

bool Mask::builds_per_call(const Size& grid, std::int64_t prefix) const {
  if (frozen(grid, prefix) != nullptr) return false;
  const bool versionless = std::any_of(kMaskParameters.begin(), kMaskParameters.end(), [this](const auto parameter) {
    return (this->*parameter).defined() && (this->*parameter).is_inference();
  });
  return is_training() || needs_gradient() || versionless;
}

bool Mask::builds_per_call_now(const Size& grid, std::int64_t prefix) const {
  const std::lock_guard lock(mutex_);
  return builds_per_call(grid, prefix);
}

template <class Make>
Mask::Kept Mask::made(const Size& grid, std::int64_t prefix, at::ScalarType packed, const Make& make) {
  // Ordinary tensors even inside an inference-mode block, so that later calls may use them anywhere.
  const c10::InferenceMode ordinary(false);
  const torch::NoGradGuard no_grad;
  Kept entry{grid, prefix, packed, {}, make(), 0};
  for (const ops::MaybeTensor* table : each(entry.tables))
    if (*table) entry.bytes += static_cast<std::int64_t>((*table)->nbytes());
  return entry;
}

void Mask::complete(Kept& entry) {
  const std::optional<at::Device> device = gpu_of(entry.tables);
  if (!device) return;
  entry.stream = gpu_stream(*device);
  entry.stream->synchronize();
}

const ops::Tables& Mask::shared(const Kept& entry) {
  if (!entry.stream) return entry.tables;
  for (const ops::MaybeTensor* table : each(entry.tables))
    if (*table) read_in_this_stream(**table, *entry.stream);
  return entry.tables;
}

Mask::Kept Mask::made_whole(const Size& grid, std::int64_t prefix) {
  return made(grid, prefix, kWhole, [&] { return build(*this, 1, grid, prefix).front(); });
}

const Mask::Kept* Mask::kept(const Size& grid, std::int64_t prefix, at::ScalarType packed) {
  for (auto entry = kept_.begin(); entry != kept_.end(); ++entry) {
    if (entry->grid != grid || entry->prefix != prefix || entry->packed != packed) continue;
    if (entry->state == state()) {
      kept_.splice(kept_.begin(), kept_, entry);
      return &kept_.front();
    }
    forget(kept_);  // parameters changed: every table is stale
    break;
  }
  return nullptr;
}

bool Mask::captured(const Kept& entry) {
  const std::optional<at::Device> device = gpu_of(entry.tables);
  return device && ops::is_captured(*device);
}

ops::Tables Mask::keep(Kept entry, State now) {
  if (captured(entry)) return entry.tables;
  entry.state = std::move(now);
  ops::Tables result = entry.tables;
  while (kept_.size() >= kMaxGrids) {
    budget_->used -= kept_.back().bytes;
    kept_.pop_back();
  }
  if (budget_->used + entry.bytes <= budget_->limit) {
    complete(entry);
    budget_->used += entry.bytes;
    kept_.push_front(std::move(entry));
  }
  return result;
}

ops::Tables Mask::tables(const Size& grid, std::int64_t prefix) {
  const std::lock_guard lock(mutex_);
  if (const Kept* entry = frozen(grid, prefix)) return shared(*entry);
  if (builds_per_call(grid, prefix)) return build(*this, 1, grid, prefix).front();
  if (const Kept* entry = kept(grid, prefix, kWhole)) return shared(*entry);
  State now = state();
  return keep(made_whole(grid, prefix), std::move(now));
}

bool Mask::packs(at::ScalarType dtype) const {
  const bool multiplies = strategy_ == ops::Strategy::kMulV1 || strategy_ == ops::Strategy::kMulV2;
  return multiplies && !names_.empty() && static_cast<std::int64_t>(heads_.size()) == layer_heads_ &&
         at::isReducedFloatingType(dtype) && parameters_on_gpu() && ops::packs_gains();
}

std::vector<ops::Tables> Mask::build_packed(const MaskParameters& parameters, std::size_t layers, const Size& grid,
                                            std::int64_t prefix, at::ScalarType dtype) {
  const at::Tensor decay = log_decay(parameters);
  const at::Tensor order = ranks(grid, decay.device());
  if (!ops::packs_decay_gains(decay, order.size(1), dtype)) return {};
  const auto [gains, handles] = ops::decay_gains(
      order, decay, optional(parameters.curve_weight), prefix, optional(log_prefix_decay(parameters)),
      optional(parameters.alpha), strategy_ == ops::Strategy::kMulV2, dtype, static_cast<std::int64_t>(layers));
  std::vector<ops::Tables> result(layers);
  for (std::size_t i = 0; i < layers; ++i) {
    result[i].gain = gains.narrow(1, static_cast<std::int64_t>(i) * layer_heads_, layer_heads_);
    result[i].handle = handles[i];
  }
  return result;
}

std::optional<ops::Tables> Mask::packed_tables(const Size& grid, std::int64_t prefix, at::ScalarType dtype) {
  if (!packs(dtype)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (const Kept* whole = frozen(grid, prefix)) {
    if (const Kept* entry = frozen(grid, prefix, dtype)) return shared(*entry);
    Kept packed = made(grid, prefix, dtype, [&] {
      const at::Tensor& gain = *shared(*whole).gain;
      ops::Tables tables;
      tables.gain = ops::pack_gain(gain, gain.new_empty({0}, dtype));
      return tables;
    });
    if (captured(packed)) return packed.tables;
    complete(packed);
    frozen_.push_back(std::move(packed));
    budget_->used += frozen_.back().bytes;
    return frozen_.back().tables;
  }
  const auto build_one = [&]() -> std::optional<ops::Tables> {
    std::vector<ops::Tables> tables = build_packed(*this, 1, grid, prefix, dtype);
    return tables.empty() ? std::nullopt : std::optional(std::move(tables.front()));
  };
  if (builds_per_call(grid, prefix)) return build_one();
  if (const Kept* entry = kept(grid, prefix, dtype)) return shared(*entry);
  State now = state();
  Kept entry = made(grid, prefix, dtype, [&] { return build_one().value_or(ops::Tables{}); });
  if (!entry.tables.gain) return std::nullopt;
  entry.tables.handle.reset();  // nobody differentiates what is kept
  return keep(std::move(entry), std::move(now));
}

void Mask::freeze(const Size& grid, std::int64_t prefix) {
  const std::lock_guard lock(mutex_);
  Kept entry = made_whole(grid, prefix);  // first, so that a failure leaves all as it was
  complete(entry);
  forget(kept_);
  if (!frozen())
    for (const at::Tensor& parameter : parameters()) trained_.emplace_back(parameter, parameter.requires_grad());
  frozen_.remove_if([&](const Kept& old) {
    const bool replaced = old.grid == grid && old.prefix == prefix;
    if (replaced) budget_->used -= old.bytes;
    return replaced;
  });
  budget_->used += entry.bytes;
  frozen_.push_back(std::move(entry));
  for (at::Tensor& parameter : parameters()) parameter.requires_grad_(false);
}

void Mask::thaw() {
  const std::lock_guard lock(mutex_);
  for (auto& [parameter, needed] : trained_) parameter.requires_grad_(needed);
  trained_.clear();
  forget(frozen_);
}

void Mask::drop_tables() {
  const std::lock_guard lock(mutex_);
  forget(kept_);
}

void Mask::forget(std::list<Kept>& entries) {
  for (const Kept& entry : entries) budget_->used -= entry.bytes;
  entries.clear();
}

std::int64_t Mask::kept_tables() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(kept_.size() + frozen_.size());
}

void Mask::train(bool on) {
  torch::nn::Module::train(on);
  drop_tables();
}

void Mask::moved() {
  const std::lock_guard lock(mutex_);
  forget(kept_);
  if (rate.defined()) units_ = units_.to(in_full(rate).options());
  for (const auto parameter : kMaskParameters)
    if ((this->*parameter).defined()) head_index_ = head_index_.to((this->*parameter).device());
  frozen_.remove_if([&](const Kept& entry) {
    const bool packed = entry.packed != kWhole;  // made again when it is asked for
    if (packed) budget_->used -= entry.bytes;
    return packed;
  });
  for (Kept& entry : frozen_) {
    Kept renewed = made_whole(entry.grid, entry.prefix);
    complete(renewed);
    budget_->used += renewed.bytes - entry.bytes;
    entry = std::move(renewed);
  }
}

void Mask::to(at::Device device, at::ScalarType dtype, bool non_blocking) {
  torch::nn::Module::to(device, wide_enough(dtype), non_blocking);
  moved();
}

void Mask::to(at::ScalarType dtype, bool non_blocking) {
  torch::nn::Module::to(wide_enough(dtype), non_blocking);
  moved();
}

void Mask::to(at::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking);
  moved();
}

bool Mask::like(const Mask& other) const {
  return config_ == other.config_ && layer_heads_ == other.layer_heads_ && native_tokens_ == other.native_tokens_;
}

LayerTables::LayerTables(std::vector<Mask*> masks, const Size& grid, std::int64_t prefix, at::ScalarType dtype)
    : masks_(std::move(masks)), grid_(grid), prefix_(prefix), dtype_(dtype) {}

std::vector<Mask*> LayerTables::group_from(std::size_t layer, bool packed) const {
  Mask* first = masks_[layer];
  std::vector<Mask*> group = {first};
  if (!first->builds_per_call_now(grid_, prefix_)) return group;
  const std::int64_t tokens = prefix_ + grid_.height * grid_.width;
  const std::int64_t bytes = 4 * tokens * tokens * static_cast<std::int64_t>(first->masked_heads().size());
  for (std::size_t i = layer + 1; i < masks_.size(); ++i) {
    const auto count = static_cast<std::int64_t>(group.size() + 1);
    if (count * bytes > (packed ? kPackedTogether : kTogether) || count > ops::kMostLayersTogether) break;
    if (masks_[i] == nullptr || !masks_[i]->builds_per_call_now(grid_, prefix_) || !first->like(*masks_[i])) break;
    group.push_back(masks_[i]);
  }
  return group;
}

ops::Tables LayerTables::take(std::size_t layer, bool readable) {
  if (layer >= begin_ && layer - begin_ < made_.size() && !(packed_ && readable))
    return std::exchange(made_[layer - begin_], {});
  Mask* first = masks_[layer];
  if (first == nullptr) return {};
  const bool packed = !readable && first->packs(dtype_);
  const std::vector<Mask*> group = group_from(layer, packed);
  if (group.size() == 1) {
    if (packed) {
      if (auto tables = first->packed_tables(grid_, prefix_, dtype_)) return *tables;
    }
    return first->tables(grid_, prefix_);
  }
  MaskParameters joined;
  for (const auto parameter : kMaskParameters) {
    std::vector<at::Tensor> parts;
    for (const Mask* mask : group)
      if ((mask->*parameter).defined()) parts.push_back(mask->*parameter);
    if (!parts.empty()) joined.*parameter = HeadsJoined::apply(at::TensorList(parts));
  }
  const std::lock_guard lock(first->mutex_);
  begin_ = layer;
  packed_ = packed;
  if (packed) made_ = first->build_packed(joined, group.size(), grid_, prefix_, dtype_);
  if (!packed || made_.empty()) {
    packed_ = false;
    made_ = first->build(joined, group.size(), grid_, prefix_);
  }
  return std::exchange(made_.front(), {});
}

}  // namespace violin::nn
