// Models out of files and into them: goldens through every form of file, adaptation, reports.
#include "violin/checkpoint/model_file.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "tests/checkpoint/craft.h"
#include "tests/checkpoint/model_files.h"

namespace violin::checkpoint {
namespace {

using tests::golden_json;
using tests::golden_tensors;
using tests::relative_error;
using tests::small_model;

nn::ModelConfig golden_config(const tests::Json& entry) {
  tests::Json config = entry["config"];
  if (entry["kind"] == "vit_distilled") config["distilled"] = true;
  config["norm_eps"] = entry["norm_eps"];
  return nn::model_from_json(config);
}

TEST(LoadModel, GivesTheGoldenLogitsFromEveryFormOfFile) {
  const torch::NoGradGuard no_grad;
  const auto index = golden_json("models/index.json");
  for (const auto& entry : index.at("models")) {
    if (entry["kind"] == "swin") continue;
    const auto expected = golden_tensors("models/" + entry["golden"].get<std::string>());
    std::vector<std::string> files = entry["pth"];
    files.push_back(entry["weights"]);
    for (const std::string& file : files) {
      SCOPED_TRACE(file);
      const LoadedModel loaded = load_model(golden("models/" + file), {.config = golden_config(entry)});
      const nn::Observed seen = loaded.model->observe(expected.at("image"));
      EXPECT_LT(relative_error(seen.logits, expected.at("logits")), 1e-5);
      EXPECT_LT(relative_error(seen.tokens, expected.at("features")), 1e-5);
      EXPECT_TRUE(loaded.report.missing.empty());
      EXPECT_TRUE(loaded.report.unexpected.empty());
      EXPECT_FALSE(loaded.report.loaded.empty());
      EXPECT_FALSE(loaded.model->is_training());
    }
  }
}

TEST(LoadModel, TellsEverythingButHeadsFromTheTensors) {
  const auto index = golden_json("models/index.json");
  for (const auto& entry : index.at("models")) {
    // A rectangular grid needs its size.
    if (entry["kind"] == "swin") continue;
    SCOPED_TRACE(entry["name"]);
    nn::ModelConfig expected = golden_config(entry);
    const LoadedModel loaded = load_model(golden("models/" + entry["weights"].get<std::string>()),
                                          {.num_heads = expected.num_heads, .img_size = expected.img_size});
    expected.fc_norm = expected.norm_behind_pooling();
    nn::ModelConfig got = loaded.model->config();
    got.pos_resample = expected.pos_resample;
    got.init_values = expected.init_values;  // a value of training, not of the tensors
    EXPECT_EQ(nn::to_json(got), nn::to_json(expected));
  }
  const std::string message = message_of([] { load_model(golden("models/deit.weights.safetensors"), {}); });
  EXPECT_TRUE(contains(message, "deit.weights.safetensors") && contains(message, "--heads")) << message;
}

TEST(LoadModel, PublishedViolinModelsGiveTheirOutputsAndGradients) {
  const auto index = golden_json("violin/index.json");
  for (const auto& entry : index.at("models")) {
    SCOPED_TRACE(entry["name"]);
    const auto expected = golden_tensors("violin/" + entry["golden"].get<std::string>());
    const LoadedModel loaded = load_model(golden("violin/" + entry["weights"].get<std::string>()));
    EXPECT_TRUE(loaded.report.unexpected.empty());
    EXPECT_TRUE(any_contains(loaded.report.adapted, "attn.violin.beta"));
    nn::VisionTransformer& model = *loaded.model;
    const at::Tensor output = model.forward(expected.at("image"));
    EXPECT_LT(relative_error(output.detach(), expected.at("output")), 1e-5);
    output.backward(expected.at("d_output"));
    const auto parameters = model.named_parameters();
    std::size_t compared = 0;
    for (std::int64_t block = 0; block < model.config().depth; ++block) {
      const std::string layer = "blocks." + std::to_string(block) + ".attn.";
      const at::Tensor beta = parameters[layer + "violin.beta"].grad();
      for (std::int64_t c = 0; c < beta.size(0); ++c, ++compared) {
        const at::Tensor want = expected.at("grad." + layer + "ai_list." + std::to_string(c));
        EXPECT_LT((beta[c] - want).abs().max().item<double>(), 1e-4 * std::max(want.abs().max().item<double>(), 1e-3));
      }
      EXPECT_LT(relative_error(parameters[layer + "violin.alpha"].grad(), expected.at("grad." + layer + "normalize")),
                1e-4);
    }
    EXPECT_EQ(compared, 16U);
    for (const auto& crop : entry["crops"]) {
      const torch::NoGradGuard no_grad;
      const std::string name = "crop_" + std::to_string(crop.get<int>());
      EXPECT_LT(relative_error(model.forward(expected.at(name + ".image")), expected.at(name + ".output")), 1e-5);
    }
  }
}

TEST(LoadModel, PrefersTheTeacherAndTakesTheStudentOnRequest) {
  const auto entry = golden_json("models/index.json")["models"][6];
  ASSERT_EQ(entry["name"], "dino_backbone");
  const LoadOptions options{.config = golden_config(entry)};
  const LoadedModel teacher = load_model(golden("models/dino_backbone.dino.pth"), options);
  EXPECT_EQ(teacher.report.branch, "teacher");
  EXPECT_TRUE(any_contains(teacher.report.ignored, "student: "));
  EXPECT_TRUE(any_contains(teacher.report.ignored, "teacher.module.head: 4 tensors"));
  LoadOptions of_student = options;
  of_student.branch = "student";
  const LoadedModel student = load_model(golden("models/dino_backbone.dino.pth"), of_student);
  EXPECT_EQ(student.report.branch, "student");
  EXPECT_LT(relative_error(student.model->pos_embed.detach(), teacher.model->pos_embed.detach() + 1), 1e-6);
  of_student.branch = "generator";
  const std::string message = message_of([&] { load_model(golden("models/dino_backbone.dino.pth"), of_student); });
  EXPECT_TRUE(contains(message, "'generator'")) << message;
}

TEST(LoadModel, UnderstandsWrappersAndPrefixes) {
  for (const std::string prefix : {"model.", "state_dict.module.", "model._orig_mod.", "module.", "backbone.",
                                   "teacher.backbone.", "model.module.backbone."}) {
    SCOPED_TRACE(prefix);
    const Fixture fixture(small_model(), prefix);
    expect_same_state(*load_model(fixture.path, {.num_heads = 2}).model, *fixture.model);
  }
}

TEST(LoadModel, TakesTheAverageOnlyWhereAskedFor) {
  const Fixture fixture;
  NamedTensors both = state_of(*fixture.model, "model.");
  for (const auto& [name, tensor] : state_of(*fixture.model, "model_ema.")) both.emplace_back(name, tensor + 1);
  save_safetensors(fixture.path, both);
  expect_same_state(*load_model(fixture.path, {.num_heads = 2}).model, *fixture.model);
  const LoadedModel average = load_model(fixture.path, {.num_heads = 2, .branch = "ema"});
  EXPECT_EQ(average.report.branch, "model_ema");
  EXPECT_TRUE(same_bits(average.model->norm->bias.detach(), (fixture.model->norm->bias + 1).detach()));
}

TEST(LoadModel, KnowsNamesOfDeit3AndDinov2) {
  nn::ModelConfig config = small_model();
  config.init_values = 1e-6;
  const Fixture deit3(config);
  NamedTensors renamed;
  for (auto [name, tensor] : state_of(*deit3.model)) {
    if (const auto at = name.find("ls1.gamma"); at != std::string::npos) name.replace(at, 9, "gamma_1");
    if (const auto at = name.find("ls2.gamma"); at != std::string::npos) name.replace(at, 9, "gamma_2");
    renamed.emplace_back(name, tensor);
  }
  save_safetensors(deit3.path, renamed);
  expect_same_state(*load_model(deit3.path, {.num_heads = 2}).model, *deit3.model);

  config.reg_tokens = 3;
  config.no_embed_class = true;
  const Fixture dinov2(config);
  renamed.clear();
  for (auto [name, tensor] : state_of(*dinov2.model)) {
    if (name == "reg_token") name = "register_tokens";
    if (name == "pos_embed") tensor = at::cat({at::full({1, 1, 24}, 0.5), tensor}, 1);
    if (name == "cls_token") tensor = tensor - 0.5;
    renamed.emplace_back(name, tensor);
  }
  renamed.emplace_back("mask_token", at::zeros({1, 24}));
  save_safetensors(dinov2.path, renamed);
  const LoadedModel loaded = load_model(dinov2.path, {.num_heads = 2});
  EXPECT_LT((loaded.model->cls_token - dinov2.model->cls_token).abs().max().item<double>(), 1e-7);
  EXPECT_TRUE(same_bits(loaded.model->pos_embed.detach(), dinov2.model->pos_embed.detach()));
  EXPECT_TRUE(any_contains(loaded.report.ignored, "mask_token"));
}

TEST(LoadModel, ReadsAFixedDecayOfThePublishedCode) {
  nn::ModelConfig config = small_model();
  config.violin = nn::MaskConfig{};
  config.violin->decay = 0.996;
  config.violin->alpha = false;
  const Fixture fixture(config);
  NamedTensors renamed;
  for (auto [name, tensor] : state_of(*fixture.model)) {
    if (const auto at = name.find("violin.gamma"); at != std::string::npos) name.replace(at, 12, "ai_list");
    renamed.emplace_back(name, tensor);
  }
  save_safetensors(fixture.path, renamed);
  const LoadedModel loaded = load_model(fixture.path);
  ASSERT_TRUE(loaded.model->config().violin.has_value());
  const nn::MaskConfig mask = loaded.model->config().violin.value_or(nn::MaskConfig{});
  EXPECT_NEAR(mask.decay.value_or(0), 0.996, 1e-6);
  EXPECT_FALSE(mask.alpha);
  const torch::NoGradGuard no_grad;
  const at::Tensor images = tests::images(2, 32, 32);
  EXPECT_TRUE(same_bits(loaded.model->forward(images), fixture.model->forward(images)));
}

TEST(LoadModel, ResamplesPositionsByTheNamedRule) {
  const Fixture fixture;
  for (const std::string rule : {"timm", "dino", "deit"}) {
    SCOPED_TRACE(rule);
    const LoadedModel loaded =
        load_model(fixture.path, {.num_heads = 2, .img_size = Size{48, 64}, .pos_resample = rule});
    const at::Tensor expected = nn::resample_positions(fixture.model->pos_embed.detach(), {4, 4}, {6, 8}, 1, rule);
    EXPECT_TRUE(same_bits(loaded.model->pos_embed.detach(), expected.contiguous()));
    EXPECT_EQ(loaded.model->config().img_size, (Size{48, 64}));
    EXPECT_TRUE(any_contains(loaded.report.adapted, "positions resampled (" + rule + "): 4x4 to 6x8"));
    EXPECT_EQ(loaded.preprocessing.size, (Size{48, 64}));
  }
  // A configuration of another size asks for the same.
  nn::ModelConfig larger = small_model();
  larger.img_size = {64, 64};
  const LoadedModel loaded = load_model(fixture.path, {.config = larger});
  EXPECT_EQ(loaded.model->pos_embed.size(1), 65);
}

TEST(LoadModel, ReplacesTheHeadOnlyWhereTheNumberDiffers) {
  const Fixture fixture;
  const LoadedModel same = load_model(fixture.path, {.num_heads = 2, .num_classes = 5});
  expect_same_state(*same.model, *fixture.model);
  const LoadedModel other = load_model(fixture.path, {.num_heads = 2, .num_classes = 9});
  EXPECT_EQ(other.model->head->weight.size(0), 9);
  EXPECT_TRUE(any_contains(other.report.adapted, "head replaced: 5 to 9 classes"));
  EXPECT_TRUE(same_bits(other.model->pos_embed.detach(), fixture.model->pos_embed.detach()));
  const LoadedModel none = load_model(fixture.path, {.num_heads = 2, .num_classes = 0});
  EXPECT_EQ(none.model->head, nullptr);
}

TEST(LoadModel, ResampledPatchesSeeTheSameInScaledImages) {
  const Fixture fixture;
  const LoadedModel loaded = load_model(fixture.path, {.num_heads = 2, .patch_size = Size{16, 16}});
  EXPECT_EQ(loaded.model->config().patch_size, (Size{16, 16}));
  EXPECT_EQ(loaded.model->config().grid(), (Size{2, 2}));
  EXPECT_TRUE(any_contains(loaded.report.adapted, "patches of 8x8 to 16x16"));
  // Scaled up patch by patch, an image gives the same tokens: the scaling has an exact inverse.
  const torch::NoGradGuard no_grad;
  const at::Tensor small = at::randn({1, 3, 8, 8});
  const at::Tensor large = at::_upsample_bicubic2d_aa(small, {16, 16}, false);
  const at::Tensor before = fixture.model->patch_embed->forward(small),
                   after = loaded.model->patch_embed->forward(large);
  EXPECT_LT(relative_error(after, before), 1e-4);
}

TEST(LoadModel, ConvertsHalfPrecisionAndSaysSo) {
  const Fixture fixture;
  NamedTensors half;
  for (const auto& [name, tensor] : state_of(*fixture.model)) half.emplace_back(name, tensor.to(at::kHalf));
  save_safetensors(fixture.path, half);
  const LoadedModel loaded = load_model(fixture.path, {.num_heads = 2});
  EXPECT_EQ(loaded.model->pos_embed.scalar_type(), at::kFloat);
  EXPECT_TRUE(any_contains(loaded.report.adapted, "converted: float16 to float32"));
  EXPECT_LT(relative_error(loaded.model->pos_embed.detach(), fixture.model->pos_embed.detach()), 1e-3);
}

TEST(LoadModel, TakesFamilyDefaultsWhereTheFileIsSilent) {
  const auto preprocessing = [](const std::string& family, std::int64_t size) {
    nn::ModelConfig config;
    config.img_size = {size, size};
    return default_preprocessing(family, config);
  };
  EXPECT_EQ(preprocessing("DeiT", 224).crop_pct, 0.9);
  EXPECT_EQ(preprocessing("DeiT", 384).crop_pct, 1.0);
  EXPECT_EQ(preprocessing("DeiT", 224).normalisation, data::kImageNetStatistics);
  EXPECT_EQ(preprocessing("ViT", 224).normalisation, data::kInceptionStatistics);
  const Fixture fixture;
  const LoadedModel loaded = load_model(fixture.path, {.num_heads = 2});
  EXPECT_TRUE(any_contains(loaded.report.notes, "does not say how images are prepared"));
  EXPECT_EQ(loaded.preprocessing.size, Size::square(32));
}

TEST(Preprocessing, SizesAreNumbersPairsOrText) {
  const auto size = [](const nlohmann::json& value) { return preprocessing_from_json({{"size", value}}).size; };
  EXPECT_EQ(size(40), Size::square(40));
  EXPECT_EQ(size({24, 40}), (Size{24, 40}));
  EXPECT_EQ(size("24x40"), (Size{24, 40}));
  for (const nlohmann::json& wrong :
       {nlohmann::json("24x"), nlohmann::json({24}), nlohmann::json({24, 0}), nlohmann::json(1.5), nlohmann::json()})
    EXPECT_THROW(size(wrong), Error) << wrong;
  EXPECT_EQ(to_json({.size = Size::square(40)}).at("size"), 40);
  EXPECT_EQ(to_json({.size = {24, 40}}).at("size"), nlohmann::json({24, 40}));
}

TEST(Preprocessing, OneNumberBesideARectangularModelIsItsSize) {
  const TemporaryFolder folder;
  const std::string path = folder.file("model.safetensors");
  nn::ModelConfig config = small_model();
  config.img_size = {24, 40};
  save_model(path, nn::VisionTransformer(config, 7), {.size = Size::square(40)});
  EXPECT_EQ(load_model(path).preprocessing.size, (Size{24, 40}));
  EXPECT_EQ(load_model(path, {.img_size = Size{48, 48}}).preprocessing.size, Size::square(48));
}

TEST(Preprocessing, GoesWithTheSizeThatIsAskedFor) {
  const TemporaryFolder folder;
  const std::string path = folder.file("model.safetensors");
  nn::ModelConfig config = small_model();
  config.img_size = Size::square(48);
  save_model(path, nn::VisionTransformer(config, 7), {.size = Size::square(48), .crop_pct = 0.9});
  EXPECT_EQ(load_model(path, {.img_size = Size::square(40)}).preprocessing.crop_pct, 0.9);
  // Small images are taken as they are, whether a size is asked for or a model that has it.
  config.img_size = Size::square(24);
  const LoadOptions by_size = {.img_size = Size::square(24)}, by_model = {.config = config};
  for (const LoadOptions& options : {by_size, by_model}) {
    const data::EvalOptions preprocessing = load_model(path, options).preprocessing;
    EXPECT_EQ(preprocessing.size, Size::square(24));
    EXPECT_EQ(preprocessing.crop_pct, 1);
  }
}

TEST(SaveModel, LoadsBackToTheSameBits) {
  const TemporaryFolder folder;
  nn::ModelConfig config = small_model();
  config.img_size = {24, 40};
  config.violin = nn::MaskConfig{};
  config.violin->curves = "hilbert,zigzag_T,manhattan";
  config.violin->strategy = "add_v1";
  config.violin->init = "identity";
  config.violin->curve_weights = true;
  config.violin->learned_prefix_decay = true;
  config.violin->blocks = {1};
  nn::VisionTransformer model(config, 7);
  model.eval();
  data::EvalOptions preprocessing{.size = {24, 40},
                                  .crop_pct = 0.95,
                                  .crop = data::EvalCrop::kSquash,
                                  .interpolation = data::Interpolation::kBilinear,
                                  .normalisation = data::kCifar10Statistics};
  const std::vector<std::string> names = {"ant", "bée", "cat", "\"dog\"", "eel"};
  const std::string path = folder.file("model.safetensors");
  save_model(path, model, preprocessing, names, {{"epoch", "12"}});
  const LoadedModel loaded = load_model(path);
  expect_same_state(*loaded.model, model);
  EXPECT_EQ(nn::to_json(loaded.model->config()), nn::to_json(model.config()));
  EXPECT_EQ(loaded.classes, names);
  EXPECT_EQ(to_json(loaded.preprocessing), to_json(preprocessing));
  EXPECT_EQ(loaded.metadata.at("epoch"), "12");
  const torch::NoGradGuard no_grad;
  const at::Tensor images = tests::images(2, 24, 40);
  EXPECT_TRUE(same_bits(loaded.model->forward(images), model.forward(images)));
  // Saving what was loaded gives the same file.
  const std::string again = folder.file("again.safetensors");
  save_model(again, *loaded.model, loaded.preprocessing, loaded.classes, {{"epoch", "12"}});
  EXPECT_EQ(contents(path), contents(again));
}

TEST(SaveModel, KeepsAdaptersAndRefusesMergedOnes) {
  const TemporaryFolder folder;
  nn::VisionTransformer model(small_model(), 7);
  model.adapt({.kind = "dora", .ranks = {{"qkv", 2}, {"fc1", 3}}});
  const std::string path = folder.file("model.safetensors");
  save_model(path, model, {});
  expect_same_state(*load_model(path).model, model);
  model.merge_adapters();
  EXPECT_TRUE(contains(message_of([&] { save_model(path, model, {}); }), "merged"));
}

TEST(SaveModel, RefusesNamesThatAreNotOnePerClass) {
  const TemporaryFolder folder;
  const nn::VisionTransformer model(small_model(), 7);
  const std::string path = folder.file("model.safetensors");
  EXPECT_TRUE(contains(message_of([&] { save_model(path, model, {}, {"a", "b"}); }), "2 class names"));
  EXPECT_TRUE(contains(message_of([&] { save_model(path, model, {}, {"a", "b", "c", "d", "\xff"}); }), "UTF-8"));
  EXPECT_EQ(folder.entries(), 0U);
}

TEST(ResolveWeights, PrefersTheBestEpochOfARun) {
  const TemporaryFolder folder;
  const std::filesystem::path run = folder.path() / "run";
  std::filesystem::create_directories(run / "best");
  std::filesystem::create_directories(run / "last");
  EXPECT_TRUE(contains(message_of([&] { resolve_weights(run); }), "no weights"));
  nn::VisionTransformer model(small_model(), 1);
  save_model(run / "last/model.safetensors", model, {});
  EXPECT_EQ(resolve_weights(run), run / "last/model.safetensors");
  save_model(run / "best/model.safetensors", model, {});
  EXPECT_EQ(resolve_weights(run), run / "best/model.safetensors");
  EXPECT_EQ(resolve_weights("weights.pth"), "weights.pth");
  expect_same_state(*load_model(run).model, model);
}

TEST(Architecture, NamesModelsOfTheRegistry) {
  for (const std::string name : {"deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_micro_patch4_32"}) {
    SCOPED_TRACE(name);
    nn::ModelConfig config = nn::find_model(name);
    const TemporaryFolder folder;
    const nn::VisionTransformer model(config, nn::Uninitialised{});
    const std::string path = folder.file("x.safetensors");
    save_safetensors(path, state_of(model));
    const TensorFile file = TensorFile::open(path);
    const Architecture found = infer_architecture(translate(file, path));
    EXPECT_EQ(found.name, name);
    EXPECT_EQ(found.config.num_heads, config.num_heads);
    EXPECT_EQ(found.config.pos_resample, config.pos_resample);
  }
}

TEST(Architecture, CountsBlocksAndCurvesWithoutGaps) {
  const Fixture fixture;
  NamedTensors gap;
  for (auto [name, tensor] : state_of(*fixture.model)) {
    if (name.starts_with("blocks.1.")) name[7] = '4';
    gap.emplace_back(name, tensor);
  }
  save_safetensors(fixture.path, gap);
  EXPECT_TRUE(contains(message_of([&] { load_model(fixture.path, {.num_heads = 2}); }), "numbered up to 4"));
  NamedTensors curves = state_of(*fixture.model);
  curves.emplace_back("blocks.0.attn.ai_list.0", at::zeros({2}));
  curves.emplace_back("blocks.0.attn.ai_list.2", at::zeros({2}));
  save_safetensors(fixture.path, curves);
  EXPECT_TRUE(contains(message_of([&] { load_model(fixture.path); }), "ai_list"));
}

}  // namespace
}  // namespace violin::checkpoint
