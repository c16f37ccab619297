#include "violin/checkpoint/architecture.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <set>

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/nn/registry.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

using nn::MaskConfig;
using nn::ModelConfig;

const StateEntry& required(const State& state, const std::string& name, std::size_t dims) {
  const StateEntry* entry = state.find(name);
  if (entry == nullptr) {
    throw Error(file_in_quotes(state.file) + " is no vision transformer that is known here: it has no tensor " +
                in_quotes(name) + " (`violin inspect` lists what it has)");
  }
  if (entry->sizes.size() != dims) {
    throw Error(file_in_quotes(state.file) + ": tensor " + in_quotes(entry->source) + " is " +
                shape_text(entry->sizes) + "; expected " + std::to_string(dims) + " dimensions");
  }
  return *entry;
}

// The largest number behind "blocks.", plus one.
std::int64_t count_blocks(const State& state) {
  constexpr std::string_view kKey = "blocks.";
  std::set<std::int64_t> blocks;
  for (const StateEntry& entry : state.entries) {
    if (!entry.name.starts_with(kKey)) continue;
    std::int64_t block = -1;
    std::from_chars(entry.name.data() + kKey.size(), entry.name.data() + entry.name.size(), block);
    if (block >= 0) blocks.insert(block);
  }
  if (blocks.empty()) required(state, "blocks.0.attn.qkv.weight", 2);
  if (*blocks.rbegin() + 1 != static_cast<std::int64_t>(blocks.size())) {
    throw Error(file_in_quotes(state.file) + ": blocks are numbered up to " + std::to_string(*blocks.rbegin()) +
                ", but there are " + std::to_string(blocks.size()));
  }
  return static_cast<std::int64_t>(blocks.size());
}

std::optional<std::int64_t> square_side(std::int64_t count) {
  const auto side = static_cast<std::int64_t>(std::llround(std::sqrt(static_cast<double>(count))));
  return count > 0 && side * side == count ? std::optional(side) : std::nullopt;
}

// The grid of the position table and whether it has rows for prefix tokens.
void infer_positions(const State& state, const Hints& hints, Architecture& result) {
  ModelConfig& config = result.config;
  const auto from_grid = [&](const Size& grid, bool without_prefix) {
    config.no_embed_class = without_prefix;
    config.img_size = {grid.height * config.patch_size.height, grid.width * config.patch_size.width};
  };
  if (state.find("pos_embed") == nullptr) {
    config.pos_embed = "none";
    if (hints.img_size) config.img_size = *hints.img_size;
    if (!hints.img_size) {
      from_grid({14, 14}, false);
      result.notes.push_back("without positions the image size is unknown; taken as " + to_string(config.img_size));
    }
    return;
  }
  const std::int64_t rows = required(state, "pos_embed", 3).sizes[1];
  const std::int64_t prefix = config.prefix_tokens();
  if (hints.img_size) {
    config.img_size = *hints.img_size;
    const Size grid = config.grid();
    const std::int64_t patches = grid.height * grid.width;
    // A size that fits is the one that the weights were made for; another one is what positions are resampled to.
    if (rows == patches + prefix || rows == patches) {
      config.no_embed_class = rows != patches + prefix;
      return;
    }
  }
  const auto with_prefix = square_side(rows - prefix);
  const auto alone = prefix > 0 ? square_side(rows) : std::nullopt;
  // Registers have no positions in the models that people have.
  const bool take_alone = alone && (!with_prefix || config.reg_tokens > 0);
  if (!with_prefix && !alone) {
    throw Error(file_in_quotes(state.file) + ": 'pos_embed' has " + std::to_string(rows) + " rows, " +
                std::to_string(prefix) +
                " of them may be prefix tokens: no square grid; say the image size (--img-size HxW) or the model "
                "(--config)");
  }
  const std::int64_t side = take_alone ? *alone : *with_prefix;
  from_grid({side, side}, take_alone);
}

void infer_mask(const State& state, Architecture& result, std::optional<std::int64_t>& heads) {
  ModelConfig& config = result.config;
  std::vector<std::int64_t> masked;
  const StateEntry* decay = nullptr;
  const StateEntry* alpha = nullptr;
  bool rate = false, fixed = false, weights = false, prefix = false;
  for (std::int64_t block = 0; block < config.depth; ++block) {
    const std::string layer = "blocks." + std::to_string(block) + ".attn.violin.";
    bool any = false;
    const auto present = [&](const char* name) {
      const StateEntry* entry = state.find(layer + name);
      any = any || entry != nullptr;
      return entry;
    };
    for (const char* name : {"beta", "rate", "gamma"}) {
      const StateEntry* entry = present(name);
      if (entry == nullptr) continue;
      decay = entry;
      rate = rate || std::string_view(name) == "rate";
      fixed = fixed || std::string_view(name) == "gamma";
    }
    if (const StateEntry* entry = present("alpha")) alpha = entry;
    weights = present("curve_weight") != nullptr || weights;
    prefix = present("prefix_beta") != nullptr || prefix;
    if (present("prefix_rate") != nullptr) prefix = rate = true;
    if (any) masked.push_back(block);
  }
  if (masked.empty()) return;
  MaskConfig mask;
  if (static_cast<std::int64_t>(masked.size()) != config.depth) mask.blocks = masked;
  mask.alpha = alpha != nullptr;
  mask.curve_weights = weights;
  mask.learned_prefix_decay = prefix;
  mask.parameterisation = rate ? "rate" : "sigmoid";
  if (decay == nullptr) {
    mask.curves.clear();
  } else {
    if (decay->sizes.size() != 2 && decay->sizes.size() != 3) required(state, decay->name, 2);
    if (std::find(decay->sizes.begin(), decay->sizes.end(), 0) != decay->sizes.end()) {
      throw Error(file_in_quotes(state.file) + ": tensor " + in_quotes(decay->source) + " is " +
                  shape_text(decay->sizes) + "; expected a decay per curve and head");
    }
    mask.decay_per_axis = decay->sizes.size() == 3;
    const std::int64_t curves = decay->sizes[0];
    std::string chosen;
    for (const std::string& set : curves::curve_set_names()) {
      if (chosen.empty() && static_cast<std::int64_t>(curves::parse_curves(set).size()) == curves) chosen = set;
    }
    if (mask.decay_per_axis && curves == 1) chosen = "manhattan";
    if (chosen.empty()) {
      throw Error(file_in_quotes(state.file) + ": masks have " + counted(curves, "curve") +
                  ", and the file does not say which; give the model (--config)");
    }
    mask.curves = chosen;
    result.notes.push_back("the curves are taken as the set '" + chosen + "' and the strategy as " + mask.strategy +
                           ": the tensors do not say");
    if (fixed) {
      const at::Tensor gamma = decay->make().to(at::kDouble).reshape({-1});
      mask.decay = std::clamp(gamma[0].item<double>(), 1e-30, 1.0);
    }
  }
  const StateEntry* any = decay != nullptr ? decay : alpha;
  if (any != nullptr && !any->sizes.empty()) heads = any->sizes.back();
  config.violin = mask;
}

// Takes over what tensors do not tell from the most similar model of the registry.
void match_registry(const State& state, Architecture& result, bool heads_given) {
  const ModelConfig& config = result.config;
  const std::string stem = std::filesystem::path(state.file).stem().string();
  const nn::ModelEntry* best = nullptr;
  double best_score = 0;
  for (const nn::ModelEntry& entry : nn::model_registry()) {
    const ModelConfig& other = entry.config;
    const bool same = other.embed_dim == config.embed_dim && other.depth == config.depth &&
                      other.patch_size == config.patch_size && other.in_chans == config.in_chans &&
                      other.class_token == config.class_token && other.distilled == config.distilled &&
                      other.reg_tokens == config.reg_tokens && other.pos_embed == config.pos_embed &&
                      other.no_embed_class == config.no_embed_class && other.qkv_bias == config.qkv_bias &&
                      other.mlp_ratio == config.mlp_ratio &&
                      other.init_values.has_value() == config.init_values.has_value() &&
                      other.norm_behind_pooling() == config.norm_behind_pooling() &&
                      other.violin.has_value() == config.violin.has_value() &&
                      (!heads_given || other.num_heads == config.num_heads) &&
                      (!other.violin || (other.num_classes == 0) == (config.num_classes == 0));
    if (!same) continue;
    double score = 1, named = 0;
    if (other.img_size == config.img_size) score += 4;
    if ((other.num_classes == 0) == (config.num_classes == 0)) score += 2;
    if (entry.family == "DINO" && state.from_dino) score += 4;
    if (entry.family.starts_with("DeiT")) score += 0.5;  // the same tensors as a plain ViT, and in more people's hands
    // The longest name in the file's: an alias may be another model's name with something behind it.
    std::vector<std::string> names = entry.aliases;
    names.push_back(entry.name);
    for (const std::string& name : names)
      if (stem.find(name) != std::string::npos) named = std::max(named, 16 + static_cast<double>(name.size()) / 64);
    score += named;
    if (score > best_score) best = &entry, best_score = score;
  }
  if (best == nullptr) return;
  result.name = best->name;
  result.family = best->family;
  result.config.num_heads = best->config.num_heads;
  result.config.init_values = best->config.init_values;
  result.config.pos_resample = best->config.pos_resample;
  result.config.norm_eps = best->config.norm_eps;
}

}  // namespace

Architecture infer_architecture(const State& state, const Hints& hints) {
  Architecture result;
  ModelConfig& config = result.config;
  const StateEntry& patches = required(state, "patch_embed.proj.weight", 4);
  config.embed_dim = patches.sizes[0];
  config.in_chans = patches.sizes[1];
  config.patch_size = {patches.sizes[2], patches.sizes[3]};
  config.depth = count_blocks(state);
  const StateEntry& qkv = required(state, "blocks.0.attn.qkv.weight", 2);
  if (config.embed_dim < 1 || qkv.sizes != std::vector<std::int64_t>{3 * config.embed_dim, config.embed_dim}) {
    throw Error(file_in_quotes(state.file) + ": tensor " + in_quotes(qkv.source) + " is " + shape_text(qkv.sizes) +
                ", which does not go with a width of " + std::to_string(config.embed_dim) + " (" +
                in_quotes(patches.source) + " is " + shape_text(patches.sizes) + ")");
  }
  config.qkv_bias = state.find("blocks.0.attn.qkv.bias") != nullptr;
  const auto width = static_cast<double>(config.embed_dim);
  const auto hidden = static_cast<double>(required(state, "blocks.0.mlp.fc1.weight", 2).sizes[0]);
  config.mlp_ratio = hidden / width;
  if (std::floor(config.mlp_ratio * width) < hidden) config.mlp_ratio = std::nextafter(config.mlp_ratio, 1e9);
  config.class_token = state.find("cls_token") != nullptr;
  config.distilled = state.find("dist_token") != nullptr;
  if (state.find("reg_token") != nullptr) config.reg_tokens = required(state, "reg_token", 3).sizes[1];
  if (state.find("blocks.0.ls1.gamma") != nullptr) config.init_values = 1e-6;
  config.num_classes = state.find("head.weight") == nullptr ? 0 : required(state, "head.weight", 2).sizes[0];
  const bool behind = state.find("fc_norm.weight") != nullptr && state.find("norm.weight") == nullptr;
  config.global_pool = behind || !config.class_token ? "avg" : "token";
  config.fc_norm = behind;
  infer_positions(state, hints, result);

  std::optional<std::int64_t> heads;
  infer_mask(state, result, heads);
  if (heads && hints.num_heads && *hints.num_heads != *heads) {
    // Some heads have a mask; which ones, the file does not say.
    throw Error(file_in_quotes(state.file) + ": masks have " + std::to_string(*heads) + " heads, not " +
                std::to_string(*hints.num_heads) + "; give the model (--config)");
  }
  if (hints.num_heads) heads = hints.num_heads;
  if (heads) config.num_heads = *heads;
  if (config.class_token && config.num_classes == 0 && config.reg_tokens == 0) config.pos_resample = "dino";
  if (state.from_dino) config.pos_resample = "dino";
  match_registry(state, result, heads.has_value());
  if (!heads && result.name.empty()) {
    result.heads_known = config.embed_dim % 64 == 0;
    config.num_heads = result.heads_known ? config.embed_dim / 64 : 1;
    if (result.heads_known) result.notes.emplace_back("heads are taken as 64 wide: the tensors do not say");
  }
  nn::check(config);
  return result;
}

}  // namespace violin::checkpoint
