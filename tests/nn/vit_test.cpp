#include "tests/nn/helpers.h"
#include "violin/nn/precision.h"

namespace violin::tests {
namespace {

TEST(VisionTransformer, EveryRegisteredModelRunsForwardAndBackward) {
  for (const nn::ModelEntry& entry : nn::model_registry()) {
    SCOPED_TRACE(entry.name);
    nn::ModelConfig config = entry.config;
    config.depth = 1;
    config.num_classes = 3;
    // Fewer patches, as many pixels as two rows of three of them.
    config.img_size = {2 * config.patch_size.height, 3 * config.patch_size.width};
    nn::VisionTransformer model(config, 1);
    const at::Tensor logits = model.forward(images(2, config.img_size.height, config.img_size.width));
    EXPECT_EQ(logits.sizes(), at::IntArrayRef({2, 3}));
    logits.square().sum().backward();
    for (const auto& item : model.named_parameters()) {
      EXPECT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_TRUE(item.value().grad().isfinite().all().item<bool>()) << item.key();
    }
  }
}

TEST(VisionTransformer, CountsAreThoseOfThePublishedModels) {
  const auto of = [](const std::string& name) {
    const nn::ModelConfig config = nn::find_model(name);
    return nn::cost(config, config.img_size);
  };
  EXPECT_EQ(of("deit_tiny_patch16_224").parameters, 5717416);
  EXPECT_EQ(of("deit_small_patch16_224").parameters, 22050664);
  EXPECT_EQ(of("deit_base_patch16_224").parameters, 86567656);
  EXPECT_EQ(of("deit_base_distilled_patch16_224").parameters, 87338192);
  EXPECT_EQ(of("vit_large_patch16_224").parameters, 304326632);
  EXPECT_EQ(of("deit3_small_patch16_224").parameters, 22059496);
  EXPECT_EQ(of("dino_vitb16").parameters, 85798656);
  EXPECT_EQ(of("violin_deit_base_patch16_224").mask_parameters, 12 * 12 * 9);
  EXPECT_NEAR(of("deit_base_patch16_224").macs / 1e9, 17.58, 0.02);
}

TEST(VisionTransformer, RectanglesAndLeftOverPixels) {
  nn::VisionTransformer model(small_model(), 1);
  model.eval();
  const torch::NoGradGuard no_grad;
  const at::Tensor x = images(2, 24, 40);
  EXPECT_EQ(model.observe(x).grid, (Size{3, 5}));
  // Pixels beyond the last whole patch are left out.
  const at::Tensor padded = at::constant_pad_nd(x, {0, 7, 0, 3}, 5);
  EXPECT_TRUE(at::equal(model.forward(padded), model.forward(x)));
  EXPECT_THROW(model.forward(images(1, 7, 40)), Error);
  EXPECT_THROW(model.forward(at::zeros({1, 4, 32, 32})), Error);
}

TEST(VisionTransformer, EmptyBatchGivesNoLogits) {
  nn::ModelConfig config = small_model();
  for (const bool with_mask : {false, true}) {
    if (with_mask) config.violin = nn::MaskConfig{};
    nn::VisionTransformer model(config, 1);
    model.eval();
    EXPECT_EQ(model.forward(images(0, 32, 32)).sizes(), at::IntArrayRef({0, 5}));
  }
}

TEST(VisionTransformer, DropRatesOutsideTheirRangeAreRefused) {
  nn::VisionTransformer model(small_model(), 1);
  for (const double rate : {1.0, -0.1}) {
    EXPECT_THROW(model.set_drop_path_rate(rate), Error);
    EXPECT_THROW(model.set_drop_rate(rate), Error);
  }
  EXPECT_EQ(model.config(), small_model());
  model.set_drop_rate(0.25);
  EXPECT_EQ(model.config().drop_rate, 0.25);
}

TEST(VisionTransformer, DropPathFollowsGivenDraws) {
  nn::ModelConfig config = small_model();
  config.drop_path_rate = 0.5;
  nn::VisionTransformer model(config, 1);
  const torch::NoGradGuard no_grad;
  const at::Tensor x = images(3, 32, 32);
  model.train();
  const at::Tensor keep_all = at::full({4, 3}, 0.99), drop_second = keep_all.clone();
  drop_second.select(1, 1).fill_(0.1);
  model.set_drop_draws(keep_all);
  const at::Tensor all = model.forward(x);
  model.set_drop_draws(drop_second);
  const at::Tensor dropped = model.forward(x);
  EXPECT_TRUE(at::equal(all[0], dropped[0]));
  EXPECT_FALSE(at::equal(all[1], dropped[1]));
  model.set_drop_draws(keep_all.narrow(1, 0, 2));
  EXPECT_THROW(model.forward(x), Error);
  model.eval();
  EXPECT_TRUE(at::equal(model.forward(x), model.forward(x)));
}

TEST(VisionTransformer, AttentionDropoutTakesThePlainFormula) {
  nn::ModelConfig config = small_model();
  config.violin = nn::MaskConfig{};
  nn::VisionTransformer fused(config, 1);
  config.attn_drop_rate = 1e-12;  // drops nothing, but goes the other way
  nn::VisionTransformer plain(config, 1);
  const at::Tensor x = images(2, 32, 32);
  EXPECT_LT(relative_error(plain.forward(x).detach(), fused.forward(x).detach()), 1e-5);
  config.attn_drop_rate = 0.5;
  nn::VisionTransformer random(config, 1);
  EXPECT_GT(relative_error(random.forward(x).detach(), fused.forward(x).detach()), 1e-4);
}

TEST(VisionTransformer, AttentionRowsAreThoseOfTheWholeMap) {
  nn::ModelConfig config = small_model();
  config.reg_tokens = 2;
  for (const std::string strategy : {"mul_v1", "mul_after_sm", "add_after_sm", "log"}) {
    SCOPED_TRACE(strategy);
    config.violin = nn::MaskConfig{};
    config.violin->strategy = strategy;
    nn::VisionTransformer model(config, 1);
    model.eval();
    const torch::NoGradGuard no_grad;
    const at::Tensor x = images(2, 32, 24);
    nn::AttentionRequest all, some;
    for (std::int64_t i = 0; i < 3 + 12; ++i) all.queries.push_back(i);
    some.queries = {4, 0};
    some.heads = {1};
    const at::Tensor whole = model.observe(x, {.blocks = {}, .attention = {{1, all}}}).attention.at(1);
    const at::Tensor rows = model.observe(x, {.blocks = {}, .attention = {{1, some}}}).attention.at(1);
    EXPECT_EQ(whole.sizes(), at::IntArrayRef({2, 2, 15, 15}));
    EXPECT_EQ(rows.sizes(), at::IntArrayRef({2, 1, 2, 15}));
    EXPECT_LT(relative_error(rows.select(2, 0), whole.narrow(1, 1, 1).select(2, 4)), 1e-5);
    EXPECT_LT(relative_error(rows.select(2, 1), whole.narrow(1, 1, 1).select(2, 0)), 1e-5);
    if (strategy == "mul_v1") {
      EXPECT_LT((whole.sum(-1) - 1).abs().max().item<double>(), 1e-5);
    }
    EXPECT_THROW(model.observe(x, {.blocks = {2}, .attention = {}}), Error);
    some.heads = {2};
    EXPECT_THROW(model.observe(x, {.blocks = {}, .attention = {{0, some}}}), Error);
    some.heads = {};
    some.queries = {15};
    EXPECT_THROW(model.observe(x, {.blocks = {}, .attention = {{0, some}}}), Error);
  }
}

TEST(VisionTransformer, PoolingOrders) {
  nn::ModelConfig config = small_model();
  config.class_token = false;
  config.global_pool = "avg";
  nn::VisionTransformer behind(config, 1);
  config.fc_norm = false;
  nn::VisionTransformer before(config, 1);
  EXPECT_NE(behind.fc_norm, nullptr);
  EXPECT_EQ(behind.norm, nullptr);
  EXPECT_EQ(before.fc_norm, nullptr);
  EXPECT_NE(before.norm, nullptr);
  const at::Tensor x = images(2, 32, 32);
  EXPECT_FALSE(at::equal(behind.forward(x), before.forward(x)));
  config.global_pool = "";
  nn::VisionTransformer tokens(config, 1);
  EXPECT_EQ(tokens.forward(x).sizes(), at::IntArrayRef({2, 16, 5}));
}

TEST(VisionTransformer, AnotherHeadKeepsTheRest) {
  nn::VisionTransformer model(small_model(), 1);
  const at::Tensor norm = model.norm->weight.detach().clone();
  model.replace_head(9, 4);
  EXPECT_EQ(model.forward(images(1, 32, 32)).size(1), 9);
  EXPECT_EQ(model.config().num_classes, 9);
  model.replace_head(0);
  EXPECT_EQ(model.forward(images(1, 32, 32)).size(1), 24);
  EXPECT_TRUE(at::equal(model.norm->weight, norm));
}

TEST(PrecisionScope, KeepsCastsOfWeightsOnlyWhereItIsAskedTo) {
  const auto keeps = [] { return at::autocast::is_autocast_cache_enabled(); };
  ASSERT_TRUE(keeps());
  {
    const nn::PrecisionScope outer(at::kCPU, nn::Precision::kBf16);
    EXPECT_TRUE(keeps());
    {
      const nn::PrecisionScope inner(at::kCPU, nn::Precision::kBf16, nn::WeightCasts::kAtEachUse);
      EXPECT_FALSE(keeps());
    }
    EXPECT_TRUE(keeps());
  }
  EXPECT_TRUE(keeps());
}

}  // namespace
}  // namespace violin::tests
