#include "violin/nn/registry.h"

#include <algorithm>

#include "violin/error.h"
#include "violin/text.h"

namespace violin::nn {
namespace {

struct Width {
  const char* name;
  std::int64_t dim, depth, heads;
};
constexpr Width kTiny{"tiny", 192, 12, 3}, kSmall{"small", 384, 12, 6}, kMedium{"medium", 512, 12, 8},
    kBase{"base", 768, 12, 12}, kLarge{"large", 1024, 24, 16}, kHuge{"huge", 1280, 32, 16};

ModelConfig sized(const Width& width, std::int64_t image, std::int64_t patch) {
  ModelConfig config;
  config.img_size = {image, image};
  config.patch_size = {patch, patch};
  config.embed_dim = width.dim;
  config.depth = width.depth;
  config.num_heads = width.heads;
  return config;
}

std::string named(const std::string& family, const Width& width, std::int64_t patch, std::int64_t image) {
  return family + "_" + width.name + "_patch" + std::to_string(patch) + "_" + std::to_string(image);
}

// As published: the mask, the mean over all patches behind the norm, no class token.
ModelConfig published_violin(ModelConfig config) {
  config.class_token = false;
  config.global_pool = "avg";
  config.fc_norm = false;
  config.violin = MaskConfig{};
  return config;
}

std::vector<ModelEntry> all_models() {
  std::vector<ModelEntry> models;
  const auto add = [&](std::string name, std::string family, const ModelConfig& config,
                       std::vector<std::string> aliases = {}) {
    models.push_back({std::move(name), std::move(family), config, std::move(aliases)});
  };
  for (const Width& width : {kTiny, kSmall, kBase, kLarge})
    add(named("vit", width, 16, 224), "ViT", sized(width, 224, 16));
  for (const Width& width : {kTiny, kSmall, kBase}) {
    ModelConfig config = sized(width, 224, 16);
    config.pos_resample = "deit";
    add(named("deit", width, 16, 224), "DeiT", config);
    config.distilled = true;
    add(std::string("deit_") + width.name + "_distilled_patch16_224", "DeiT distilled", config);
  }
  for (const bool distilled : {false, true}) {
    ModelConfig config = sized(kBase, 384, 16);
    config.pos_resample = "deit";
    config.distilled = distilled;
    add(distilled ? "deit_base_distilled_patch16_384" : "deit_base_patch16_384", distilled ? "DeiT distilled" : "DeiT",
        config);
  }
  for (const std::int64_t image : {224, 384}) {
    for (const Width& width : {kSmall, kMedium, kBase, kLarge}) {
      if (image == 384 && std::string_view(width.name) == "medium") continue;
      ModelConfig config = sized(width, image, 16);
      config.no_embed_class = true;
      config.init_values = 1e-6;
      config.pos_resample = "deit";
      add(named("deit3", width, 16, image), "DeiT-III", config);
    }
  }
  {
    ModelConfig config = sized(kHuge, 224, 14);
    config.no_embed_class = true;
    config.init_values = 1e-6;
    config.pos_resample = "deit";
    add("deit3_huge_patch14_224", "DeiT-III", config);
  }
  for (const Width& width : {kSmall, kBase}) {
    for (const std::int64_t patch : {16, 8}) {
      ModelConfig config = sized(width, 224, patch);
      config.num_classes = 0;
      config.pos_resample = "dino";
      add(std::string("dino_vit") + width.name[0] + std::to_string(patch), "DINO", config,
          {named("vit", width, patch, 224) + ".dino"});
    }
  }
  for (const Width& width : {kSmall, kBase, kLarge}) {
    ModelConfig config = sized(width, 518, 14);
    config.num_classes = 0;
    config.reg_tokens = 4;
    config.no_embed_class = true;
    config.init_values = 1e-5;
    add(std::string("vit_") + width.name + "_patch14_reg4_dinov2", "DINOv2 registers", config);
  }
  for (const std::int64_t patch : {1, 2, 4}) {
    ModelConfig config = sized(kTiny, 32, patch);
    config.num_classes = 100;
    config.class_token = false;
    config.global_pool = "avg";
    config.fc_norm = false;
    add("vit_tiny_patch" + std::to_string(patch) + "_32", patch == 1 ? "pixel-level ViT" : "small images", config);
  }
  {
    // What fits a few minutes on two cores.
    ModelConfig config = sized(Width{"micro", 96, 6, 3}, 32, 4);
    config.num_classes = 100;
    config.class_token = false;
    config.global_pool = "avg";
    config.fc_norm = false;
    add("vit_micro_patch4_32", "small images", config);
  }
  std::vector<ModelEntry> masked;
  for (const ModelEntry& entry : models) {
    ModelConfig config = entry.config;
    config.violin = MaskConfig{};
    if (entry.family == "DeiT") masked.push_back({"violin_" + entry.name, "Violin", published_violin(config), {}});
    if (entry.family == "DINO") masked.push_back({"violin_" + entry.name, "Violin", config, {}});
  }
  models.insert(models.end(), masked.begin(), masked.end());
  return models;
}

}  // namespace

const std::vector<ModelEntry>& model_registry() {
  static const std::vector<ModelEntry> models = all_models();
  return models;
}

ModelConfig find_model(std::string_view name) {
  std::vector<std::string> known;
  for (const ModelEntry& entry : model_registry()) {
    if (entry.name == name) return entry.config;
    known.push_back(entry.name);
    for (const std::string& alias : entry.aliases) {
      if (alias == name) return entry.config;
      known.push_back(alias);
    }
  }
  if (name.starts_with("violin_")) {
    const std::string_view plain = name.substr(7);
    for (const ModelEntry& entry : model_registry()) {
      if (entry.name != plain) continue;
      ModelConfig config = entry.config;
      config.violin = MaskConfig{};
      return config;
    }
  }
  throw Error("unknown model " + in_quotes(name) + did_you_mean(name, known, ";") + " `violin models` lists them all");
}

}  // namespace violin::nn
