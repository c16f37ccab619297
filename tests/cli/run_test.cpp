// What becomes of a run and its folder: stopped, replaced, damaged.
#include <pty.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <cstdlib>
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
    const Outcome resumed = run_violin({"train", "--resume", file(run)});
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    expect_same_tensors(folder_.path() / "whole/last/model.safetensors",
                        folder_.path() / run / "last/model.safetensors");
    expect_same_tensors(folder_.path() / "whole/best/model.safetensors",
                        folder_.path() / run / "best/model.safetensors");
  }
}

// Of another number of threads sums round differently.
TEST_F(Training, ARunGoesOnWithTheThreadsThatItBeganWith) {
  std::vector<std::string> arguments = train_arguments("run");
  arguments[14] = "3";  // --threads
  ASSERT_EQ(run_violin(arguments).code, 0);
  fs::remove(file("run/result.json"));
  const auto resume = [&](const std::vector<std::string>& more) {
    const Outcome outcome = run_violin(with({"train", "--resume", file("run")}, more));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.err;
  };
  const std::string words = "--threads 3, as the run began";
  EXPECT_NE(resume({}).find(words), std::string::npos);
  EXPECT_EQ(resume({"--threads", "1"}).find(words), std::string::npos);
  std::ifstream stream(file("run/config.json"));
  json config = json::parse(stream);
  EXPECT_EQ(config.at("threads"), 3);
  config["threads"] = 5000;
  std::ofstream(file("run/config.json")) << config;
  const Outcome changed = run_violin({"train", "--resume", file("run")});
  EXPECT_EQ(changed.code, 1);
  EXPECT_NE(changed.err.find("5000 threads; was it changed by hand?"), std::string::npos) << changed.err;
}

// In a shell, which has pipes and closes streams.
class InShell : public Training {
 protected:
  void run(const std::string& streams, const std::vector<std::string>& more = {}) {
    std::string command = "( '" VIOLIN_BINARY "'";
    for (const std::string& argument : with(train_arguments("run"), more)) command += " '" + argument + "'";
    command += "; echo $? >'" + file("code") + "' ) " + streams;
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
    std::ifstream(file("code")) >> code_;
  }
  int code_ = -1;
};

TEST_F(InShell, WhoReadsMessagesMayLeave) {
  // The first of them is about the images, long before training.
  fs::remove_all(file("data/val"));
  run("2>&1 >/dev/null | true", {"--recipe", "head"});
  EXPECT_EQ(code_, 0);
  EXPECT_TRUE(fs::exists(file("run/result.json")));
}

TEST_F(InShell, MessagesToAClosedStreamLandInNoFile) {
  run("2>&- >/dev/null");
  EXPECT_EQ(code_, 0);
  EXPECT_TRUE(fs::exists(file("run/result.json")));
  EXPECT_EQ(fs::file_size(file("run/.lock")), 0U);
  fs::remove_all(file("run"));
  run("2>/dev/null >&-");
  EXPECT_EQ(code_, 1);  // the result could not be printed
  EXPECT_TRUE(fs::exists(file("run/result.json")));
}

// What the command writes to a terminal that is so wide.
std::string on_terminal(std::vector<std::string> arguments, unsigned short columns, const char* type = "xterm") {
  arguments.insert(arguments.begin(), VIOLIN_BINARY);
  std::vector<char*> raw;
  for (std::string& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  winsize size{};
  size.ws_row = 24;
  size.ws_col = columns;
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (child == 0) {
    ::setenv("TERM", type, 1);
    ::execv(VIOLIN_BINARY, raw.data());
    ::_exit(127);
  }
  std::string text;
  char part[4096];
  for (ssize_t got = 0; (got = ::read(terminal, part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(got));
  ::close(terminal);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << text;
  return text;
}

TEST_F(Training, ATerminalShowsTheNumbersBeforeALongBarAndCodesWhereItKnowsThem) {
  const std::string text = on_terminal(train_arguments("run"), 80);
  const std::size_t end = text.rfind("120/120 images");
  ASSERT_NE(end, std::string::npos) << text;
  const std::string line = text.substr(text.rfind('\r', end), text.find('\r', end) - text.rfind('\r', end));
  EXPECT_NE(line.find("▕███"), std::string::npos) << line;
  EXPECT_NE(line.find("epoch 3/3  loss "), std::string::npos) << line;
  EXPECT_NE(line.find("  val "), std::string::npos) << line;
  const std::string plain = on_terminal(with(train_arguments("run"), {"--force"}), 80, "dumb");
  EXPECT_EQ(plain.find('\x1b'), std::string::npos) << plain;
  EXPECT_NE(plain.find("120/120 images"), std::string::npos) << plain;
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

TEST_F(Training, ARunThatWasKilledBeforeItsFirstStepsSaysWhereTheOneBeforeItIs) {
  ASSERT_EQ(run_violin(train_arguments("run")).code, 0);
  fs::rename(file("run"), file("before"));
  fs::create_directories(file("run"));
  fs::copy_file(file("before/config.json"), file("run/config.json"));
  fs::rename(file("before"), file("run/.replaced"));
  const Outcome outcome = run_violin({"eval", file("run"), "--data", file("data")});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.err.find("before are in '" + file("run/.replaced") + "'"), std::string::npos) << outcome.err;
  EXPECT_EQ(run_violin({"eval", file("run/.replaced"), "--data", file("data")}).code, 0);
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

TEST_F(Training, AResumedSearchInWhichEveryRateDivergedLeavesTheFolderFree) {
  ASSERT_EQ(run_violin(train_arguments("run")).code, 0);
  std::ifstream stream(file("run/config.json"));
  json config = json::parse(stream);
  config["lr_search"] = true;
  std::ofstream(file("run/config.json")) << config;
  fs::remove_all(file("run/last"));
  json trials = json::array();
  for (const double lr : {1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-4}) trials.push_back({{"lr", lr}, {"diverged", true}});
  std::ofstream(file("run/lr_search.json")) << json{{"trials", trials}};
  const Outcome outcome = run_violin({"train", "--resume", file("run"), "--threads", "1", "--workers", "1"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.err.find("give a smaller one (--lr 1e-5)"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("another may begin there"), std::string::npos) << outcome.err;
  EXPECT_EQ(run_violin(train_arguments("run")).code, 0);
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

TEST_F(Training, ARunThatFailsBeforeItsFirstCheckpointLeavesItsFolderToAnotherTry) {
  std::vector<std::string> arguments = train_arguments("run");
  arguments[12] = "1e30";  // --lr
  arguments[18] = "0";     // --warmup-epochs
  const Outcome failed = run_violin(arguments);
  EXPECT_EQ(failed.code, 1);
  EXPECT_NE(failed.err.find("another may begin there"), std::string::npos) << failed.err;
  arguments[12] = "1e-3";
  const Outcome again = run_violin(arguments);
  EXPECT_EQ(again.code, 0) << again.err;
}

// As a full disk does it, but only after steps were trained: the log cannot be written.
TEST_F(Training, WhatCannotBeWrittenBeforeTheFirstCheckpointEndsARunThatGoesOn) {
  ASSERT_EQ(run_violin(train_arguments("whole")).code, 0);
  const pid_t child = start(train_arguments("run"));
  while (!fs::exists(file("run/config.json")) && waitpid(child, nullptr, WNOHANG) == 0) usleep(200);
  std::error_code problem;
  const bool early = fs::create_directory(file("run/log.jsonl"), problem);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(early) << "the first epoch was over already";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
  ASSERT_TRUE(fs::exists(file("run/config.json")));
  EXPECT_EQ(train::read_json_file(file("run/last/state.json")).at("step"), 0);
  fs::remove(file("run/log.jsonl"));
  const Outcome resumed = run_violin({"train", "--resume", file("run")});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  expect_same_tensors(file("run/last/model.safetensors"), file("whole/last/model.safetensors"));
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
