#include "cli/weights.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "violin/data/file.h"
#include "violin/nn/json_text.h"
#include "violin/nn/registry.h"
#include "violin/text.h"

namespace violin::cli {
namespace {

constexpr std::int64_t kMaxTextBytes = std::int64_t{16} << 20;

std::string read_text(const std::string& path) {
  const Bytes bytes = read_file(path, kMaxTextBytes);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

void add_weights_options(CLI::App& verb, WeightsOptions& options) {
  const char* group = "Model";
  verb.add_option("--model", options.model, "Its name, where the file does not say (`violin models`)")
      ->type_name("NAME")
      ->group(group);
  verb.add_option("--config", options.config, "The model as JSON, instead of a name")->type_name("FILE")->group(group);
  verb.add_option("--heads", options.heads, "Attention heads, where nothing tells")->type_name("N")->group(group);
  verb.add_option("--img-size", options.img_size, "Image size, N or HxW: positions are resampled")
      ->type_name("SIZE")
      ->group(group);
  verb.add_option("--patch-size", options.patch_size, "Patch size, N or HxW: the patch embedding is resampled")
      ->type_name("SIZE")
      ->group(group);
  verb.add_option("--pos-resample", options.pos_resample, "How positions are resampled: timm, dino or deit")
      ->type_name("RULE")
      ->group(group);
  verb.add_option("--branch", options.branch, "Of a file with several: teacher, student, ema, …")
      ->type_name("KEY")
      ->group(group);
}

Size parse_size(const std::string& option, const std::string& text, std::int64_t least, std::int64_t most) {
  const std::optional<Size> size = violin::parse_size(text);
  if (!size || size->shorter() < least || size->longer() > most)
    throw Usage(option + " '" + text + "': expected N or HxW, whole numbers from " + std::to_string(least) + " to " +
                std::to_string(most));
  return *size;
}

nn::ModelConfig read_model_config(const std::string& path) {
  const nlohmann::json json = nn::parse_json(read_text(path), file_in_quotes(path));
  try {
    return nn::model_from_json(json);
  } catch (const Error& error) {
    throw Error(file_in_quotes(path) + ": " + error.what());
  }
}

std::vector<std::string> read_class_names(const std::string& path) {
  const std::string text = read_text(path);
  std::vector<std::string> names;
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_array()) {
    for (const nlohmann::json& name : json) {
      if (!name.is_string()) throw Error(file_in_quotes(path) + " is no JSON list of names");
      names.push_back(name.get<std::string>());
    }
    return names;
  }
  std::string_view left = text;
  while (!left.empty()) {
    const std::size_t end = left.find('\n');
    std::string_view line = left.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!line.empty()) names.emplace_back(line);
    left.remove_prefix(end == std::string_view::npos ? left.size() : end + 1);
  }
  if (names.empty()) throw Error(file_in_quotes(path) + " holds no class names");
  return names;
}

checkpoint::LoadOptions load_options(const WeightsOptions& options) {
  if (!options.model.empty() && !options.config.empty()) throw Usage("--model and --config exclude each other");
  checkpoint::LoadOptions load;
  if (!options.model.empty()) argument("--model", [&] { return nn::find_model(options.model); });
  load.model = options.model;
  if (!options.config.empty()) load.config = read_model_config(options.config);
  if (options.heads && *options.heads < 1) throw Usage("--heads must be at least 1");
  load.num_heads = options.heads;
  if (!options.img_size.empty()) load.img_size = parse_size("--img-size", options.img_size);
  if (!options.patch_size.empty()) load.patch_size = parse_size("--patch-size", options.patch_size);
  if (!options.pos_resample.empty() && options.pos_resample != "timm" && options.pos_resample != "dino" &&
      options.pos_resample != "deit") {
    throw Usage("--pos-resample '" + options.pos_resample + "': there are timm, dino and deit");
  }
  load.pos_resample = options.pos_resample;
  load.branch = options.branch;
  return load;
}

checkpoint::LoadedModel load_weights(const std::string& path, const WeightsOptions& options, c10::Device device) {
  checkpoint::LoadOptions load = load_options(options);
  load.device = device;
  checkpoint::LoadedModel loaded = checkpoint::load_model(path, load);
  for (const std::string& line : loaded.report.warnings()) note(line);
  return loaded;
}

}  // namespace violin::cli
