// What a model is, as data: timm's argument names for the transformer, and a block `violin` for the mask. The command
// line, a model's JSON file, the metadata of a weights file and the C++ interface fill the same structs.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "violin/size.h"

namespace violin::nn {

// The mask of a model. How it starts (`init`):
//   pretrain  beta ~ U[5,9], alpha ~ N(0,0.5): as published for training from scratch
//   finetune  beta ~ U[15,20], alpha ~ N(1,0.02): as published for plugging into trained weights
//   none      beta ~ N(0,0.5), alpha ~ N(0,0.5): the published ablation
//   spread    per head a decay length between a few patches and the whole grid, alpha 1
//   identity  the model computes what it computed without a mask, bit for bit, and the mask still receives gradients;
//             with the strategy add_v1, alpha is 0 and decays are those of `spread`
// How a decay is stored (`parameterisation`): `sigmoid` has gamma = sigmoid(beta); `rate` has log gamma =
// -max(rate,0)/n with n the longest distance along the curve on the model's own grid, and passes the gradient through
// the bound. `identity` needs `rate`, since sigmoid reaches 1 nowhere.
struct MaskConfig {
  std::string curves = "violin";  // a set or a comma-separated list; empty: no decay, alpha alone
  std::string strategy = "mul_v1";
  std::optional<double> decay;  // a fixed gamma; nothing: learned
  bool decay_per_axis = false;  // manhattan: a decay per row and column distance instead of one for both
  bool alpha = true;
  bool curve_weights = false;         // learned weights of the curves instead of their mean
  bool learned_prefix_decay = false;  // gamma of class token and registers; otherwise 1
  std::string init = "pretrain";
  std::string parameterisation = "auto";  // auto: rate for identity, otherwise sigmoid
  std::vector<std::int64_t> blocks;       // which blocks have a mask; empty: all
  std::vector<std::int64_t> heads;        // which heads; empty: all

  bool uses_rate() const { return parameterisation == "rate" || (parameterisation == "auto" && init == "identity"); }
  bool covers_block(std::int64_t block) const;
  friend bool operator==(const MaskConfig&, const MaskConfig&) = default;
};

// Low-rank adapters beside chosen projections (qkv, proj, fc1, fc2).
struct AdapterConfig {
  std::string kind = "lora";                  // or dora
  std::map<std::string, std::int64_t> ranks;  // projection: rank
  double alpha = 16;                          // the update is scaled by alpha / rank
  bool norm_gradient = false;                 // dora: differentiate the norm too, instead of holding it fixed
  friend bool operator==(const AdapterConfig&, const AdapterConfig&) = default;
};

struct ModelConfig {
  Size img_size{224, 224};
  Size patch_size{16, 16};
  std::int64_t in_chans = 3;
  std::int64_t num_classes = 1000;  // 0: no head, the model gives pooled features
  std::int64_t embed_dim = 768;
  std::int64_t depth = 12;
  std::int64_t num_heads = 12;
  double mlp_ratio = 4;
  bool qkv_bias = true;
  bool class_token = true;
  bool distilled = false;  // a distillation token and a second head; the logits are the mean of both
  std::int64_t reg_tokens = 0;
  std::string pos_embed = "learn";    // or none
  bool no_embed_class = false;        // positions for patches only
  std::string global_pool = "token";  // token, avg, or empty: all tokens
  std::optional<bool> fc_norm;        // norm behind pooling instead of before; by default where pooling is avg
  std::optional<double> init_values;  // layer scale
  double drop_rate = 0;               // before the head
  double pos_drop_rate = 0;
  double proj_drop_rate = 0;
  double attn_drop_rate = 0;
  double drop_path_rate = 0;
  double norm_eps = 1e-6;
  std::string pos_resample = "timm";  // how positions follow another grid: timm, dino or deit
  std::optional<MaskConfig> violin;
  std::optional<AdapterConfig> adapters;

  Size grid() const { return {img_size.height / patch_size.height, img_size.width / patch_size.width}; }
  std::int64_t prefix_tokens() const { return (class_token ? 1 : 0) + (distilled ? 1 : 0) + reg_tokens; }
  bool norm_behind_pooling() const { return fc_norm.value_or(global_pool == "avg"); }
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

// Throws violin::Error naming the field, what came and what is accepted.
void check(const ModelConfig& config);
void check(const MaskConfig& mask);

// Unknown fields are mistakes; fields that are missing keep the value that `config` has.
void merge_json(const nlohmann::json& json, ModelConfig& config);
void merge_json(const nlohmann::json& json, MaskConfig& mask);
void merge_json(const nlohmann::json& json, AdapterConfig& adapters);
ModelConfig model_from_json(const nlohmann::json& json);

nlohmann::ordered_json to_json(const ModelConfig& config);
nlohmann::ordered_json to_json(const MaskConfig& mask);
nlohmann::ordered_json to_json(const AdapterConfig& adapters);

// A number for a square, [height, width] for a rectangle. "160x224" is read too; nothing where a value is no size.
nlohmann::ordered_json to_json(const Size& size);
std::optional<Size> size_from_json(const nlohmann::json& json);

}  // namespace violin::nn
