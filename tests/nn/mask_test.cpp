#include "tests/nn/helpers.h"
#include "violin/curves/curves.h"
#include "violin/ops/strategies.h"

namespace violin::tests {
namespace {

nn::ModelConfig masked(const nn::MaskConfig& mask = {}) {
  nn::ModelConfig config = small_model();
  config.violin = mask;
  return config;
}

nn::MaskConfig identity(const std::string& strategy = "mul_v1", const std::string& curves = "violin") {
  nn::MaskConfig mask;
  mask.init = "identity";
  mask.strategy = strategy;
  mask.curves = curves;
  return mask;
}

TEST(Mask, IdentityKeepsEveryBitOfTheVanillaModel) {
  for (const std::string& strategy : ops::strategy_names()) {
    for (const std::string curves :
         {"violin", "snake", "snake,hilbert,peano", "violin,manhattan,z", "random:1,random:2,z,z_T,snake,snake_T"}) {
      SCOPED_TRACE(strategy + " " + curves);
      nn::VisionTransformer model(small_model(), 7);
      model.eval();
      const torch::NoGradGuard no_grad;
      for (const auto& [height, width] : {std::pair{32, 32}, std::pair{24, 40}}) {
        const at::Tensor x = images(3, height, width);
        model.unplug();
        const at::Tensor before = model.forward(x);
        model.plug(identity(strategy, curves), 1);
        EXPECT_TRUE(at::equal(model.forward(x), before));
        model.train();
        EXPECT_TRUE(at::equal(model.forward(x), before));
        model.eval();
      }
    }
  }
}

TEST(Mask, IdentityReceivesGradientsThatMoveItInTheFirstStep) {
  nn::ModelConfig config = small_model();
  config.class_token = false;
  config.global_pool = "avg";
  nn::VisionTransformer model(config, 7);
  {
    // Logits of the size that trained weights have; fresh ones are nearly zero.
    const torch::NoGradGuard no_grad;
    for (const auto& block : model.blocks) {
      block->attn->qkv->weight.mul_(15);
      block->attn->proj->weight.mul_(5);
    }
  }
  model.plug(identity(), 1);
  std::vector<at::Tensor> parameters;
  for (const auto& item : model.named_parameters())
    if (nn::is_mask_parameter(item.key())) parameters.push_back(item.value());
  ASSERT_EQ(parameters.size(), 4U);  // rate and alpha of two blocks
  std::vector<at::Tensor> before;
  for (const at::Tensor& parameter : parameters) before.push_back(parameter.detach().clone());
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0));
  const at::Tensor x = images(8, 32, 32), labels = at::arange(8) % 5;
  // AdamW's first step is the learning rate wherever the gradient is well above its epsilon of 1e-8.
  at::cross_entropy_loss(model.forward(x), labels).backward();
  optimizer.step();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor moved = (parameters[i].detach() - before[i]).abs();
    EXPECT_GT(moved.min().item<double>(), 9e-3) << "of parameter " << i;
  }
  // Some decays have left gamma = 1.
  EXPECT_LT(model.blocks[0]->attn->violin->log_decay().min().item<double>(), 0);
}

TEST(Mask, RateAndSigmoidGiveTheSameMaskForTheSameDecay) {
  nn::MaskConfig sigmoid, rate;
  rate.parameterisation = "rate";
  nn::VisionTransformer a(masked(sigmoid), 5), b(masked(rate), 5);
  const torch::NoGradGuard no_grad;
  nn::Mask& of_a = *a.blocks[0]->attn->violin;
  nn::Mask& of_b = *b.blocks[0]->attn->violin;
  of_b.set_log_decay(of_a.log_decay());
  EXPECT_LT(relative_error(of_b.mask({4, 4}, 1), of_a.mask({4, 4}, 1)), 1e-6);
}

TEST(Mask, InitialValuesLieWhereTheirNamesSay) {
  const auto mask_of = [](const std::string& init) {
    nn::MaskConfig mask;
    mask.init = init;
    return nn::VisionTransformer(masked(mask), 11);
  };
  const auto within = [](const at::Tensor& tensor, double low, double high) {
    return tensor.min().item<double>() >= low && tensor.max().item<double>() <= high;
  };
  const auto pretrain = mask_of("pretrain"), finetune = mask_of("finetune"), spread = mask_of("spread");
  EXPECT_TRUE(within(pretrain.blocks[1]->attn->violin->beta, 5, 9));
  EXPECT_TRUE(within(finetune.blocks[1]->attn->violin->beta, 15, 20));
  EXPECT_TRUE(within(finetune.blocks[1]->attn->violin->alpha, 0.8, 1.2));
  EXPECT_TRUE(within(spread.blocks[1]->attn->violin->alpha, 1, 1));
  // From a few patches to the whole grid of 16.
  const at::Tensor lengths = -1 / spread.blocks[0]->attn->violin->log_decay();
  EXPECT_NEAR(lengths[0][0].item<double>(), 4, 1e-4);
  EXPECT_NEAR(lengths[0][1].item<double>(), 16, 1e-3);
  EXPECT_THROW(mask_of("finetuned"), Error);
}

TEST(Mask, TwinsShareEveryWeightButTheMask) {
  nn::VisionTransformer plain(small_model(), 9), with_mask(masked(), 9), other(masked(), 10);
  std::map<std::string, at::Tensor> weights;
  for (const auto& [name, tensor] : nn::state(with_mask)) weights[name] = tensor;
  for (const auto& [name, tensor] : nn::state(plain)) EXPECT_TRUE(at::equal(tensor, weights.at(name))) << name;
  EXPECT_FALSE(at::equal(other.head->weight, plain.head->weight));
}

TEST(Mask, EvaluationKeepsTablesOfSeveralGridsAndNoticesChanges) {
  nn::VisionTransformer model(masked(), 2);
  model.eval();
  nn::Mask& mask = *model.blocks[0]->attn->violin;
  const torch::NoGradGuard no_grad;
  const at::Tensor large = images(1, 32, 32), small = images(1, 16, 24);
  const at::Tensor first_large = model.forward(large), first_small = model.forward(small);
  EXPECT_EQ(mask.kept_tables(), 2);
  for (int i = 0; i < 3; ++i) {  // crops in alternation
    EXPECT_TRUE(at::equal(model.forward(large), first_large));
    EXPECT_TRUE(at::equal(model.forward(small), first_small));
  }
  EXPECT_EQ(mask.kept_tables(), 2);
  mask.beta.fill_(0);
  const at::Tensor changed = model.forward(large);
  EXPECT_FALSE(at::equal(changed, first_large));
  model.train();
  EXPECT_EQ(mask.kept_tables(), 0);
  EXPECT_TRUE(at::equal(model.forward(large), changed));
  EXPECT_EQ(mask.kept_tables(), 0);
}

TEST(Mask, NothingIsKeptAboveTheLimit) {
  nn::VisionTransformer model(masked(), 2);
  model.eval();
  const torch::NoGradGuard no_grad;
  const at::Tensor x = images(1, 32, 32);
  const at::Tensor kept = model.forward(x);
  EXPECT_EQ(model.blocks[0]->attn->violin->kept_tables(), 1);
  nn::VisionTransformer other(masked(), 2);
  other.eval();
  other.set_table_limit(100);
  EXPECT_TRUE(at::equal(other.forward(x), kept));
  EXPECT_EQ(other.blocks[0]->attn->violin->kept_tables(), 0);
}

TEST(Mask, FrozenTablesStayUntilThawed) {
  nn::VisionTransformer model(masked(), 2);
  model.freeze_tables({32, 32});
  model.eval();
  const torch::NoGradGuard no_grad;
  const at::Tensor x = images(1, 32, 32);
  const at::Tensor before = model.forward(x);
  nn::Mask& mask = *model.blocks[0]->attn->violin;
  mask.beta.fill_(-1);
  EXPECT_TRUE(at::equal(model.forward(x), before));
  EXPECT_FALSE(mask.beta.requires_grad());
  model.thaw_tables();
  EXPECT_FALSE(at::equal(model.forward(x), before));
  EXPECT_TRUE(mask.beta.requires_grad());
}

TEST(Mask, FreezingTakesTheParametersAsTheyAreNow) {
  nn::VisionTransformer model(masked(), 2);
  model.eval();
  nn::Mask& mask = *model.blocks[0]->attn->violin;
  const torch::NoGradGuard no_grad;
  mask.tables({4, 4}, 1);  // kept, and stale after the next line
  mask.beta.fill_(-3);
  model.freeze_tables({32, 32});
  const at::Tensor frozen = *mask.tables({4, 4}, 1).gain;
  model.thaw_tables();
  EXPECT_TRUE(at::equal(frozen, *mask.tables({4, 4}, 1).gain));
}

TEST(Mask, FailedFreezeChangesNothing) {
  nn::VisionTransformer model(masked(), 2);
  EXPECT_THROW(model.freeze_tables({1, 1}), Error);
  nn::Mask& mask = *model.blocks[0]->attn->violin;
  EXPECT_ANY_THROW(mask.freeze({0, 4}, 1));
  EXPECT_FALSE(mask.frozen());
  EXPECT_TRUE(mask.beta.requires_grad());
}

TEST(Mask, ThawingGivesBackEachParametersOwnRequiresGrad) {
  nn::VisionTransformer model(masked(), 2);
  nn::Mask& mask = *model.blocks[0]->attn->violin;
  mask.alpha.requires_grad_(false);
  model.freeze_tables({32, 32});
  model.freeze_tables({16, 16});
  model.thaw_tables();
  EXPECT_FALSE(mask.alpha.requires_grad());
  EXPECT_TRUE(mask.beta.requires_grad());
}

TEST(Mask, OtherGridsOfFrozenModelsFollowLimitsAndParameters) {
  nn::VisionTransformer model(masked(), 2);
  model.eval();
  model.freeze_tables({32, 32});
  nn::Mask& mask = *model.blocks[0]->attn->violin;
  const torch::NoGradGuard no_grad;
  for (std::int64_t width = 1; width <= 40; ++width) mask.tables({1, width}, 1);
  EXPECT_EQ(mask.kept_tables(), 1 + 16);
  const at::Tensor own = *mask.tables({4, 4}, 1).gain, other = *mask.tables({1, 40}, 1).gain;
  mask.beta.fill_(-1);
  EXPECT_TRUE(at::equal(*mask.tables({4, 4}, 1).gain, own));
  EXPECT_FALSE(at::equal(*mask.tables({1, 40}, 1).gain, other));
  model.set_table_limit(1);
  model.eval();
  mask.tables({2, 3}, 1);
  EXPECT_EQ(mask.kept_tables(), 1);
}

TEST(Mask, FrozenTablesFollowTheModelToAnotherType) {
  nn::VisionTransformer model(masked(), 2);
  model.freeze_tables({32, 32});
  model.to(at::kDouble);
  nn::Mask& mask = *model.blocks[0]->attn->violin;
  EXPECT_EQ(mask.tables({4, 4}, 1).gain->scalar_type(), at::kDouble);
  EXPECT_EQ(mask.kept_tables(), 1);
}

TEST(Mask, ParametersMadeInInferenceModeKeepNoTables) {
  const c10::InferenceMode inference;
  nn::VisionTransformer model(masked(), 2);
  model.eval();
  nn::Mask& mask = *model.blocks[0]->attn->violin;
  const at::Tensor before = mask.tables({4, 4}, 1).gain->clone();
  mask.beta.fill_(-3);
  EXPECT_FALSE(at::equal(*mask.tables({4, 4}, 1).gain, before));
  EXPECT_EQ(mask.kept_tables(), 0);
}

TEST(Mask, SixteenBitModelsKeepTheMaskInFull) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    nn::MaskConfig fixed;
    fixed.decay = 0.9996;  // 1 in 16 bits
    nn::VisionTransformer model(masked(fixed), 2);
    model.eval();
    model.to(type);
    const nn::Mask& mask = *model.blocks[0]->attn->violin;
    EXPECT_EQ(mask.alpha.scalar_type(), at::kFloat);
    EXPECT_EQ(mask.gamma.scalar_type(), at::kFloat);
    EXPECT_EQ(mask.gamma[0][0].item<float>(), 0.9996F);
    EXPECT_EQ(model.head->weight.scalar_type(), type);
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(model.forward(images(1, 32, 32).to(type)).scalar_type(), type);
    model.to(at::kCPU, type);
    EXPECT_EQ(mask.gamma.scalar_type(), at::kFloat);
  }
}

// The unit of `rate` is known without walking the grid.
TEST(Mask, UnitsAreTheLargestCoordinates) {
  for (const Size grid : {Size{1, 1}, Size{1, 7}, Size{5, 1}, Size{4, 4}, Size{6, 9}}) {
    for (const std::string& plain : curves::curve_names()) {
      for (const std::string& name : {plain, "frame:" + plain, plain + ",manhattan,random:3"}) {
        if (name == "manhattan,manhattan,random:3") continue;
        nn::MaskConfig config = identity("mul_v1", name);
        nn::Mask mask(config, 1, grid, std::make_shared<nn::TableBudget>());
        const torch::NoGradGuard no_grad;
        mask.rate.fill_(1);
        const curves::Coordinates walked =
            curves::coordinates(curves::parse_curves(name), curves::Grid{0, grid.height, grid.width});
        const at::Tensor largest =
            at::tensor(walked.values).view({walked.curves, -1}).amax(1, true).clamp_min(1).to(at::kFloat);
        EXPECT_TRUE(at::equal(mask.log_decay(), -1 / largest)) << name << " on " << to_string(grid);
        config.decay_per_axis = true;
        EXPECT_EQ(nn::Mask(config, 1, grid, std::make_shared<nn::TableBudget>()).rate.size(1), walked.axes) << name;
      }
    }
  }
}

TEST(Mask, EvaluationWithGradientsStillReachesTheMask) {
  nn::VisionTransformer model(masked(), 2);
  model.eval();
  {
    const torch::NoGradGuard no_grad;
    model.forward(images(1, 32, 32));  // tables are kept now
  }
  model.forward(images(1, 32, 32)).sum().backward();
  EXPECT_TRUE(model.blocks[0]->attn->violin->beta.grad().defined());
}

// Layers that build their tables in one call: the same tables, and the same gradients, as one by one.
TEST(Mask, TablesBuiltTogetherAreThoseBuiltOneByOne) {
  for (const char* strategy : {"mul_v1", "mul_v2", "log", "add_after_sm"}) {
    nn::MaskConfig mask;
    mask.strategy = strategy;
    mask.curves = "violin,manhattan";
    mask.curve_weights = mask.learned_prefix_decay = true;
    mask.heads = {1};
    nn::VisionTransformer model(masked(mask), 2);
    std::vector<nn::Mask*> masks;
    for (const auto& block : model.blocks) masks.push_back(block->attn->violin.get());
    masks.insert(masks.begin() + 1, nullptr);  // a layer without one
    masks.push_back(masks[0]);
    const auto gradients = [&](bool together) {
      for (at::Tensor& parameter : model.parameters()) parameter.mutable_grad() = at::Tensor();
      nn::LayerTables layers(masks, {3, 4}, 1, at::kFloat);
      std::vector<at::Tensor> result;
      at::Tensor sum = at::zeros({});
      for (std::size_t i = 0; i < masks.size(); ++i) {
        const ops::Tables tables = together              ? layers.take(i, false)
                                   : masks[i] == nullptr ? ops::Tables{}
                                                         : masks[i]->tables({3, 4}, 1);
        for (const ops::MaybeTensor* table : {&tables.gain, &tables.bias, &tables.after}) {
          if (!*table) continue;
          result.push_back(**table);
          sum = sum + ((*table)->square() * static_cast<double>(i + 1)).sum();
        }
      }
      EXPECT_EQ(result.size(), masks.size() - 1) << strategy;
      sum.backward();
      for (const auto& item : model.named_parameters())
        if (nn::is_mask_parameter(item.key())) result.push_back(item.value().grad());
      return result;
    };
    const std::vector<at::Tensor> one_by_one = gradients(false), together = gradients(true);
    ASSERT_EQ(one_by_one.size(), together.size());
    for (std::size_t i = 0; i < together.size(); ++i)
      EXPECT_LE(relative_error(together[i], one_by_one[i]), 1e-6) << strategy << " " << i;
  }
}

TEST(Mask, ChosenBlocksAndHeadsOnly) {
  nn::MaskConfig mask;
  mask.blocks = {1};
  mask.heads = {1};
  nn::VisionTransformer model(masked(mask), 2);
  EXPECT_EQ(model.blocks[0]->attn->violin, nullptr);
  ASSERT_NE(model.blocks[1]->attn->violin, nullptr);
  EXPECT_EQ(model.blocks[1]->attn->violin->beta.sizes(), at::IntArrayRef({8, 1}));
  const ops::Tables tables = model.blocks[1]->attn->violin->tables({4, 4}, 1);
  EXPECT_EQ(tables.gain->size(0), 2);
  EXPECT_TRUE(at::equal((*tables.gain)[0], at::ones({17, 17})));
  EXPECT_FALSE(at::equal((*tables.gain)[1], at::ones({17, 17})));
  mask.heads = {2};
  EXPECT_THROW(nn::VisionTransformer(masked(mask), 2), Error);
}

TEST(Mask, EveryOptionTakesPartInTheGradient) {
  nn::MaskConfig mask;
  mask.curve_weights = true;
  mask.learned_prefix_decay = true;
  mask.curves = "violin,manhattan";
  mask.decay_per_axis = true;
  nn::VisionTransformer model(masked(mask), 2);
  model.forward(images(2, 32, 32)).square().sum().backward();
  const nn::Mask& of_first = *model.blocks[0]->attn->violin;
  for (const at::Tensor* parameter : {&of_first.beta, &of_first.alpha, &of_first.curve_weight, &of_first.prefix_beta}) {
    ASSERT_TRUE(parameter->grad().defined());
    EXPECT_GT(parameter->grad().abs().sum().item<double>(), 0);
  }
  EXPECT_EQ(of_first.beta.sizes(), at::IntArrayRef({9, 2, 2}));
}

TEST(Mask, FixedDecayIsNoParameterAndAlphaAloneNeedsNoCurve) {
  nn::MaskConfig fixed;
  fixed.decay = 0.996;
  nn::VisionTransformer model(masked(fixed), 2);
  EXPECT_FALSE(model.blocks[0]->attn->violin->beta.defined());
  EXPECT_NEAR(model.blocks[0]->attn->violin->log_decay().exp()[0][0].item<double>(), 0.996, 1e-6);
  nn::MaskConfig alone;
  alone.curves = "";
  alone.init = "spread";
  nn::VisionTransformer scaled(masked(alone), 2), plain(small_model(), 2);
  scaled.eval(), plain.eval();
  EXPECT_TRUE(at::equal(scaled.forward(images(1, 32, 32)), plain.forward(images(1, 32, 32))));
  const torch::NoGradGuard no_grad;
  scaled.blocks[0]->attn->violin->alpha.fill_(3);
  EXPECT_FALSE(at::equal(scaled.forward(images(1, 32, 32)), plain.forward(images(1, 32, 32))));
}

TEST(Mask, ResizingTheModelKeepsTheDecay) {
  nn::MaskConfig mask = identity();
  nn::VisionTransformer model(masked(mask), 2);
  const torch::NoGradGuard no_grad;
  model.blocks[0]->attn->violin->rate.fill_(2);
  const at::Tensor before = model.blocks[0]->attn->violin->log_decay().clone();
  model.resize({64, 48});
  EXPECT_LT(relative_error(model.blocks[0]->attn->violin->log_decay(), before), 1e-6);
  EXPECT_EQ(model.pos_embed.size(1), 1 + 8 * 6);
  EXPECT_EQ(model.forward(images(1, 64, 48)).sizes(), at::IntArrayRef({1, 5}));
}

TEST(Mask, ResizingKeepsTypeGradientsAndFreezing) {
  nn::VisionTransformer model(masked(identity()), 2);
  model.to(at::kDouble);
  model.blocks[0]->attn->violin->rate.requires_grad_(false);
  model.freeze_tables({32, 32});
  model.resize({64, 48});
  const nn::Mask& mask = *model.blocks[0]->attn->violin;
  EXPECT_EQ(mask.rate.scalar_type(), at::kDouble);
  EXPECT_TRUE(mask.frozen());
  EXPECT_FALSE(mask.alpha.requires_grad());
  EXPECT_EQ(model.forward(images(1, 64, 48).to(at::kDouble)).scalar_type(), at::kDouble);
  EXPECT_EQ(mask.kept_tables(), 1);
  model.thaw_tables();
  EXPECT_FALSE(mask.rate.requires_grad());
  EXPECT_TRUE(mask.alpha.requires_grad());
  nn::MaskConfig fixed;  // a buffer and no parameter
  fixed.decay = 0.9;
  fixed.alpha = false;
  nn::VisionTransformer other(masked(fixed), 2);
  other.to(at::kDouble);
  other.resize({64, 48});
  EXPECT_EQ(other.blocks[0]->attn->violin->gamma.scalar_type(), at::kDouble);
  EXPECT_FALSE(other.blocks[0]->attn->violin->frozen());
}

TEST(Mask, UnpluggedModelIsTheOriginal) {
  nn::VisionTransformer model(small_model(), 4);
  model.eval();
  const torch::NoGradGuard no_grad;
  const at::Tensor x = images(1, 32, 32), before = model.forward(x);
  const std::size_t count = nn::state(model).size();
  model.plug(nn::MaskConfig{}, 1);
  EXPECT_FALSE(at::equal(model.forward(x), before));
  EXPECT_EQ(nn::state(model).size(), count + 4);
  model.unplug();
  EXPECT_TRUE(at::equal(model.forward(x), before));
  EXPECT_EQ(nn::state(model).size(), count);
}

}  // namespace
}  // namespace violin::tests
