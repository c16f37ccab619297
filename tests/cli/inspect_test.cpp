#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/cli/process.h"
#include "tests/cli/weights_files.h"
#include "tests/temporary_folder.h"
#include "violin/data/image.h"

namespace violin {
namespace {

using nlohmann::json;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Inspect, ListsTensorsAndGuessesTheArchitecture) {
  const Outcome outcome = run_violin({"inspect", golden_file("models/distilled.weights.safetensors")});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "head_dist.weight"));
  EXPECT_TRUE(contains(outcome.out, "[1,18,24]"));
  EXPECT_TRUE(contains(outcome.out, "heads unknown"));
  EXPECT_TRUE(contains(outcome.out, "distillation token"));
  const json document =
      json::parse(run_violin({"inspect", golden_file("models/dino_backbone.dino.pth"), "--heads", "2", "--json"}).out);
  EXPECT_EQ(document["branch"], "teacher");
  EXPECT_EQ(document["architecture"]["model"]["num_heads"], 2);
  EXPECT_EQ(document["architecture"]["model"]["num_classes"], 0);
  EXPECT_EQ(document["tensors"].size(), 69U);
}

TEST(Inspect, ShowsDecayAndAlphaOfMasks) {
  const std::string file = golden_file("violin/violin_dino.weights.safetensors");
  const json document = json::parse(run_violin({"inspect", file, "--json"}).out);
  const FloatFile weights = read_floats(file);
  const json& violin = document["violin"];
  EXPECT_EQ(violin["curves"].size(), 8U);
  EXPECT_EQ(violin["last_decay_has_no_gradient"], true);
  for (std::size_t block = 0; block < 2; ++block) {
    const std::string layer = "blocks." + std::to_string(block) + ".attn.";
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t c = 0; c < 8; ++c) {
        const double beta = weights.tensors.at(layer + "ai_list." + std::to_string(c)).values[h];
        EXPECT_NEAR(violin["layers"][block]["gamma"][c][h].get<double>(), 1 / (1 + std::exp(-beta)), 1e-12);
      }
      EXPECT_EQ(violin["layers"][block]["alpha"][h].get<float>(), weights.tensors.at(layer + "normalize").values[h]);
    }
  }
  const Outcome brief = run_violin({"inspect", file}), full = run_violin({"inspect", file, "--full"});
  EXPECT_TRUE(contains(brief.out, "exactly zero gradient"));
  EXPECT_TRUE(contains(brief.out, "zigzag_T"));
  EXPECT_TRUE(contains(full.out, "layer.head"));
  // Read by averaging, every layer's decay matters.
  EXPECT_FALSE(
      contains(run_violin({"inspect", golden_file("violin/violin_deit.weights.safetensors")}).out, "zero gradient"));
}

TEST(Inspect, DrawsLayersHeadsAndCurves) {
  const TemporaryFolder folder;
  const std::string png = folder.file("decay.png"), svg = folder.file("decay.svg");
  const Outcome outcome = run_violin(
      {"inspect", golden_file("violin/violin_deit.weights.safetensors"), "--png", png, "--svg", svg, "--scale", "1"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Image image = load_image(png);
  EXPECT_GE(image.width, 600);
  EXPECT_GT(image.height, 200);
  const Outcome none =
      run_violin({"inspect", golden_file("models/deit.weights.safetensors"), "--png", folder.file("none.png")});
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(contains(none.err, "no mask"));
  EXPECT_EQ(folder.entries(), 2U);
}

TEST(Inspect, LooksAtFilesThatAreNoModels) {
  const Outcome outcome = run_violin({"inspect", golden_file("checkpoint/tensors.safetensors")});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "architecture   unknown")) << outcome.out;
}

TEST(Inspect, MeasuresLoading) {
  const Outcome outcome =
      run_violin({"inspect", golden_file("violin/violin_deit.weights.safetensors"), "--time", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_GT(json::parse(outcome.out)["load_seconds"].get<double>(), 0);
}

TEST(Inspect, MistakesHaveOneLineAndAnExitCode) {
  EXPECT_EQ(run_violin({"inspect"}).code, 2);
  EXPECT_EQ(run_violin({"inspect", golden_file("models/deit.weights.safetensors"), "--heads", "0"}).code, 2);
  for (const std::string& file : {std::string("nowhere"), golden_file("models/index.json"), golden_file("models")}) {
    const Outcome outcome = run_violin({"inspect", file});
    EXPECT_EQ(outcome.code, 1);
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
}

}  // namespace
}  // namespace violin
