#include "tests/nn/helpers.h"

namespace violin::tests {
namespace {

std::string message(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ModelConfig, JsonGivesEveryFieldBack) {
  for (const nn::ModelEntry& entry : nn::model_registry()) {
    nn::ModelConfig config = entry.config;
    const std::string text = nn::to_json(config).dump();
    config.fc_norm = config.norm_behind_pooling();  // written out
    if (config.violin) config.violin->parameterisation = "sigmoid";
    EXPECT_EQ(nn::model_from_json(Json::parse(text)), config) << entry.name << " " << text;
  }
  nn::ModelConfig config = small_model();
  config.img_size = {32, 64};
  nn::MaskConfig mask;
  mask.curves = "snake,random:3";
  mask.decay = 0.99;
  mask.heads = {1};
  mask.learned_prefix_decay = true;
  config.violin = mask;
  nn::AdapterConfig adapters;
  adapters.ranks = {{"fc1", 3}};
  config.adapters = adapters;
  const nn::ModelConfig back = nn::model_from_json(Json::parse(nn::to_json(config).dump()));
  const nn::MaskConfig mask_back = back.violin.value_or(nn::MaskConfig());
  EXPECT_EQ(mask_back.curves, "snake,random:3");
  EXPECT_EQ(mask_back.decay, 0.99);
  EXPECT_EQ(mask_back.heads, mask.heads);
  EXPECT_TRUE(mask_back.learned_prefix_decay);
  EXPECT_EQ(back.adapters.value_or(nn::AdapterConfig()).ranks, adapters.ranks);
  EXPECT_EQ(back.img_size, config.img_size);
}

TEST(ModelConfig, TheDesignsDescriptionIsAccepted) {
  const nn::ModelConfig config = nn::model_from_json(Json::parse(R"({
    "img_size": [32, 48], "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7,
    "class_token": false, "global_pool": "avg", "fc_norm": false,
    "violin": {"curves": ["snake", "hilbert_T"], "strategy": "mul_v2", "decay": 0.9, "alpha": true,
               "curve_weights": true, "prefix_decay": "learned", "init": "finetune"}})"));
  EXPECT_EQ(config.violin.value_or(nn::MaskConfig()).curves, "snake,hilbert_T");
  EXPECT_EQ(config.grid(), (Size{8, 12}));
}

TEST(Size, TextIsANumberOrTwo) {
  EXPECT_EQ(parse_size("224"), Size::square(224));
  EXPECT_EQ(parse_size("160x224"), (Size{160, 224}));
  for (const char* text :
       {"", "x", "64x", "x64", "64x96x3", "-4", "+4", "4.5", "64 x 96", "64X96", "99999999999999999999"})
    EXPECT_FALSE(parse_size(text).has_value()) << text;
  EXPECT_EQ(short_text({224, 224}), "224");
  EXPECT_EQ(short_text({160, 224}), "160x224");
  for (const Size& size : {Size{0, 0}, Size{224, 224}, Size{160, 224}})
    EXPECT_EQ(nn::size_from_json(Json(nn::to_json(size))), size);
  EXPECT_EQ(nn::size_from_json("160x224"), (Size{160, 224}));
  for (const char* text : {"[1]", "[1,2,3]", "[1,\"2\"]", "1.5", "1e300", "null", "true", "{}", "\"wide\""})
    EXPECT_FALSE(nn::size_from_json(Json::parse(text)).has_value()) << text;
}

TEST(ModelConfig, MistakesAreNamedWithARemedy) {
  const auto of = [](const std::string& text) { return message([&] { nn::model_from_json(Json::parse(text)); }); };
  EXPECT_NE(of(R"({"embed_dims": 3})").find("did you mean 'embed_dim'"), std::string::npos);
  EXPECT_NE(of(R"({"depth": "x"})").find("depth is \"x\"; expected a whole number"), std::string::npos);
  EXPECT_NE(of(R"({"num_heads": 5})").find("divisor of embed_dim"), std::string::npos);
  EXPECT_NE(of(R"({"class_token": false})").find("global_pool"), std::string::npos);
  EXPECT_NE(of(R"({"violin": {"strategy": "mul"}})").find("mul_v1"), std::string::npos);
  EXPECT_NE(of(R"({"violin": {"curves": ["snale"]}})").find("snake"), std::string::npos);
  EXPECT_NE(of(R"({"violin": {"init": "identity", "parameterisation": "sigmoid"}})").find("rate"), std::string::npos);
  EXPECT_NE(of(R"({"violin": {"init": "identity", "strategy": "add_v1", "alpha": false}})").find("alpha"),
            std::string::npos);
  EXPECT_NE(of(R"({"violin": {"blocks": [12]}})").find("violin.blocks is 12"), std::string::npos);
  EXPECT_NE(of(R"({"violin": {"decay": 1.5}})").find("violin.decay"), std::string::npos);
  EXPECT_NE(of(R"([1])").find("an object"), std::string::npos);
  EXPECT_NE(of(R"({"depth": 1e300})").find("depth"), std::string::npos);
  EXPECT_NE(of(R"({"img_size": 8})").find("img_size"), std::string::npos);
}

TEST(Registry, NamesAreUniqueAndUnknownOnesGetASuggestion) {
  std::set<std::string> names;
  for (const nn::ModelEntry& entry : nn::model_registry()) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
    EXPECT_EQ(nn::find_model(entry.name), entry.config);
    for (const std::string& alias : entry.aliases) EXPECT_EQ(nn::find_model(alias), entry.config);
  }
  EXPECT_GE(names.size(), 30U);
  EXPECT_TRUE(nn::find_model("violin_vit_tiny_patch2_32").violin.has_value());
  EXPECT_NE(message([] { nn::find_model("deit_smal_patch16_224"); }).find("deit_small_patch16_224"), std::string::npos);
}

}  // namespace
}  // namespace violin::tests
