// What a run trains: data, model and options put together, as config.json holds them.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "violin/data/data.h"
#include "violin/nn/vit.h"
#include "violin/train/options.h"

namespace violin::train {

// What a user says; prepare() completes it.
struct Request {
  std::string command = "train";  // or finetune: for config.json
  std::filesystem::path data;
  std::string model;                      // a name of the registry
  std::optional<nn::ModelConfig> config;  // instead of a name
  std::filesystem::path weights;          // to start from; empty: from scratch
  std::string branch;                     // of the weights file
  std::optional<nn::MaskConfig> mask;     // plugged in where the model has none
  // What becomes of a mask that the model has: nothing, or a fresh one.
  std::function<std::optional<nn::MaskConfig>(const nn::MaskConfig& own)> change_mask;
  bool unplug = false;  // train without a mask whatever the model has
  std::int64_t processes = 1;
  Options options;
};

inline constexpr int kMostThreads = 1024;

struct Task {
  std::string command;
  std::filesystem::path data;
  std::filesystem::path weights;
  std::string branch;  // of the weights file
  // Threads of tensor operations, where a number was asked for, the same in all processes: with another one, or with
  // another number of processes, sums round differently.
  int threads = 0;
  std::int64_t processes = 1;
  Options options;
  nn::ModelConfig model;            // what is trained, complete
  data::EvalOptions preprocessing;  // travels with the weights
  std::vector<std::string> classes;
  std::string fingerprint;         // of the data
  std::vector<std::string> notes;  // what the user should hear
};

// Throws violin::Error for options that are wrong, and for a new mask's that would have no effect.
void check(const Request& request);

nlohmann::ordered_json to_json(const Task& task);
Task task_from_json(const nlohmann::json& json);

struct Prepared {
  Task task;
  data::Dataset dataset;
  nn::Model model;  // with its initial weights, on the CPU, in training mode
};

// Opens the data, builds or loads the model with as many classes as the data have, plugs the mask and adapters in.
Prepared prepare(const Request& request);

// For resuming: opens the data again and throws where they are not the same; the model's weights come later.
data::Dataset open_task_data(const Task& task);

// Augmentation as the options say; `first` is an image of the set, whose size decides what `auto` means.
data::TrainOptions train_transform(const Options& options, const data::EvalOptions& preprocessing, const Image& first);

}  // namespace violin::train
