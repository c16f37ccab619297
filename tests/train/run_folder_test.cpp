#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "tests/train/helpers.h"

namespace violin::tests {
namespace {

namespace fs = std::filesystem;

// The least that tells a run, as config.json.
const nlohmann::ordered_json kRunConfig = {
    {"command", "train"}, {"fingerprint", "0"}, {"options", nlohmann::ordered_json::object()}, {"classes", {"a", "b"}}};

TEST(RunFolder, IsNeverOverwrittenByAccident) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "run";
  EXPECT_THROW(train::RunFolder(path, train::RunFolder::Mode::kResume), Error);
  {
    train::RunFolder run(path, train::RunFolder::Mode::kNew);
    run.write("config.json", kRunConfig);
    EXPECT_THROW(train::RunFolder(path, train::RunFolder::Mode::kResume), Error);  // in use
  }
  EXPECT_THROW(train::RunFolder(path, train::RunFolder::Mode::kNew), Error);
  EXPECT_TRUE(fs::exists(path / "config.json"));
  {
    const train::RunFolder run(path, train::RunFolder::Mode::kReplace);
  }
  EXPECT_FALSE(fs::exists(path / "config.json"));
  // A folder with somebody's files is nobody's run.
  fs::create_directories(folder.path() / "photos");
  std::ofstream(folder.path() / "photos" / "a.txt") << "x";
  EXPECT_THROW(train::RunFolder(folder.path() / "photos", train::RunFolder::Mode::kReplace), Error);
  EXPECT_TRUE(fs::exists(folder.path() / "photos" / "a.txt"));
}

TEST(RunFolder, WhatAKilledProcessDidNotFinishIsRemoved) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "run";
  fs::create_directories(path);
  std::ofstream(path / "config.json.part-7-0") << "{";
  {
    const train::RunFolder run(path, train::RunFolder::Mode::kNew);
    run.write("config.json", kRunConfig);
    fs::create_directories(path / "best");
    for (const char* name : {"log.csv.part-7-1", "report.html.part-8-0", "best/model.safetensors.part-7-2"})
      std::ofstream(path / name) << "half";
    std::ofstream(path / "best/model.safetensors") << "whole";
  }
  const train::RunFolder run(path, train::RunFolder::Mode::kResume);
  EXPECT_FALSE(fs::exists(path / "config.json.part-7-0"));
  EXPECT_FALSE(fs::exists(path / "log.csv.part-7-1"));
  EXPECT_FALSE(fs::exists(path / "best/model.safetensors.part-7-2"));
  EXPECT_TRUE(fs::exists(path / "best/model.safetensors"));
  EXPECT_TRUE(fs::exists(path / "report.html.part-8-0"));  // somebody may be writing it
}

TEST(RunFolder, AReplacedRunIsKeptUntilTheNextHasACheckpoint) {
  using Mode = train::RunFolder::Mode;
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "run";
  const auto seed_of = [&](const fs::path& where) { return train::read_json_file(where / "config.json").at("seed"); };
  const auto write_config = [&](const train::RunFolder& run, int seed) {
    nlohmann::ordered_json config = kRunConfig;
    config["seed"] = seed;
    run.write("config.json", config);
  };
  const auto checkpoint = [&](const train::RunFolder& run, const std::string& text) {
    run.replace_last([&](const fs::path& where) { std::ofstream(where / "state.json") << text; });
  };
  {
    const train::RunFolder run(path, Mode::kReplace);  // of nothing
    EXPECT_FALSE(run.replaces());
    write_config(run, 1);
    checkpoint(run, R"({"step": 1})");
  }
  {
    const train::RunFolder run(path, Mode::kReplace);
    EXPECT_TRUE(run.replaces());
    EXPECT_FALSE(run.has_checkpoint());
    std::ofstream(run.initial_weights()) << "weights";
    write_config(run, 2);
    checkpoint(run, R"({"step": 0})");  // of what training begins with
    EXPECT_TRUE(run.replaces());
    checkpoint(run, "broken");
    EXPECT_TRUE(run.replaces());
    run.discard();
    EXPECT_FALSE(run.replaces());
    EXPECT_EQ(seed_of(path), 1);
    EXPECT_TRUE(run.has_checkpoint());
    EXPECT_FALSE(fs::exists(run.initial_weights()));
  }
  {
    // Killed before it wrote its config.json, which is what tells a run.
    const train::RunFolder run(path, Mode::kReplace);
    std::ofstream(run.initial_weights()) << "weights";
  }
  EXPECT_THROW(train::check_run_folder(path, Mode::kNew), Error);
  {
    const train::RunFolder run(path, Mode::kResume);
    EXPECT_EQ(seed_of(path), 1);
    EXPECT_TRUE(run.has_checkpoint());
    EXPECT_FALSE(fs::exists(run.initial_weights()));
  }
  {
    // Killed between two files on their way, there or back.
    fs::create_directories(path / ".replaced");
    fs::rename(path / "last", path / ".replaced" / "last");
    EXPECT_TRUE(train::RunFolder(path, Mode::kResume).has_checkpoint());
    fs::create_directories(path / ".replaced");
    fs::rename(path / "config.json", path / ".replaced" / "config.json");
    EXPECT_TRUE(train::RunFolder(path, Mode::kResume).has_checkpoint());
    EXPECT_EQ(seed_of(path), 1);
    EXPECT_FALSE(fs::exists(path / ".replaced"));
  }
  // Replaced by one that was killed, which is replaced in turn: the first is what is worth keeping.
  for (const int seed : {2, 3}) write_config(train::RunFolder(path, Mode::kReplace), seed);
  {
    const train::RunFolder run(path, Mode::kResume);
    EXPECT_EQ(seed_of(path), 3);
    EXPECT_EQ(seed_of(path / ".replaced"), 1);
    checkpoint(run, R"({"step": 3})");
    EXPECT_FALSE(run.replaces());
    EXPECT_FALSE(fs::exists(path / ".replaced"));
  }
  EXPECT_EQ(seed_of(path), 3);
  // Killed while the replaced run was removed, or before: what the new one has stays.
  const auto step_of = [&] { return train::read_json_file(path / "last" / "state.json").at("step"); };
  for (const char* where : {".replaced", ".replaced.gone"}) {
    for (const bool whole : {true, false}) {
      if (std::string(where) == ".replaced" && !whole) continue;  // it is renamed before anything is removed
      fs::create_directories(path / where / "last");
      std::ofstream(path / where / "last" / "state.json") << R"({"step": 9})";
      if (whole) std::ofstream(path / where / "config.json") << kRunConfig;
      EXPECT_FALSE(train::RunFolder(path, Mode::kResume).replaces());
      EXPECT_EQ(step_of(), 3);
      EXPECT_EQ(seed_of(path), 3);
      EXPECT_FALSE(fs::exists(path / where));
    }
  }
}

// A model from elsewhere is called as a run's files are.
TEST(RunFolder, AFolderOfAnotherProgramIsRefusedAndKept) {
  using Mode = train::RunFolder::Mode;
  const TemporaryFolder folder;
  const std::string names[] = {"config.json", "README.md"};
  for (const std::string config : {R"({"model_type": "vit", "hidden_size": 192})", "not JSON", "[1, 2]"}) {
    std::ofstream(folder.file("config.json")) << config;
    std::ofstream(folder.file("README.md")) << "# ViT";
    fs::create_directories(folder.path() / "best");
    EXPECT_FALSE(train::is_run_folder(folder.path()));
    for (const Mode mode : {Mode::kNew, Mode::kReplace, Mode::kResume}) {
      EXPECT_THROW(train::check_run_folder(folder.path(), mode), Error);
      EXPECT_THROW(train::RunFolder(folder.path(), mode), Error);
    }
    EXPECT_EQ(folder.entries(), 3U) << config;
    for (const std::string& name : names) EXPECT_TRUE(fs::exists(folder.path() / name)) << name;
  }
  // What a run leaves that ended before it wrote anything is in nobody's way.
  const TemporaryFolder locked;
  std::ofstream(locked.file(".lock")).flush();
  EXPECT_NO_THROW(train::RunFolder(locked.path(), Mode::kNew));
}

TEST(RunFolder, WhatIsNoLineOfALogIsLeftOut) {
  const TemporaryFolder folder;
  write_file_atomically(folder.path() / "log.jsonl", R"([1]
{"type": 5}
{"type": "epoch", "epoch": 0}
{"type": "ep)");
  const std::vector<nlohmann::json> lines = train::read_log(folder.path());
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].at("epoch"), 0);
}

TEST(RunFolder, FilesOfARunHoldObjects) {
  const TemporaryFolder folder;
  const fs::path file = folder.path() / "result.json";
  for (const auto& [text, what] :
       {std::pair{"[1, 2]", "a list"}, {"5", "a single value"}, {"null", "a single value"}}) {
    write_file_atomically(file, std::string_view(text));
    try {
      train::read_json_file(file);
      ADD_FAILURE() << text << " was taken";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("result.json"), std::string::npos) << message;
      EXPECT_NE(message.find(what), std::string::npos) << message;
    }
  }
  write_file_atomically(file, R"({"seconds": "soon", "steps": 3, "loss": null})");
  const nlohmann::json result = train::read_json_file(file);
  EXPECT_EQ(train::number_in(result, "steps"), 3.0);
  for (const char* key : {"seconds", "loss", "epochs"}) EXPECT_FALSE(train::number_in(result, key)) << key;
}

std::string state_of(const std::string& step) {
  return R"({"step": )" + step + "}";
}

TEST(RunFolder, AKillBetweenTwoRenamesIsRepaired) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "run";
  const auto put = [&](const std::string& where, const std::string& state) {
    fs::create_directories(path / where);
    std::ofstream(path / where / "state.json") << state_of(state);
  };
  {
    train::RunFolder(path, train::RunFolder::Mode::kNew).write("config.json", kRunConfig);
  }
  put("last.old", "1");
  put("last.next", "2");
  {
    const train::RunFolder run(path, train::RunFolder::Mode::kResume);
  }
  EXPECT_EQ(train::read_json_file(path / "last" / "state.json").at("step"), 2);
  // Half of a checkpoint is no checkpoint.
  fs::create_directories(path / "last.next");
  std::ofstream(path / "last.next" / "model.safetensors") << "half";
  {
    const train::RunFolder run(path, train::RunFolder::Mode::kResume);
  }
  EXPECT_EQ(train::read_json_file(path / "last" / "state.json").at("step"), 2);
  EXPECT_FALSE(fs::exists(path / "last.next"));
}

TEST(RunFolder, AFailedCheckpointLeavesThePreviousOne) {
  const TemporaryFolder folder;
  train::RunFolder run(folder.path() / "run", train::RunFolder::Mode::kNew);
  const auto put = [](const std::string& text) {
    return [text](const fs::path& where) { std::ofstream(where / "state.json") << state_of(text); };
  };
  const auto fail = [&] { run.replace_last([](const fs::path&) { throw Error("no space left on device"); }); };
  std::ofstream(run.initial_weights()) << "weights";
  try {
    fail();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no checkpoint yet"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(fs::exists(run.initial_weights()));
  run.replace_last(put("1"));
  EXPECT_FALSE(fs::exists(run.initial_weights()));
  run.replace_last(put("2"));
  EXPECT_THROW(run.replace_last([](const fs::path& where) {
    std::ofstream(where / "state.json") << state_of("3");
    throw Error("no space left on device");
  }),
               Error);
  EXPECT_EQ(train::read_json_file(run.last() / "state.json").at("step"), 2);
}

// A process is killed at a random moment, again and again, and always leaves a run that goes on.
TEST(RunFolder, SurvivesKillsAtAnyMoment) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "run";
  {
    train::RunFolder(path, train::RunFolder::Mode::kNew).write("config.json", kRunConfig);
  }
  data::Random random(3, data::Purpose::kAugment);
  for (int round = 0; round < 30; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      train::RunFolder run(path, train::RunFolder::Mode::kResume);
      for (int i = 0;; ++i) {
        const std::string text = state_of(std::to_string(i));
        run.replace_last([&](const fs::path& where) {
          for (const char* name : {"model", "optimizer", "state.json"}) std::ofstream(where / name) << text;
        });
      }
    }
    ::usleep(static_cast<useconds_t>(2000 + random.below(8000)));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const train::RunFolder run(path, train::RunFolder::Mode::kResume);
    if (!run.has_checkpoint()) continue;  // killed before the first one
    const auto read = [&](const char* name) { return train::read_json_file(run.last() / name); };
    EXPECT_EQ(read("model"), read("state.json"));
    EXPECT_EQ(read("optimizer"), read("state.json"));
  }
}

}  // namespace
}  // namespace violin::tests
