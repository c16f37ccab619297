// train, finetune, eval and predict, end to end, as a user runs them.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/process.h"
#include "tests/train/helpers.h"
#include "violin/checkpoint/tensor_file.h"

namespace violin {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Training : public ::testing::Test {
 protected:
  void SetUp() override {
    tests::write_images(folder_.path() / "data/train", 4, 10);
    tests::write_images(folder_.path() / "data/val", 4, 3, 16, 100);
    tests::write_images(folder_.path() / "data/test", 4, 3, 16, 200);
    std::ofstream(folder_.path() / "model.json")
        << R"({"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "class_token": false,
               "global_pool": "avg", "fc_norm": false, "violin": {}})";
  }
  std::string file(const std::string& name) const { return (folder_.path() / name).string(); }
  std::vector<std::string> train_arguments(const std::string& run) const {
    return {"train",
            "--data",
            file("data"),
            "--config",
            file("model.json"),
            "--out",
            file(run),
            "--epochs",
            "3",
            "--batch-size",
            "8",
            "--lr",
            "2e-3",
            "--threads",
            "1",
            "--workers",
            "1",
            "--warmup-epochs",
            "1"};
  }
  TemporaryFolder folder_;
};

std::vector<std::string> with(std::vector<std::string> arguments, const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

void expect_same_tensors(const fs::path& a, const fs::path& b) {
  const auto left = checkpoint::TensorFile::open(a), right = checkpoint::TensorFile::open(b);
  const auto tensors = left.tensors();
  ASSERT_EQ(tensors.size(), right.tensors().size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(at::equal(tensor, right.tensor(name))) << name;
}

// Starts the command and returns at once.
pid_t start(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), VIOLIN_BINARY);
  std::vector<char*> raw;
  for (std::string& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  EXPECT_EQ(posix_spawn(&child, VIOLIN_BINARY, &actions, nullptr, raw.data(), environ), 0);
  posix_spawn_file_actions_destroy(&actions);
  return child;
}

TEST_F(Training, FromAFolderToPredictions) {
  const Outcome trained = run_violin(with(train_arguments("run"), {"--json"}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const json result = json::parse(trained.out);
  EXPECT_EQ(result.at("epochs"), 3);
  EXPECT_EQ(result.at("steps"), 15);
  EXPECT_EQ(result.at("test").at("images"), 12);
  for (const char* name : {"config.json", "log.jsonl", "log.csv", "result.json", "README.md", "last/model.safetensors",
                           "last/optimizer.safetensors", "last/state.json", "best/model.safetensors"})
    EXPECT_TRUE(fs::exists(folder_.path() / "run" / name)) << name;
  // Nothing outside the run folder.
  EXPECT_EQ(folder_.entries(), 3U);  // data, model.json, run

  const Outcome evaluated = run_violin({"eval", file("run"), "--data", file("data"), "--json", "--per-class"});
  ASSERT_EQ(evaluated.code, 0) << evaluated.err;
  const json metrics = json::parse(evaluated.out);
  EXPECT_EQ(metrics.at("split"), "test");
  EXPECT_EQ(metrics.at("images"), 12);
  EXPECT_EQ(metrics.at("classes").size(), 4U);
  EXPECT_NEAR(metrics.at("top1").get<double>(), result.at("test").at("top1").get<double>(), 1e-9);
  EXPECT_NEAR(metrics.at("loss").get<double>(), result.at("test").at("loss").get<double>(), 1e-5);

  const Outcome sizes = run_violin({"eval", file("run"), "--data", file("data"), "--resolutions", "12,16,24", "--split",
                                    "val", "--confusion", file("confusion.csv"), "--json"});
  ASSERT_EQ(sizes.code, 0) << sizes.err;
  EXPECT_EQ(json::parse(sizes.out).at("resolutions").size(), 3U);
  EXPECT_TRUE(fs::exists(file("confusion.csv")));

  // What it said about each image, and the same model against itself.
  const Outcome written =
      run_violin({"eval", file("run"), "--data", file("data"), "--predictions", file("predictions.csv")});
  ASSERT_EQ(written.code, 0) << written.err;
  const Outcome against =
      run_violin({"eval", file("run"), "--data", file("data"), "--against", file("predictions.csv"), "--json"});
  ASSERT_EQ(against.code, 0) << against.err;
  const json compared = json::parse(against.out).at("against");
  EXPECT_EQ(compared.at("both_right").get<int>() + compared.at("neither_right").get<int>(), 12);
  EXPECT_EQ(compared.at("mcnemar_p"), 1.0);
  const Outcome other =
      run_violin({"eval", file("run"), "--data", file("data"), "--split", "val", "--against", file("predictions.csv")});
  EXPECT_EQ(other.code, 1);
  EXPECT_NE(other.err.find("only the same images can be compared"), std::string::npos) << other.err;

  const std::string image = file("data/test/class_2/image_200.png");
  const Outcome predicted =
      run_violin({"predict", file("run"), image, file("data/val"), "--json", "--attention", file("looked.png")});
  ASSERT_EQ(predicted.code, 0) << predicted.err;
  const json list = json::parse(predicted.out);
  ASSERT_EQ(list.size(), 13U);
  EXPECT_EQ(list[0].at("image"), image);
  double sum = 0;
  for (const json& entry : list[0].at("classes")) sum += entry.at("probability").get<double>();
  EXPECT_NEAR(sum, 1, 1e-5);
  EXPECT_TRUE(load_image(file("looked.png")).width > 100);
}

TEST_F(Training, ASignalLeavesARunThatResumesToTheSameBits) {
  ASSERT_EQ(run_violin(train_arguments("whole")).code, 0);
  for (const int signal_number : {SIGINT, SIGTERM, SIGKILL}) {
    const std::string run = "run_" + std::to_string(signal_number);
    const pid_t child = start(train_arguments(run));
    const fs::path state = folder_.path() / run / "last/state.json";
    for (int i = 0; i < 2000 && !fs::exists(state); ++i) ::usleep(5000);
    ::usleep(30000);
    ::kill(child, signal_number);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;  // it was done already
    if (signal_number != SIGKILL) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    }
    const Outcome resumed = run_violin({"train", "--resume", file(run), "--threads", "1"});
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    expect_same_tensors(folder_.path() / "whole/last/model.safetensors",
                        folder_.path() / run / "last/model.safetensors");
    expect_same_tensors(folder_.path() / "whole/best/model.safetensors",
                        folder_.path() / run / "best/model.safetensors");
  }
}

TEST_F(Training, AnExistingRunIsContinuedOrReplacedOnlyOnRequest) {
  ASSERT_EQ(run_violin(with(train_arguments("run"), {"--epochs", "1"})).code, 2);  // --epochs twice
  std::vector<std::string> arguments = train_arguments("run");
  ASSERT_EQ(run_violin(arguments).code, 0);
  const Outcome again = run_violin(arguments);
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("--resume continues it, --force replaces it"), std::string::npos) << again.err;
  EXPECT_EQ(run_violin(with(arguments, {"--force"})).code, 0);
  const Outcome changed = run_violin({"train", "--resume", file("run"), "--lr", "1"});
  EXPECT_EQ(changed.code, 2);
  const Outcome finished = run_violin({"train", "--out", file("run"), "--resume", "--json"});  // nothing left to do
  EXPECT_EQ(finished.code, 0) << finished.err;
}

TEST_F(Training, FinetuneWithEveryRecipeAndARateThatIsSearched) {
  ASSERT_EQ(run_violin(train_arguments("base")).code, 0);
  tests::write_images(folder_.path() / "other/train", 3, 10, 16, 300);
  for (const std::string recipe : {"finetune", "vtab", "lora", "dora", "head", "mask"}) {
    const Outcome outcome =
        run_violin({"finetune", "--weights", file("base"), "--data", file("other"), "--recipe", recipe, "--epochs", "1",
                    "--batch-size", "8", "--out", file(recipe), "--json", "--threads", "1"});
    ASSERT_EQ(outcome.code, 0) << recipe << ": " << outcome.err;
    const Outcome evaluated = run_violin({"eval", file(recipe), "--data", file("other"), "--split", "train", "--json"});
    EXPECT_EQ(evaluated.code, 0) << recipe << ": " << evaluated.err;
  }
  const Outcome searched =
      run_violin({"finetune", "--weights", file("base/best/model.safetensors"), "--data", file("other"), "--lr", "auto",
                  "--epochs", "1", "--batch-size", "8", "--out", file("searched"), "--threads", "1"});
  ASSERT_EQ(searched.code, 0) << searched.err;
  std::ifstream stream(file("searched/lr_search.json"));
  EXPECT_EQ(json::parse(stream).at("trials").size(), 5U);
  EXPECT_FALSE(fs::exists(file("searched/initial.safetensors")));
}

TEST_F(Training, MistakesAreOneLineWithARemedy) {
  const auto expect = [&](const std::vector<std::string>& arguments, int code, const std::string& words) {
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_NE(outcome.err.find(words), std::string::npos) << outcome.err;
    EXPECT_TRUE(outcome.out.empty());
  };
  expect({"train"}, 2, "--data is missing");
  expect({"train", "--data", file("nowhere"), "--model", "vit_micro_patch4_32", "--out", file("x")}, 1, "nowhere");
  expect({"train", "--data", file("data"), "--model", "vit_mikro_patch4_32", "--out", file("x")}, 1,
         "vit_micro_patch4_32");
  expect({"train", "--data", file("data"), "--out", file("x")}, 1, "--model");
  expect(with(train_arguments("x"), {"--mixup", "-1"}), 2, "mixup is -1");
  expect(with(train_arguments("x"), {"--recipe", "diet"}), 2, "did you mean 'deit'");
  expect(with(train_arguments("x"), {"--init", "identical"}), 2, "init");
  expect({"finetune", "--data", file("data")}, 2, "--weights is missing");
  expect({"train", "--resume", file("data")}, 1, "no run");
  expect({"eval", file("model.json"), "--data", file("data")}, 1, "model.json");
  expect({"predict", file("nothing"), file("data/val")}, 1, "nothing");
  EXPECT_FALSE(fs::exists(file("x")));
  // A broken image is named; --on-bad-image fatal makes it an error.
  std::ofstream(file("data/train/class_0/broken.png")) << "\x89PNG\r\n\x1a\nrubbish";
  const Outcome skipped = run_violin(train_arguments("skipping"));
  EXPECT_EQ(skipped.code, 0) << skipped.err;
  EXPECT_NE(skipped.err.find("broken.png"), std::string::npos) << skipped.err;
  expect(with(train_arguments("fatal"), {"--on-bad-image", "fatal"}), 1, "broken.png");
}

}  // namespace
}  // namespace violin
