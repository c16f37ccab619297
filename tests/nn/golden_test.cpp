// Stored logits and features of timm's models and of the published Violin models.
#include "tests/nn/helpers.h"

namespace violin::tests {
namespace {

nn::ModelConfig timm_config(const Json& about) {
  nn::ModelConfig config;
  nn::merge_json(about.at("config"), config);
  config.norm_eps = about.at("norm_eps");
  config.distilled = about.at("kind") == "vit_distilled";
  return config;
}

TEST(GoldenModels, LogitsAndFeaturesEqualTimm) {
  int compared = 0;
  const Json list = golden_json("models/index.json").at("models");
  for (const Json& about : list) {
    if (about.at("kind") == "swin") continue;
    SCOPED_TRACE(about.at("name").get<std::string>());
    nn::VisionTransformer model(timm_config(about), nn::Uninitialised{});
    load_exactly(model, golden_tensors("models/" + about.at("weights").get<std::string>()));
    model.eval();
    const torch::NoGradGuard no_grad;
    Tensors golden = golden_tensors("models/" + about.at("golden").get<std::string>());
    const nn::Observed out = model.observe(golden.at("image"), {.blocks = {0}, .attention = {}});
    EXPECT_LT(relative_error(out.logits, golden.at("logits")), 1e-5);
    EXPECT_LT(relative_error(out.tokens, golden.at("features")), 1e-5);
    if (golden.contains("tokens.block_0")) {
      EXPECT_LT(relative_error(out.blocks.at(0), golden.at("tokens.block_0")), 1e-5);
    }
    if (golden.contains("logits_head")) {
      EXPECT_LT(relative_error(out.head_logits, golden.at("logits_head")), 1e-5);
      EXPECT_LT(relative_error(out.distilled_logits, golden.at("logits_head_dist")), 1e-5);
    }
    ++compared;
  }
  EXPECT_EQ(compared, 7);
}

TEST(GoldenModels, PositionsFollowOtherGridsByEveryStoredRule) {
  const Tensors tensors = golden_tensors("models/pos_embed_resampling.safetensors");
  const Json list = golden_json("models/index.json").at("pos_embed_resampling");
  for (const Json& about : list) {
    SCOPED_TRACE(about.dump());
    const Size from{about.at("old_grid")[0], about.at("old_grid")[1]};
    const Size to{about.at("new_grid")[0], about.at("new_grid")[1]};
    const at::Tensor& source = tensors.at(about.at("source"));
    const at::Tensor& expected = tensors.at(about.at("result"));
    // Whoever asks for the grid that there is gets the table as it is; resampling is for other grids.
    if (from == to) {
      EXPECT_TRUE(at::equal(source, expected));
      continue;
    }
    const at::Tensor got = nn::resample_positions(source, from, to, about.at("prefix_tokens"), about.at("rule"));
    EXPECT_LT((got - expected).abs().max().item<double>(), 1e-5);
  }
}

// The published names for ours.
Tensors translated(const Tensors& weights, std::int64_t depth) {
  Tensors result;
  for (const auto& [name, tensor] : weights)
    if (name.find(".attn.ai_list.") == std::string::npos && !name.ends_with(".attn.normalize")) result[name] = tensor;
  for (std::int64_t i = 0; i < depth; ++i) {
    const std::string prefix = "blocks." + std::to_string(i) + ".attn.";
    std::vector<at::Tensor> rows;
    for (int c = 0; weights.contains(prefix + "ai_list." + std::to_string(c)); ++c)
      rows.push_back(weights.at(prefix + "ai_list." + std::to_string(c)));
    result[prefix + "violin.beta"] = at::stack(rows);
    result[prefix + "violin.alpha"] = weights.at(prefix + "normalize");
  }
  return result;
}

nn::ModelConfig published_config(const Json& about) {
  const Json& published = about.at("config");
  nn::ModelConfig config;
  for (const char* name : {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias"})
    nn::merge_json(Json{{name, published.at(name)}}, config);
  config.norm_eps = about.at("norm_eps");
  config.num_classes = published.value("num_classes", 0);
  config.class_token = published.at("cls_tok");
  config.global_pool = config.class_token ? "token" : "avg";
  config.fc_norm = false;
  config.pos_resample = "dino";
  config.violin = nn::MaskConfig{};
  return config;
}

TEST(GoldenViolin, OutputsGradientsAndAttentionEqualThePublishedModels) {
  const Json list = golden_json("violin/index.json").at("models");
  for (const Json& about : list) {
    SCOPED_TRACE(about.at("name").get<std::string>());
    const nn::ModelConfig config = published_config(about);
    nn::VisionTransformer model(config, nn::Uninitialised{});
    load_exactly(model, translated(golden_tensors("violin/" + about.at("weights").get<std::string>()), config.depth));
    model.eval();
    Tensors golden = golden_tensors("violin/" + about.at("golden").get<std::string>());
    const at::Tensor image = golden.at("image").clone().requires_grad_();
    const at::Tensor output = model.forward(image);
    EXPECT_LT(relative_error(output.detach(), golden.at("output")), 1e-5);
    output.backward(golden.at("d_output").to(at::kFloat));
    EXPECT_LT(relative_error(image.grad(), golden.at("d_image")), 5e-5);  // a sum over all layers in float32
    for (std::int64_t i = 0; i < config.depth; ++i) {
      const std::string prefix = "grad.blocks." + std::to_string(i) + ".attn.";
      const nn::Mask& mask = *model.blocks[static_cast<std::size_t>(i)]->attn->violin;
      for (std::int64_t c = 0; c < 8; ++c) {
        const at::Tensor& expected = golden.at(prefix + "ai_list." + std::to_string(c));
        const double largest = expected.abs().max().item<double>();
        if (largest == 0) {
          EXPECT_EQ(mask.beta.grad()[c].abs().max().item<double>(), 0);
        } else {
          EXPECT_LT(relative_error(mask.beta.grad()[c], expected), 1e-4) << i << " " << c;
        }
      }
      EXPECT_LT(relative_error(mask.alpha.grad(), golden.at(prefix + "normalize")), 1e-4);
    }
    const torch::NoGradGuard no_grad;
    std::vector<std::string> sizes = {""};
    for (const Json& crop : about.at("crops")) sizes.push_back("crop_" + crop.dump() + ".");
    for (const std::string& size : sizes) {
      if (!golden.contains(size + "last_attention")) continue;
      SCOPED_TRACE(size);
      const at::Tensor& expected = golden.at(size + "last_attention");
      nn::AttentionRequest request;
      for (std::int64_t query = 0; query < expected.size(2); ++query) request.queries.push_back(query);
      const nn::Observed out =
          model.observe(golden.at(size + "image"), {.blocks = {}, .attention = {{config.depth - 1, request}}});
      EXPECT_LT(relative_error(out.logits, golden.at(size + "output")), 1e-5);
      EXPECT_LT(relative_error(out.attention.at(config.depth - 1), expected), 1e-5);
    }
  }
}

}  // namespace
}  // namespace violin::tests
