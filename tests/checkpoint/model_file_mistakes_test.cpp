// Files that do not hold the model that they claim or are asked for: one line that names the file and the thing.
#include <nlohmann/json.hpp>

#include "tests/checkpoint/craft.h"
#include "tests/checkpoint/model_files.h"

namespace violin::checkpoint {
namespace {

using tests::small_model;

TEST(LoadModel, MissingWeightsAreAnErrorUnlessAllowed) {
  const Fixture fixture;
  NamedTensors fewer;
  for (const auto& [name, tensor] : state_of(*fixture.model))
    if (name != "blocks.1.mlp.fc2.bias") fewer.emplace_back(name, tensor);
  save_safetensors(fixture.path, fewer);
  const std::string message = message_of([&] { load_model(fixture.path, {.num_heads = 2}); });
  EXPECT_TRUE(contains(message, fixture.path) && contains(message, "'blocks.1.mlp.fc2.bias'")) << message;
  const LoadedModel loaded = load_model(fixture.path, {.num_heads = 2, .strict = false});
  EXPECT_EQ(loaded.report.missing, std::vector<std::string>{"blocks.1.mlp.fc2.bias"});
  EXPECT_EQ(loaded.model->blocks[1]->mlp->fc2->bias.abs().max().item<float>(), 0);
}

// Tensors of a .pth may share a storage; a model's parameters have their own.
TEST(LoadModel, ASmallFileDoesNotBecomeALargeModel) {
  const TemporaryFolder folder;
  const std::string path = folder.file("shared.pth");
  const auto write = [&](int depth) {
    nn::ModelConfig config = small_model();
    config.embed_dim = 256;
    config.depth = depth;
    std::vector<std::pair<std::string, std::string>> items;
    const std::int64_t largest = 4 * 256 * 256;
    for (const auto& [name, tensor] : nn::state(nn::VisionTransformer(config, nn::Uninitialised{}))) {
      items.emplace_back(
          name, op::tensor(op::storage("FloatStorage", "0", largest), 0, tensor.sizes().vec(), tensor.strides().vec()));
    }
    put(path, torch_file(op::dict(items), {std::string(4 * static_cast<std::size_t>(largest), '\0')}));
  };
  write(4);  // 13 MB of tensors
  EXPECT_EQ(load_model(path, {.num_heads = 2}).model->blocks.size(), 4U);
  write(40);
  const std::string message = message_of([&] { load_model(path, {.num_heads = 2}); });
  EXPECT_TRUE(contains(message, path) && contains(message, "share memory")) << message;
}

TEST(LoadModel, UnexpectedTensorsAreReported) {
  const Fixture fixture;
  NamedTensors more = state_of(*fixture.model);
  more.emplace_back("blocks.0.attn.rel_pos.weight", at::zeros({2}));
  save_safetensors(fixture.path, more);
  const LoadedModel loaded = load_model(fixture.path, {.num_heads = 2});
  EXPECT_EQ(loaded.report.unexpected, std::vector<std::string>{"blocks.0.attn.rel_pos.weight"});
  EXPECT_TRUE(contains(loaded.report.text(), "unexpected"));
  EXPECT_EQ(loaded.report.json()["unexpected"].size(), 1U);
  EXPECT_EQ(loaded.report.warnings().back(),
            "1 tensor of the weights has no place in the model and is left out: blocks.0.attn.rel_pos.weight");
  for (const char* name : {"a", "b", "c"}) more.emplace_back(name, at::zeros({2}));
  save_safetensors(fixture.path, more);
  const std::string line = load_model(fixture.path, {.num_heads = 2}).report.warnings().back();
  EXPECT_TRUE(contains(line, "4 tensors of the weights have no place")) << line;
  EXPECT_TRUE(line.ends_with(", …")) << line;
}

TEST(LoadModel, ShapesThatDoNotFitNameTheFileAndTheTensor) {
  const Fixture fixture;
  nn::ModelConfig wide = small_model();
  wide.embed_dim = 48;
  std::string message = message_of([&] { load_model(fixture.path, {.config = wide}); });
  EXPECT_TRUE(contains(message, fixture.path) && contains(message, "'patch_embed.proj.weight' is [24,3,8,8]"))
      << message;
  nn::ModelConfig deep = small_model();
  deep.depth = 3;
  message = message_of([&] { load_model(fixture.path, {.config = deep}); });
  EXPECT_TRUE(contains(message, "2 whole blocks")) << message;
  nn::ModelConfig many = small_model();
  many.num_classes = 1 << 24;
  message = message_of([&] { load_model(fixture.path, {.config = many}); });
  EXPECT_TRUE(contains(message, "'head.weight' is [5,24]")) << message;
  nn::ModelConfig narrow = small_model();
  narrow.mlp_ratio = 2;
  message = message_of([&] { load_model(fixture.path, {.config = narrow}); });
  EXPECT_TRUE(contains(message, "mlp.fc1")) << message;

  NamedTensors wrong = state_of(*fixture.model);
  for (auto& [name, tensor] : wrong)
    if (name == "blocks.1.norm2.weight") tensor = at::zeros({23});
  save_safetensors(fixture.path, wrong);
  message = message_of([&] { load_model(fixture.path, {.num_heads = 2}); });
  EXPECT_TRUE(contains(message, "'blocks.1.norm2.weight' is [23]; the model has [24]")) << message;
  for (auto& [name, tensor] : wrong)
    if (name == "blocks.1.norm2.weight") tensor = at::zeros({24}, at::kLong);
  save_safetensors(fixture.path, wrong);
  message = message_of([&] { load_model(fixture.path, {.num_heads = 2}); });
  EXPECT_TRUE(contains(message, "'blocks.1.norm2.weight' holds int64")) << message;
}

TEST(LoadModel, OtherFilesAreRefusedByName) {
  const std::string message = message_of([] { load_model(golden("checkpoint/tensors.safetensors")); });
  EXPECT_TRUE(contains(message, "tensors.safetensors") && contains(message, "patch_embed.proj.weight")) << message;
  EXPECT_TRUE(contains(message_of([] { load_model("nowhere.pth"); }), "nowhere.pth"));
}

TEST(LoadModel, MetadataThatLiesIsRefused) {
  const Fixture fixture;
  const auto with = [&](const std::string& key, const std::string& text) {
    save_safetensors(fixture.path, state_of(*fixture.model), {{key, text}});
    return message_of([&] { load_model(fixture.path, {.num_heads = 2}); });
  };
  EXPECT_TRUE(contains(with("violin.model", "{"), "'violin.model' is not JSON"));
  EXPECT_TRUE(contains(with("violin.model", R"({"deapth": 3})"), "did you mean 'depth'"));
  EXPECT_TRUE(
      contains(with("violin.model",
                    R"({"img_size":32,"patch_size":8,"embed_dim":24,"depth":2,"num_heads":2,"num_classes":16777216})"),
               "head.weight"));
  EXPECT_TRUE(contains(with("violin.preprocessing", R"({"size": 100000000})"), "size"));
  EXPECT_TRUE(contains(with("violin.preprocessing", R"({"std": [0,1,1]})"), "std"));
  EXPECT_TRUE(contains(with("violin.classes", R"([1,2])"), "violin.classes"));
}

TEST(LoadModel, DeepAndLongMetadataAreRefusedByFileAndKey) {
  const Fixture fixture;
  const auto with = [&](const std::string& key, const std::string& text) {
    save_safetensors(fixture.path, state_of(*fixture.model), {{key, text}});
    const std::string message = message_of([&] { load_model(fixture.path, {.num_heads = 2}); });
    EXPECT_TRUE(contains(message, fixture.path) && contains(message, key)) << message;
    return message;
  };
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  EXPECT_TRUE(contains(with("violin.model", R"({"depth":)" + deep + "}"), "nested deeper than 32"));
  EXPECT_TRUE(contains(with("violin.preprocessing", R"({"mean":)" + deep + "}"), "nested deeper than 32"));
  EXPECT_TRUE(contains(with("violin.classes", std::string(17 << 20, '[')), "at most 16777216 are read"));
  EXPECT_THROW(preprocessing_from_json({{"mean", nlohmann::json::parse(deep)}}), Error);
  EXPECT_THROW(nn::model_from_json({{"depth", nlohmann::json::parse(deep)}}), Error);
}

// Neither file gets as far as memory for the sizes that it claims: a terabyte, and curves over 2^28 patches.
TEST(LoadModel, SizesThatNoTensorProvesAreRefused) {
  const TemporaryFolder folder;
  const std::string path = folder.file("claims.safetensors");
  const std::string wide =
      R"({"img_size":32,"embed_dim":16384,"depth":1,"num_heads":1,"mlp_ratio":999,"pos_embed":"none"})";
  save_safetensors(path, {{"blocks.0.norm1.weight", at::ones({1})}}, {{"violin.model", wide}});
  for (const bool strict : {true, false}) {
    const std::string message = message_of([&] { load_model(path, {.strict = strict}); });
    EXPECT_TRUE(contains(message, path) && contains(message, "no tensor 'patch_embed.proj.weight'")) << message;
  }
  const std::string large = R"({"img_size":16384,"patch_size":1,"embed_dim":8,"depth":1,"num_heads":1,"mlp_ratio":1,
      "pos_embed":"none","num_classes":2,"violin":{"curves":"violin"}})";
  save_safetensors(path,
                   {{"patch_embed.proj.weight", at::ones({8, 3, 1, 1})},
                    {"blocks.0.norm1.weight", at::ones({8})},
                    {"blocks.0.attn.qkv.weight", at::ones({24, 8})},
                    {"blocks.0.mlp.fc1.weight", at::ones({8, 8})}},
                   {{"violin.model", large}});
  const std::string message = message_of([&] { load_model(path); });
  EXPECT_TRUE(contains(message, path) && contains(message, "weights of the model are missing")) << message;
}

TEST(LoadModel, MissingWeightsOfEveryStructureAreNamed) {
  nn::ModelConfig config = small_model();
  config.reg_tokens = 3;
  config.init_values = 1e-5;
  config.violin = nn::MaskConfig{};
  config.violin->heads = {1};
  config.violin->curve_weights = true;
  config.adapters = nn::AdapterConfig{};
  config.adapters->ranks = {{"qkv", 4}, {"fc2", 2}};
  const Fixture fixture(config);
  const NamedTensors whole = state_of(*fixture.model);
  for (const auto& [left_out, unused] : whole) {
    if (left_out.ends_with(".norm1.weight")) continue;  // blocks are counted by it
    NamedTensors fewer;
    for (const auto& [name, tensor] : whole)
      if (name != left_out) fewer.emplace_back(name, tensor);
    save_safetensors(fixture.path, fewer);
    const std::string message = message_of([&] { load_model(fixture.path, {.config = config}); });
    EXPECT_TRUE(contains(message, "1 weight of the model is missing: '" + left_out + "'")) << message;
  }
  save_safetensors(fixture.path, whole);
  expect_same_state(*load_model(fixture.path, {.config = config}).model, *fixture.model);
}

TEST(LoadModel, WhatTorchRefusesNamesTheFile) {
  nn::ModelConfig config = small_model();
  config.reg_tokens = 3;
  config.no_embed_class = true;
  const Fixture fixture(config);
  NamedTensors tensors;
  for (auto [name, tensor] : state_of(*fixture.model)) {
    if (name == "reg_token") name = "register_tokens";  // then a position is added to the class token
    if (name == "pos_embed") tensor = at::cat({at::zeros({1, 1, 24}), tensor}, 1);
    if (name == "cls_token") tensor = tensor.to(at::kFloat8_e4m3fn);
    tensors.emplace_back(name, tensor);
  }
  save_safetensors(fixture.path, tensors);
  const std::string message = message_of([&] { load_model(fixture.path, {.num_heads = 2}); });
  EXPECT_TRUE(contains(message, fixture.path) && contains(message, "no model can be made of it")) << message;
}

TEST(LoadModel, EmptyDecaysAreRefusedByName) {
  const Fixture fixture;
  NamedTensors tensors = state_of(*fixture.model);
  tensors.emplace_back("blocks.0.attn.violin.gamma", at::zeros({8, 0}));
  save_safetensors(fixture.path, tensors);
  const std::string message = message_of([&] { load_model(fixture.path); });
  EXPECT_TRUE(contains(message, fixture.path) && contains(message, "'blocks.0.attn.violin.gamma' is [8,0]")) << message;
}

TEST(LoadModel, MaskParametersThatTheDescriptionDoesNotMentionAreRefused) {
  const Fixture fixture;
  nn::ModelConfig masked = fixture.model->config();
  masked.violin = nn::MaskConfig{};
  const nn::VisionTransformer model(masked, 3);
  save_safetensors(fixture.path, state_of(model), {{"violin.model", nn::to_json(fixture.model->config()).dump()}});
  EXPECT_TRUE(contains(message_of([&] { load_model(fixture.path); }), "describes a model without a mask"));
  expect_same_state(*load_model(fixture.path, {.config = masked}).model, model);
}

}  // namespace
}  // namespace violin::checkpoint
