#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/process.h"
#include "tests/cli/weights_files.h"
#include "tests/temporary_folder.h"
#include "violin/data/file.h"
#include "violin/data/image.h"

namespace violin {
namespace {

using nlohmann::json;

TEST(Features, GivesTheGoldenLogitsForTensorsOfImages) {
  const TemporaryFolder folder;
  const FloatFile golden = read_floats(golden_file("models/deit.golden.safetensors"));
  const std::string input = folder.file("images.safetensors"), out = folder.file("out.safetensors");
  write_floats(input, {{"images", golden.tensors.at("image")}});
  const std::string config = folder.file("model.json");
  std::ofstream(config) << R"({"img_size":32,"patch_size":8,"num_classes":10,"embed_dim":32,"depth":2,"num_heads":2})";
  for (const std::string weights : {"models/deit.weights.safetensors", "models/deit.plain.pth"}) {
    for (const std::string batch : {"1", "64"}) {
      const Outcome outcome =
          run_violin({"features", golden_file(weights), "--config", config, "--input", input, "--out", out, "--blocks",
                      "all", "--tokens", "--batch", batch, "--device", "cpu", "--json"});
      ASSERT_EQ(outcome.code, 0) << outcome.err;
      const FloatFile result = read_floats(out);
      EXPECT_LT(relative_error(result.tensors.at("logits"), golden.tensors.at("logits")), 1e-5);
      EXPECT_LT(relative_error(result.tensors.at("tokens"), golden.tensors.at("features")), 1e-5);
      EXPECT_LT(relative_error(result.tensors.at("blocks.0"), golden.tensors.at("tokens.block_0")), 1e-5);
      EXPECT_LT(relative_error(result.tensors.at("blocks.1"), golden.tensors.at("tokens.block_1")), 1e-5);
      EXPECT_EQ(result.tensors.at("features").shape.size(), 2U);
      EXPECT_EQ(json::parse(outcome.out)["images"], golden.tensors.at("image").shape[0]);
    }
  }
}

TEST(Features, TellsPublishedModelsFromTheirTensorsAndTakesOtherSizes) {
  const TemporaryFolder folder;
  const FloatFile golden = read_floats(golden_file("violin/violin_dino.golden.safetensors"));
  const std::string input = folder.file("images.safetensors"), out = folder.file("out.safetensors");
  for (const std::string part : {"", "crop_16."}) {
    write_floats(input, {{"images", golden.tensors.at(part + "image")}});
    const Outcome outcome =
        run_violin({"features", golden_file("violin/violin_dino.weights.safetensors"), "--input", input, "--out", out});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_LT(relative_error(read_floats(out).tensors.at("features"), golden.tensors.at(part + "output")), 1e-5);
  }
}

TEST(Features, ReadsAFolderInOrderAndNamesWhatItSkips) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "images/sub");
  for (const std::string name : {"images/b.png", "images/a.png", "images/sub/c.png"}) {
    Image image(40, 36);
    for (std::size_t i = 0; i < image.pixels.size(); ++i)
      image.pixels[i] = static_cast<std::uint8_t>(i * static_cast<std::size_t>(name[name.size() - 5]));
    write_file_atomically(folder.file(name), encode_png(image));
  }
  std::filesystem::copy(folder.path() / "images/a.png", folder.path() / "images/b.png",
                        std::filesystem::copy_options::overwrite_existing);
  Bytes half = read_file(folder.file("images/a.png"), 1 << 20);
  half.resize(half.size() / 2);
  write_file_atomically(folder.file("images/broken.png"), half);
  const std::string out = folder.file("out.safetensors");
  const std::vector<std::string> arguments = {"features", golden_file("violin/violin_deit.weights.safetensors"),
                                              "--input",  folder.file("images"),
                                              "--out",    out,
                                              "--batch",  "2",
                                              "--json"};
  const Outcome outcome = run_violin(arguments);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const FloatFile result = read_floats(out);
  EXPECT_EQ(json::parse(result.metadata["violin.images"].get<std::string>()), json({"a.png", "b.png", "sub/c.png"}));
  const FloatTensor& logits = result.tensors.at("logits");
  ASSERT_EQ(logits.shape, (std::vector<std::int64_t>{3, 7}));
  for (std::size_t i = 0; i < 7; ++i) EXPECT_NEAR(logits.values[i], logits.values[7 + i], 1e-6);
  const json summary = json::parse(outcome.out);
  ASSERT_EQ(summary["skipped"].size(), 1U);
  EXPECT_NE(summary["skipped"][0]["image"].get<std::string>().find("broken.png"), std::string::npos);
  std::vector<std::string> fatal = arguments;
  fatal.insert(fatal.end(), {"--on-bad-image", "fatal"});
  EXPECT_EQ(run_violin(fatal).code, 1);
}

TEST(Features, MistakesHaveOneLineAndAnExitCode) {
  const TemporaryFolder folder;
  const std::string weights = golden_file("violin/violin_deit.weights.safetensors");
  const std::string out = folder.file("out.safetensors"), input = folder.file("images.safetensors");
  write_floats(input, {{"images", {{2, 3, 4}, std::vector<float>(24)}}});
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"features", weights, "--out", out};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_violin(arguments);
  };
  EXPECT_EQ(run({}).code, 2);
  EXPECT_EQ(run({"--input", input, "--blocks", "7"}).code, 2);
  EXPECT_EQ(run({"--input", input, "--blocks", "0,x"}).code, 2);
  EXPECT_EQ(run({"--input", input, "--batch", "0"}).code, 2);
  EXPECT_EQ(run({"--input", input, "--device", "tpu"}).code, 2);
  EXPECT_EQ(run({"--input", input, "--precision", "fp8"}).code, 2);
  EXPECT_EQ(run({"--input", input, "--model", "a", "--config", "b"}).code, 2);
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {"--input", "nowhere"}, {"--input", input}, {"--input", weights}, {"--input", input, "--config", weights}}) {
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_FALSE(outcome.err.empty());
    EXPECT_EQ(outcome.out, "");
  }
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST(Features, NeverReplaceWhatTheyReadAndNeedAFolder) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.file("run/best"));
  const std::string own = folder.file("own.safetensors"), input = folder.file("images.safetensors");
  std::filesystem::copy(golden_file("violin/violin_deit.weights.safetensors"), own);
  write_floats(input, {{"images", {{1, 3, 32, 32}, std::vector<float>(3072)}}});
  const Bytes before = read_file(own, 1 << 26);
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"features", own, "--input", input, "--out", own},
           {"features", own, "--input", input, "--out", input},
           {"features", folder.file("run"), "--input", input, "--out", folder.file("run/best/model.safetensors")},
           {"convert", own, folder.file("run/../own.safetensors")}}) {
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_NE(outcome.err.find("would replace"), std::string::npos) << outcome.err;
  }
  EXPECT_EQ(read_file(own, 1 << 26), before);
  const Outcome nowhere = run_violin({"features", own, "--input", input, "--out", folder.file("none/out.safetensors")});
  EXPECT_EQ(nowhere.code, 1);
  EXPECT_NE(nowhere.err.find("there is no folder"), std::string::npos) << nowhere.err;
}

}  // namespace
}  // namespace violin
