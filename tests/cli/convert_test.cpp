#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/process.h"
#include "tests/cli/weights_files.h"
#include "tests/temporary_folder.h"

namespace violin {
namespace {

using nlohmann::json;

TEST(Convert, WritesAFileThatSaysWhatItIs) {
  const TemporaryFolder folder;
  const std::string out = folder.file("deit.safetensors"), classes = folder.file("classes.txt");
  std::ofstream(classes) << "a\nb\r\nc\nd\ne\nf\ng\nh\ni\nj\n";
  const Outcome outcome = run_violin({"convert", golden_file("models/deit.plain.pth"), out, "--heads", "2", "--classes",
                                      classes, "--statistics", "inception", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["model"]["num_heads"], 2);
  EXPECT_TRUE(report["missing"].empty());
  const FloatFile file = read_floats(out);
  EXPECT_EQ(json::parse(file.metadata["violin.classes"].get<std::string>())[1], "b");
  EXPECT_EQ(json::parse(file.metadata["violin.model"].get<std::string>())["embed_dim"], 32);
  EXPECT_EQ(json::parse(file.metadata["violin.preprocessing"].get<std::string>())["mean"], json({0.5, 0.5, 0.5}));
  EXPECT_FALSE(file.metadata["violin.version"].get<std::string>().empty());
  const FloatFile weights = read_floats(golden_file("models/deit.weights.safetensors"));
  ASSERT_EQ(file.tensors.size(), weights.tensors.size());
  for (const auto& [name, tensor] : weights.tensors) EXPECT_EQ(file.tensors.at(name).values, tensor.values) << name;
  // Now nothing needs to be said, and converting again changes nothing.
  const std::string again = folder.file("again.safetensors");
  ASSERT_EQ(run_violin({"convert", out, again}).code, 0);
  EXPECT_EQ(read_floats(again).metadata, file.metadata);
}

TEST(Convert, TranslatesPublishedMasksAndResamplesPositions) {
  const TemporaryFolder folder;
  const std::string out = folder.file("out.safetensors");
  const Outcome outcome =
      run_violin({"convert", golden_file("violin/violin_dino.weights.safetensors"), out, "--img-size", "48x40"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("positions resampled (dino): 8x8 to 12x10"), std::string::npos) << outcome.out;
  const FloatFile file = read_floats(out);
  EXPECT_EQ(file.tensors.at("pos_embed").shape, (std::vector<std::int64_t>{1, 121, 24}));
  EXPECT_EQ(file.tensors.at("blocks.1.attn.violin.beta").shape, (std::vector<std::int64_t>{8, 2}));
  EXPECT_EQ(file.tensors.at("blocks.1.attn.violin.alpha").shape, (std::vector<std::int64_t>{2}));
}

TEST(Convert, MistakesHaveOneLineAndAnExitCode) {
  const TemporaryFolder folder;
  const std::string out = folder.file("out.safetensors");
  const std::string weights = golden_file("models/deit.weights.safetensors");
  EXPECT_EQ(run_violin({"convert", weights}).code, 2);
  EXPECT_EQ(run_violin({"convert", weights, out, "--dtype", "int4"}).code, 2);
  EXPECT_EQ(run_violin({"convert", weights, out, "--img-size", "0"}).code, 2);
  EXPECT_EQ(run_violin({"convert", weights, out, "--model", "deit_smal"}).code, 2);
  EXPECT_EQ(run_violin({"convert", weights, out, "--pos-resample", "linear"}).code, 2);
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"convert", "nowhere.pth", out},
           {"convert", weights, out},
           {"convert", weights, out, "--model", "deit_tiny_patch16_224"},
           {"convert", weights, folder.file("no/such/folder.safetensors"), "--heads", "2"},
           {"convert", weights, out, "--heads", "2", "--branch", "teacher"},
           {"convert", golden_file("models/index.json"), out}}) {
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }
  EXPECT_EQ(folder.entries(), 0U);
}

}  // namespace
}  // namespace violin
