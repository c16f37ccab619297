#include "violin/train/schedule.h"

#include <charconv>
#include <cmath>
#include <map>
#include <numbers>

#include "violin/error.h"

namespace violin::train {
namespace {

// See parameter_groups.
std::int64_t layer_of(const std::string& name, std::int64_t depth) {
  if (name.starts_with("blocks.")) {
    std::int64_t block = 0;
    std::from_chars(name.data() + 7, name.data() + name.size(), block);
    return block + 1;
  }
  if (name.starts_with("norm.")) return depth;
  if (name.starts_with("head") || name.starts_with("fc_norm.")) return depth + 1;
  return 0;
}

bool is_token(const std::string& name) {
  return name == "pos_embed" || name == "cls_token" || name == "dist_token" || name == "reg_token";
}

}  // namespace

double Cosine::at(double t) const {
  if (t < warmup_t) return warmup_lr_init + t * (base - warmup_lr_init) / warmup_t;
  if (warmup_prefix) t -= warmup_t;
  const double cycle = std::floor(t / t_initial);
  if (cycle >= static_cast<double>(cycle_limit)) return lr_min;
  const double within = t - cycle * t_initial;
  const double top = base * std::pow(cycle_decay, cycle);
  return lr_min + 0.5 * (top - lr_min) * (1 + std::cos(std::numbers::pi * within / t_initial));
}

std::vector<Group> parameter_groups(const nn::VisionTransformer& model, const Options& options) {
  const std::int64_t depth = model.config().depth;
  std::map<std::pair<double, double>, Group> groups;  // by factor and decay: a fixed order
  for (const auto& item : model.named_parameters()) {
    if (!item.value().requires_grad()) continue;
    const std::string& name = item.key();
    const bool mask = nn::is_mask_parameter(name);
    const bool decays = !mask && item.value().dim() > 1 && !is_token(name);
    double scale = std::pow(options.layer_decay, static_cast<double>(depth + 1 - layer_of(name, depth)));
    if (mask) scale = options.mask_lr * (options.mask_layer_decay ? scale : 1);
    const double decay = decays ? options.weight_decay : 0;
    Group& group = groups[{scale, decay}];
    group.lr_scale = scale;
    group.weight_decay = decay;
    group.names.push_back(name);
    group.parameters.push_back(item.value());
  }
  std::vector<Group> result;
  for (auto& [key, group] : groups) result.push_back(std::move(group));
  if (result.empty()) throw Error("nothing is left to train; see the option train_what");
  return result;
}

void choose_trainable(nn::VisionTransformer& model, const std::string& what) {
  bool any_mask = false;
  for (auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    const bool head = name.starts_with("head"), mask = nn::is_mask_parameter(name);
    const bool adapter = nn::is_adapter_parameter(name);
    any_mask = any_mask || mask;
    const bool trained =
        what == "all" || (head && what != "all") || (mask && what != "head") || (adapter && what == "adapters");
    item.value().requires_grad_(trained);
  }
  if (what == "mask" && !any_mask) throw Error("train_what is mask, but the model has none; plug one in (--violin)");
}

}  // namespace violin::train
