// Options of every verb that opens weights: which model they belong to, and what to make of them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "violin/checkpoint/model_file.h"

namespace violin::cli {

struct WeightsOptions {
  std::string model;
  std::string config;  // a file with the model as JSON
  std::optional<std::int64_t> heads;
  std::string img_size;
  std::string patch_size;
  std::string pos_resample;
  std::string branch;
};

// --model, --config, --heads, --img-size, --patch-size, --pos-resample, --branch
void add_weights_options(CLI::App& verb, WeightsOptions& options);
checkpoint::LoadOptions load_options(const WeightsOptions& options);
checkpoint::LoadedModel load_weights(const std::string& path, const WeightsOptions& options, c10::Device device);

// "224" or "160x224", with sides in this range; throws Usage that names the option.
Size parse_size(const std::string& option, const std::string& text, std::int64_t least = 1, std::int64_t most = 16384);

// A JSON file with a model; throws violin::Error that names the file.
nn::ModelConfig read_model_config(const std::string& path);

// Class names, one per line or a JSON list; throws violin::Error that names the file.
std::vector<std::string> read_class_names(const std::string& path);

}  // namespace violin::cli
