// What `violin train` and `violin finetune` share: options, the bar, signals, the run itself.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/compute.h"
#include "violin/train/options.h"
#include "violin/train/task.h"

namespace violin::cli {

// Values that were given on the command line; the rest comes from the recipe and the options file.
struct TrainingArguments {
  std::string data;
  std::string out;
  bool resume = false;
  std::string resume_folder;
  bool force = false;
  bool json = false;
  std::string recipe;
  std::string options_file;
  std::string model, model_file, weights, branch;
  std::optional<bool> violin;  // --violin, --no-violin
  std::optional<std::string> curves, strategy, init, parameterisation, decay;
  bool no_alpha = false, curve_weights = false, prefix_decay = false, decay_per_axis = false;
  std::string blocks, heads;
  nlohmann::json given;  // training options by name
  bool search_lr = false;
  ComputeOptions compute;
};

// A training option's name as the command line has it.
std::string option_name(std::string name);

// All options of a training verb, in groups.
void add_training_options(CLI::App& verb, const std::shared_ptr<TrainingArguments>& arguments, bool needs_weights);

// Trains or resumes; prints the result.
void run_training(const CLI::App& verb, const std::string& command, const TrainingArguments& arguments,
                  const std::string& default_recipe);

}  // namespace violin::cli
