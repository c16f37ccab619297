// What becomes of a run and its folder: stopped, replaced, damaged.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/training.h"

namespace violin {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

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
  const Outcome finished = run_violin({"train", "--out", file("run"), "--resume", "--json"});
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_NE(finished.err.find("is finished: nothing is left to train"), std::string::npos) << finished.err;
  std::ifstream result(file("run/result.json"));
  EXPECT_EQ(json::parse(finished.out).at("seconds"), json::parse(result).at("seconds"));
}

TEST_F(Training, ARunWhoseImagesCannotBeReadReplacesNone) {
  ASSERT_EQ(run_violin(train_arguments("run")).code, 0);
  fs::copy(file("data"), file("broken"), fs::copy_options::recursive);
  for (const auto& entry : fs::recursive_directory_iterator(file("broken/val")))
    if (entry.is_regular_file()) std::ofstream(entry.path()) << "no image";
  std::vector<std::string> arguments = with(train_arguments("run"), {"--force"});
  arguments[2] = file("broken");
  const Outcome outcome = run_violin(arguments);
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.err.find("none of the 12 images of val can be read"), std::string::npos) << outcome.err;
  EXPECT_TRUE(fs::exists(file("run/best/model.safetensors")));
  EXPECT_TRUE(fs::exists(file("run/result.json")));
}

TEST_F(Training, AFullDiskReplacesNoRun) {
  ASSERT_EQ(run_violin(train_arguments("run")).code, 0);
  fs::copy_file(file("run/best/model.safetensors"), file("weights.safetensors"));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit little{4096, before.rlim_max};
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
  const Outcome outcome =
      run_violin({"finetune", "--weights", file("weights.safetensors"), "--data", file("data"), "--out", file("run"),
                  "--lr", "1e-3", "--threads", "1", "--workers", "1", "--force"});
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.err.find("cannot write"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("before is still there"), std::string::npos) << outcome.err;
  EXPECT_TRUE(fs::exists(file("run/best/model.safetensors")));
  EXPECT_TRUE(fs::exists(file("run/result.json")));
}

TEST_F(Training, DamagedFilesOfARunAreNamed) {
  ASSERT_EQ(run_violin(train_arguments("run")).code, 0);
  // The result is what can be made again.
  std::ofstream(file("run/result.json")) << "";
  EXPECT_EQ(run_violin({"report", file("run"), "--threads", "1"}).code, 0);
  EXPECT_EQ(run_violin({"train", "--resume", file("run"), "--threads", "1", "--workers", "1"}).code, 0);
  std::ifstream result(file("run/result.json"));
  EXPECT_TRUE(json::parse(result).contains("test"));

  std::ifstream stream(file("run/config.json"));
  json config = json::parse(stream);
  config["lr_search"] = true;
  std::ofstream(file("run/config.json")) << config;
  fs::remove_all(file("run/last"));
  for (const char* text : {"{}", R"({"trials": 3})", R"({"trials": [{"lr": "x"}]})"}) {
    std::ofstream(file("run/lr_search.json")) << text;
    const Outcome outcome = run_violin({"train", "--resume", file("run"), "--threads", "1", "--workers", "1"});
    EXPECT_EQ(outcome.code, 1);
    EXPECT_NE(outcome.err.find("lr_search.json of the run"), std::string::npos) << outcome.err;
  }
  config["classes"] = {"a"};
  std::ofstream(file("run/config.json")) << config;
  const Outcome outcome = run_violin({"train", "--resume", file("run"), "--threads", "1", "--workers", "1"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.err.find("names 1 classes for a model with 4"), std::string::npos) << outcome.err;
}

TEST_F(Training, ARunThatFailsBeforeItsFirstCheckpointReplacesNone) {
  ASSERT_EQ(run_violin(train_arguments("run")).code, 0);
  std::vector<std::string> arguments = with(train_arguments("run"), {"--force"});
  arguments[12] = "1e30";  // --lr
  arguments[18] = "0";     // --warmup-epochs
  const Outcome outcome = run_violin(arguments);
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.err.find("no longer finite"), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.err.find("checkpoint is good"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("before is still there"), std::string::npos) << outcome.err;
  EXPECT_TRUE(fs::exists(file("run/result.json")));
  EXPECT_FALSE(fs::exists(file("run/.replaced")));
  EXPECT_EQ(run_violin({"eval", file("run"), "--data", file("data")}).code, 0);
}

TEST_F(Training, WeightsOfTheBestEpochThatAreGoneAreMissed) {
  ASSERT_EQ(run_violin(train_arguments("run")).code, 0);
  std::ofstream(file("run/best/model.safetensors")) << "half";
  const Outcome outcome = run_violin({"train", "--resume", file("run")});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("cannot be read: which epoch is best is decided anew"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.out.find("last/model.safetensors"), std::string::npos) << outcome.out;
}

}  // namespace
}  // namespace violin
