#include "tests/nn/helpers.h"
#include "violin/nn/precision.h"

namespace violin::tests {
namespace {

struct Adapted {
  Tensors golden = golden_tensors("lowrank/linear.safetensors");
  std::shared_ptr<nn::Linear> layer;

  Adapted(const std::string& kind, bool norm_gradient) {
    const Json about = golden_json("lowrank/linear.json");
    layer = std::make_shared<nn::Linear>(about.at("in_features"), about.at("out_features"), true);
    layer->to(at::kDouble);
    const torch::NoGradGuard no_grad;
    layer->weight.copy_(golden.at("W0"));
    layer->bias.copy_(golden.at("bias"));
    layer->adapt(kind, about.at("rank"), about.at("lora_alpha"), norm_gradient, 0, "layer");
    layer->lora_A.copy_(golden.at("A"));
    layer->lora_B.copy_(golden.at("B"));
    if (kind == "dora") layer->lora_magnitude.copy_(golden.at("m"));
  }
};

void compare(const std::string& kind, const std::string& gradients, bool norm_gradient) {
  Adapted adapted(kind, norm_gradient);
  nn::Linear& layer = *adapted.layer;
  const Tensors& golden = adapted.golden;
  const at::Tensor x = golden.at("x").clone().requires_grad_();
  const at::Tensor y = layer.forward(x);
  EXPECT_LT(relative_error(y.detach(), golden.at(kind + ".y")), 1e-12);
  y.backward(golden.at("dy"));
  EXPECT_LT(relative_error(layer.lora_A.grad(), golden.at(gradients + ".dA")), 1e-11);
  EXPECT_LT(relative_error(layer.lora_B.grad(), golden.at(gradients + ".dB")), 1e-11);
  EXPECT_LT(relative_error(x.grad(), golden.at((golden.contains(gradients + ".dx") ? gradients : kind) + ".dx")),
            1e-11);
  EXPECT_FALSE(layer.weight.grad().defined());
  if (kind == "dora") {
    EXPECT_LT(relative_error(layer.lora_magnitude.grad(),
                             golden.at((golden.contains(gradients + ".dm") ? gradients : kind) + ".dm")),
              1e-11);
  }
  const torch::NoGradGuard no_grad;
  const at::Tensor before = layer.weight.clone();
  layer.merge();
  EXPECT_LT(relative_error(layer.weight, golden.at(kind + ".W_merged")), 1e-12);
  EXPECT_LT(relative_error(layer.forward(x), golden.at(kind + ".y")), 1e-12);
  layer.unmerge();
  EXPECT_TRUE(at::equal(layer.weight, before));
}

TEST(LowRank, LoraEqualsTheStoredValuesAndGradients) {
  compare("lora", "lora", false);
}
TEST(LowRank, DoraHoldsTheNormFixedInTheGradient) {
  compare("dora", "dora", false);
}
TEST(LowRank, DoraDifferentiatesTheNormOnRequest) {
  compare("dora", "dora_full", true);
}

TEST(LowRank, FreshAdaptersChangeNothingAndOnlyTheyMaskAndHeadLearn) {
  for (const std::string kind : {"lora", "dora"}) {
    nn::ModelConfig config = small_model();
    config.violin = nn::MaskConfig{};
    nn::VisionTransformer model(config, 3);
    model.eval();
    const at::Tensor x = images(2, 32, 32);
    const at::Tensor before = model.forward(x).detach();
    nn::AdapterConfig adapters;
    adapters.kind = kind;
    adapters.ranks = {{"qkv", 4}, {"fc2", 2}};
    model.adapt(adapters, 5);
    EXPECT_LT(relative_error(model.forward(x).detach(), before), 1e-6) << kind;
    model.forward(x).sum().backward();
    for (const auto& item : model.named_parameters()) {
      const bool learns =
          nn::is_adapter_parameter(item.key()) || nn::is_mask_parameter(item.key()) || item.key().starts_with("head");
      EXPECT_EQ(item.value().requires_grad(), learns) << item.key();
      EXPECT_EQ(item.value().grad().defined(), learns) << item.key();
    }
    EXPECT_EQ(model.blocks[0]->attn->qkv->lora_A.size(0), 4);
    EXPECT_EQ(model.blocks[0]->mlp->fc2->lora_A.size(0), 2);
    EXPECT_FALSE(model.blocks[0]->mlp->fc1->adapted());
  }
}

TEST(LowRank, AdaptersFromAFileLeaveTheSameParametersToTrain) {
  nn::ModelConfig config = small_model();
  config.violin = nn::MaskConfig{};
  config.adapters = nn::AdapterConfig{};
  config.adapters->ranks = {{"qkv", 4}};
  const nn::VisionTransformer fresh(config, 3), for_a_file(config, nn::Uninitialised{});
  const auto expected = fresh.named_parameters();
  for (const auto& item : for_a_file.named_parameters())
    EXPECT_EQ(item.value().requires_grad(), expected[item.key()].requires_grad()) << item.key();
}

TEST(LowRank, MergingInsideAutocastRoundsNothing) {
  for (const std::string kind : {"lora", "dora"}) {
    nn::VisionTransformer model(small_model(), 3);
    nn::AdapterConfig adapters;
    adapters.kind = kind;
    adapters.ranks = {{"qkv", 4}};
    model.adapt(adapters);
    nn::Linear& layer = *model.blocks[0]->attn->qkv;
    {
      const torch::NoGradGuard no_grad;
      layer.lora_B.normal_(0, 0.1);
    }
    const at::Tensor exact = layer.merged_weight();
    const nn::PrecisionScope precision(at::kCPU, nn::Precision::kBf16);
    model.merge_adapters();
    EXPECT_TRUE(at::equal(layer.weight, exact)) << kind;
  }
}

TEST(LowRank, MergedModelGivesTheSameLogitsAndDroppingForgets) {
  nn::VisionTransformer model(small_model(), 3);
  model.eval();
  const torch::NoGradGuard no_grad;
  const at::Tensor x = images(2, 32, 32);
  const at::Tensor plain = model.forward(x);
  nn::AdapterConfig adapters;
  adapters.ranks = {{"qkv", 4}, {"proj", 4}};
  model.adapt(adapters);
  for (const auto& block : model.blocks) block->attn->qkv->lora_B.normal_(0, 0.1);
  const at::Tensor adapted = model.forward(x);
  EXPECT_GT(relative_error(adapted, plain), 1e-4);
  model.merge_adapters();
  EXPECT_LT(relative_error(model.forward(x), adapted), 1e-5);
  model.unmerge_adapters();
  EXPECT_TRUE(at::equal(model.forward(x), adapted));
  model.drop_adapters();
  EXPECT_TRUE(at::equal(model.forward(x), plain));
  EXPECT_FALSE(model.config().adapters.has_value());
}

TEST(LowRank, WrongOptionsAreNamed) {
  nn::VisionTransformer model(small_model());
  nn::AdapterConfig adapters;
  EXPECT_THROW(model.adapt(adapters), Error);  // no projection
  adapters.ranks = {{"qkw", 4}};
  EXPECT_THROW(model.adapt(adapters), Error);
  adapters.ranks = {{"qkv", 0}};
  EXPECT_THROW(model.adapt(adapters), Error);
  adapters.ranks = {{"qkv", 1}};
  model.adapt(adapters);
  EXPECT_THROW(model.adapt(adapters), Error);  // twice
}

}  // namespace
}  // namespace violin::tests
