// Schedules, groups, losses and averages against stored values.
#include <fstream>

#include "tests/train/helpers.h"
#include "violin/checkpoint/tensor_file.h"
#include "violin/data/mixup.h"

namespace violin::tests {
namespace {

using nlohmann::json;

json golden(const std::string& name) {
  std::ifstream file(std::string(VIOLIN_GOLDEN_DIR) + "/training/" + name);
  return json::parse(file);
}

TEST(Schedule, CosineEqualsTimm) {
  const json stored = golden("schedules.json");
  int compared = 0;
  for (const json& entry : stored.at("timm_cosine")) {
    const json& settings = entry.at("settings");
    train::Cosine cosine;
    cosine.base = entry.at("base_lr");
    cosine.t_initial = settings.at("t_initial");
    cosine.lr_min = settings.value("lr_min", 0.0);
    cosine.warmup_t = settings.value("warmup_t", 0.0);
    cosine.warmup_lr_init = settings.value("warmup_lr_init", 0.0);
    cosine.warmup_prefix = settings.value("warmup_prefix", false);
    cosine.cycle_decay = settings.value("cycle_decay", 1.0);
    cosine.cycle_limit = settings.value("cycle_limit", 1);
    for (std::size_t t = 0; t < entry.at("lr").size(); ++t) {
      for (std::size_t group = 0; group < entry.at("lr_scales").size(); ++group) {
        const double expected = entry.at("lr")[t][group], scale = entry.at("lr_scales")[group];
        EXPECT_NEAR(cosine.at(static_cast<double>(t)) * scale, expected, 1e-12) << t;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 50);
}

TEST(Groups, LayerDecayEqualsTimm) {
  const json stored = golden("layer_decay.json");
  for (const json& entry : stored.at("models")) {
    SCOPED_TRACE(entry.at("name").get<std::string>());
    nn::ModelConfig config;
    nn::merge_json(entry.at("config"), config);
    config.distilled = entry.at("distilled");
    const nn::VisionTransformer model(config);
    train::Options options;
    options.layer_decay = entry.at("layer_decay");
    options.weight_decay = entry.at("weight_decay");
    std::size_t seen = 0;
    for (const train::Group& group : train::parameter_groups(model, options)) {
      for (const std::string& name : group.names) {
        const json& expected = entry.at("parameters").at(name);
        EXPECT_NEAR(group.lr_scale, expected.at("lr_scale").get<double>(), 1e-12) << name;
        EXPECT_EQ(group.weight_decay, expected.at("weight_decay").get<double>()) << name;
        ++seen;
      }
    }
    EXPECT_EQ(seen, entry.at("parameters").size());
  }
}

TEST(Groups, MaskHasItsOwnRateAndNoDecay) {
  nn::ModelConfig config = tiny_model();
  const nn::VisionTransformer model(config);
  train::Options options;
  options.layer_decay = 0.5;
  options.mask_lr = 10;
  const auto scale_of = [&](const std::string& wanted) {
    for (const train::Group& group : train::parameter_groups(model, options))
      for (const std::string& name : group.names)
        if (name == wanted) return std::pair(group.lr_scale, group.weight_decay);
    return std::pair(-1.0, -1.0);
  };
  EXPECT_EQ(scale_of("blocks.0.attn.violin.beta"), std::pair(10.0, 0.0));
  options.mask_layer_decay = true;
  EXPECT_EQ(scale_of("blocks.0.attn.violin.beta"), std::pair(10 * 0.25, 0.0));
}

TEST(Groups, WhatIsTrainedFollowsTheOption) {
  nn::VisionTransformer model(tiny_model());
  const auto trained = [&](const std::string& what) {
    train::choose_trainable(model, what);
    std::set<std::string> kinds;
    for (const auto& item : model.named_parameters())
      if (item.value().requires_grad())
        kinds.insert(nn::is_mask_parameter(item.key()) ? "mask" : item.key().starts_with("head") ? "head" : "rest");
    return kinds;
  };
  EXPECT_EQ(trained("head"), std::set<std::string>({"head"}));
  EXPECT_EQ(trained("mask"), std::set<std::string>({"head", "mask"}));
  EXPECT_EQ(trained("all"), std::set<std::string>({"head", "mask", "rest"}));
  model.unplug();
  EXPECT_THROW(train::choose_trainable(model, "mask"), Error);
}

TEST(Loss, EqualsTheStoredValuesAndGradients) {
  const auto file =
      checkpoint::TensorFile::open(std::string(VIOLIN_GOLDEN_DIR) + "/training/cross_entropy.safetensors");
  const json about = golden("index.json").at("cross_entropy");
  const at::Tensor labels = file.tensor("labels").to(at::kLong), targets = file.tensor("targets");
  const auto compare = [&](const std::string& name, const auto& loss_of) {
    const at::Tensor logits = file.tensor("logits").clone().requires_grad_();
    const at::Tensor loss = loss_of(logits);
    EXPECT_NEAR(loss.item<double>(), file.tensor(name + ".loss").item<double>(), 1e-12) << name;
    loss.backward();
    EXPECT_LT((logits.grad() - file.tensor(name + ".dlogits")).abs().max().item<double>(), 1e-12) << name;
  };
  compare("soft_target", [&](const at::Tensor& logits) { return train::soft_target_loss(logits, targets); });
  compare("label_smoothing", [&](const at::Tensor& logits) {
    return train::label_loss(logits, labels, about.at("smoothing").get<double>());
  });
  compare("plain", [&](const at::Tensor& logits) { return train::label_loss(logits, labels, 0); });
  // The targets themselves: smoothed labels, mixed with those of the reversed batch.
  const double lambda = about.at("lam"), smoothing = about.at("smoothing");
  const at::Tensor smooth = data::soft_targets(labels, targets.size(1), smoothing).to(at::kDouble);
  EXPECT_LT((smooth * lambda + smooth.flip(0) * (1 - lambda) - targets).abs().max().item<double>(), 1e-6);
}

TEST(Average, FollowsTheFormula) {
  std::vector<at::Tensor> average = {at::zeros({2}, at::kDouble)};
  const std::vector<at::Tensor> now = {at::ones({2}, at::kDouble)};
  for (int i = 0; i < 3; ++i) train::update_average(average, now, 0.9);
  EXPECT_NEAR(average[0][0].item<double>(), 1 - 0.9 * 0.9 * 0.9, 1e-12);
}

TEST(AdamW, StepsAsTorchDoes) {
  const at::Tensor start = at::randn({5, 3}, at::make_generator<at::CPUGeneratorImpl>(3));
  at::Tensor ours = start.clone().requires_grad_(), theirs = start.clone().requires_grad_();
  train::Options options;
  train::AdamW mine({train::Group{{"w"}, {ours}, 0.5, 0.1}}, options);
  torch::optim::AdamW reference({theirs}, torch::optim::AdamWOptions(1e-2 * 0.5).weight_decay(0.1));
  for (int i = 0; i < 5; ++i) {
    mine.clear_gradients();
    reference.zero_grad();
    (ours * ours).sum().backward();
    (theirs * theirs).sum().backward();
    mine.step(1e-2);
    reference.step();
  }
  EXPECT_LT((ours - theirs).abs().max().item<double>(), 1e-6);
  EXPECT_GT((ours - start).abs().max().item<double>(), 1e-3);
}

TEST(AdamW, ClipsToTheNorm) {
  at::Tensor parameter = at::zeros({4}).requires_grad_();
  train::AdamW optimizer({train::Group{{"w"}, {parameter}, 1, 0}}, train::Options{});
  (parameter * 3).sum().backward();
  EXPECT_NEAR(optimizer.clip_gradients(0.5).item<double>(), 6, 1e-5);
  EXPECT_NEAR(parameter.grad().norm().item<double>(), 0.5, 1e-4);
}

TEST(Options, JsonGivesEveryFieldBackAndMistakesAreNamed) {
  for (const std::string& name : train::recipe_names()) {
    train::Options options;
    train::apply_recipe(name, options);
    train::check(options);
    train::Options back;
    train::merge_json(json::parse(train::to_json(options).dump()), back);
    EXPECT_EQ(train::to_json(back).dump(), train::to_json(options).dump());
    EXPECT_EQ(back.recipe, name);
  }
  const auto message = [](const json& object) {
    try {
      train::Options options;
      train::merge_json(object, options);
      train::check(options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message({{"epoch", 3}}).find("did you mean 'epochs'"), std::string::npos);
  EXPECT_NE(message({{"epochs", "three"}}).find("epochs is \"three\""), std::string::npos);
  EXPECT_NE(message({{"epochs", 0}}).find("epochs is 0; expected a number from 1 to"), std::string::npos);
  EXPECT_NE(message({{"mixup", -1}}).find("mixup"), std::string::npos);
  EXPECT_NE(message({{"crop", "round"}}).find("one of"), std::string::npos);
  train::Options options;
  EXPECT_THROW(train::apply_recipe("diet", options), Error);
}

TEST(Options, NumbersAreFiniteAndOfASaneSize) {
  const auto message = [](const std::string& name, const json& value) {
    try {
      train::Options options;
      train::merge_json({{name, value}}, options);
      train::check(options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const double inf = std::numeric_limits<double>::infinity();
  train::Options options;
  train::visit_options(options, [&](const std::string& name, auto& field, const char*, const char*) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, double> || std::is_same_v<Field, std::optional<double>>) {
      EXPECT_EQ(message(name, inf), "option " + name + " is inf; expected a finite number");
      EXPECT_EQ(message(name, -inf), "option " + name + " is -inf; expected a finite number");
      EXPECT_EQ(message(name, std::nan("")), "option " + name + " is nan; expected a finite number");
    } else if constexpr (std::is_integral_v<Field> && !std::is_same_v<Field, bool>) {
      for (const double value : {inf, 1e300, 0.5})
        EXPECT_NE(message(name, value).find("expected a whole number"), std::string::npos) << name;
      if (name != "seed") {
        EXPECT_NE(message(name, std::numeric_limits<std::uint64_t>::max()), "") << name;
      }
    }
  });
  EXPECT_NE(message("lr_per_512", 1.7e308).find("lr_per_512"), std::string::npos);  // its product with the batch is inf
  EXPECT_NE(message("cache_mb", std::int64_t{1} << 44), "");
  EXPECT_EQ(message("cache_mb", 1 << 20), "");
  EXPECT_EQ(message("epochs", 1e3), "");
  EXPECT_EQ(message("colour_jitter", 100), "");
  EXPECT_NE(message("colour_jitter", 101).find("from 0 to 100"), std::string::npos);
  for (const nlohmann::json& size :
       {nlohmann::json(0), nlohmann::json(64), nlohmann::json({64, 96}), nlohmann::json("64x96")})
    EXPECT_EQ(message("img_size", size), "");
  for (const nlohmann::json& size : {nlohmann::json({0, 96}), nlohmann::json({64, 5000}), nlohmann::json(-1)})
    EXPECT_NE(message("img_size", size).find("expected 0, or sides of 1 to 4096 pixels"), std::string::npos) << size;
  EXPECT_NE(message("img_size", "64x").find(R"(option img_size is "64x"; expected)"), std::string::npos);
}

TEST(Options, ASquareIsOneNumberInJson) {
  train::Options options;
  EXPECT_EQ(train::to_json(options).at("img_size"), 0);
  options.img_size = Size::square(64);
  EXPECT_EQ(train::to_json(options).at("img_size"), 64);
  options.img_size = {64, 96};
  const nlohmann::json json = train::to_json(options);
  EXPECT_EQ(json.at("img_size"), nlohmann::json({64, 96}));
  train::Options back;
  train::merge_json(json, back);
  EXPECT_EQ(back.img_size, options.img_size);
}

TEST(Metrics, CountTopFiveAndConfusion) {
  train::MetricsSum sum(7);
  // Row i prefers class i, then i+1, …
  at::Tensor logits = at::zeros({4, 7});
  for (int row = 0; row < 4; ++row)
    for (int rank = 0; rank < 7; ++rank) logits[row][(row + rank) % 7] = 7 - rank;
  sum.add(logits, at::tensor({0, 1, 6, 0}, at::kLong));  // right, right, fifth place (2+4), place 4 (3+4=7→0)
  const train::Metrics metrics = sum.result();
  EXPECT_EQ(metrics.images, 4);
  EXPECT_DOUBLE_EQ(metrics.top1, 50);
  EXPECT_DOUBLE_EQ(metrics.top5, 100);
  EXPECT_EQ(metrics.confusion[6][2], 1);
  EXPECT_EQ(metrics.confusion[0][0], 1);
}

}  // namespace
}  // namespace violin::tests
