// A folder of images, a small model and the commands that train it, for the tests of training from the command line.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/cli/process.h"
#include "tests/train/helpers.h"
#include "violin/checkpoint/tensor_file.h"

namespace violin {

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

inline std::vector<std::string> with(std::vector<std::string> arguments, const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

inline void expect_same_tensors(const std::filesystem::path& a, const std::filesystem::path& b) {
  const auto left = checkpoint::TensorFile::open(a), right = checkpoint::TensorFile::open(b);
  const auto tensors = left.tensors();
  ASSERT_EQ(tensors.size(), right.tensors().size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(at::equal(tensor, right.tensor(name))) << name;
}

// Starts the command and returns at once.
inline pid_t start(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), VIOLIN_BINARY);
  std::vector<char*> raw;
  raw.reserve(arguments.size() + 1);
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

}  // namespace violin
