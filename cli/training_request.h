// What the options of a training verb ask for, checked against each other before anything is read or written.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>

#include "cli/training.h"
#include "violin/train/task.h"

namespace violin::cli {

struct TrainingPlan {
  std::string command;
  std::filesystem::path folder;
  bool resuming = false;
  bool search_lr = false;  // request.options.lr is to be found
  bool precision_given = false;
  train::Request request;  // of a run that begins: one that goes on keeps its own
};

// Throws Usage. `default_recipe` is the verb's.
TrainingPlan plan_training(const CLI::App& verb, const std::string& command, const TrainingArguments& arguments,
                           const std::string& default_recipe);

}  // namespace violin::cli
