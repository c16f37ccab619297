#include "violin/checkpoint/model_file.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "violin/checkpoint/safetensors.h"
#include "violin/error.h"
#include "violin/nn/json_text.h"
#include "violin/nn/registry.h"
#include "violin/text.h"
#include "violin/version.h"

namespace violin::checkpoint {
namespace {

using nlohmann::json;
using nn::ModelConfig;

constexpr const char* kModelKey = "violin.model";
constexpr const char* kAverageFile = "ema.safetensors";
constexpr const char* kPreprocessingKey = "violin.preprocessing";
constexpr const char* kClassesKey = "violin.classes";
constexpr const char* kVersionKey = "violin.version";

// A text of the metadata: names of hundreds of thousands of classes. As JSON it takes twenty times its size.
constexpr std::size_t kMaxTextBytes = std::size_t{16} << 20;

std::optional<json> metadata_json(const Metadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  const std::string who = "metadata '" + std::string(key) + "'";
  if (found->second.size() > kMaxTextBytes) {
    throw Error(who + " has " + std::to_string(found->second.size()) + " bytes; at most " +
                std::to_string(kMaxTextBytes) + " are read");
  }
  return nn::parse_json(found->second, who);
}

const nn::ModelEntry* registry_entry(const std::string& name) {
  for (const nn::ModelEntry& entry : nn::model_registry()) {
    if (entry.name == name || std::find(entry.aliases.begin(), entry.aliases.end(), name) != entry.aliases.end())
      return &entry;
  }
  return nullptr;
}

// Where a tensor of the file does not have the size that the model needs.
[[noreturn]] void mismatch(const State& state, const StateEntry& entry, const std::vector<std::int64_t>& expected) {
  std::string remedy = "the file belongs to another model; give it with --model or --config";
  if (entry.name.starts_with("head")) remedy = "ask for another number of classes to have a fresh head";
  throw Error(file_in_quotes(state.file) + ": tensor " + in_quotes(entry.source) + " is " + shape_text(entry.sizes) +
              "; the model has " + shape_text(expected) + " there (" + remedy + ")");
}

void expect_sizes(const State& state, const std::string& name, const std::vector<std::int64_t>& expected) {
  const StateEntry* entry = state.find(name);
  if (entry != nullptr && entry->sizes != expected) mismatch(state, *entry, expected);
}

std::int64_t prefix_rows(const ModelConfig& config) {
  return config.no_embed_class ? 0 : config.prefix_tokens();
}

class Loader {
 public:
  Loader(const std::filesystem::path& path, const LoadOptions& options)
      : options_(options),
        path_(resolve_weights(path, options.branch)),
        file_(TensorFile::open(path_, {.copy = true})),
        // The average in a run's folder is a file of its own.
        state_(translate(file_, path_.string(), path_.filename() == kAverageFile ? "" : options.branch)) {}

  LoadedModel load() {
    LoadReport& report = result_.report;
    report.file = path_.string();
    report.format = to_string(file_.format());
    report.branch = state_.branch;
    report.ignored = state_.ignored;
    report.adapted = state_.renamed;
    result_.metadata = file_.metadata();
    choose_architecture();
    check_bytes();
    fit_to_file();
    find_missing();
    build();
    adapt();
    describe_data();
    result_.model->eval();
    return std::move(result_);
  }

 private:
  void adapted(std::string line) { result_.report.adapted.push_back(std::move(line)); }
  void note(std::string line) { result_.report.notes.push_back(std::move(line)); }

  void choose_architecture() {
    description_ = describe(file_, state_.file);
    std::string how;
    if (options_.config) {
      config_ = *options_.config;
      nn::check(config_);
      how = "as configured";
    } else if (!options_.model.empty()) {
      config_ = nn::find_model(options_.model);
      const nn::ModelEntry* entry = registry_entry(options_.model);
      result_.name = entry == nullptr ? options_.model : entry->name;
      family_ = entry == nullptr ? "" : entry->family;
      how = "by name";
      take_mask_and_head_from_file();
    } else if (description_.config) {
      config_ = *description_.config;
      told_by_file_ = true;
      how = "from the file's metadata";
    } else {
      Architecture architecture =
          infer_architecture(state_, {.num_heads = options_.num_heads, .img_size = options_.img_size});
      if (!architecture.heads_known) {
        throw Error(file_in_quotes(state_.file) +
                    ": the number of heads cannot be told from the tensors; say it "
                    "(--heads), or the model (--model, --config)");
      }
      config_ = architecture.config;
      result_.name = architecture.name;
      family_ = architecture.family;
      for (std::string& line : architecture.notes) note(std::move(line));
      how = "told from the tensors";
    }
    // A head that will be replaced may have any size.
    if (options_.num_classes) config_.num_classes = classes_in_file();
    if (options_.num_heads && config_.num_heads != *options_.num_heads) {
      config_.num_heads = *options_.num_heads;
      nn::check(config_);
    }
    if (!options_.pos_resample.empty()) {
      config_.pos_resample = options_.pos_resample;
      nn::check(config_);
    }
    result_.report.architecture = (result_.name.empty() ? "vision transformer" : result_.name) + " (" + how + ")";
  }

  std::int64_t classes_in_file() const {
    const StateEntry* head = state_.find("head.weight");
    return head == nullptr || head->sizes.empty() ? 0 : head->sizes[0];
  }

  // A name says nothing of the classes that the weights were trained for, nor that a mask was plugged in.
  void take_mask_and_head_from_file() {
    config_.num_classes = classes_in_file();
    const bool masked = std::any_of(state_.entries.begin(), state_.entries.end(),
                                    [](const StateEntry& entry) { return nn::is_mask_parameter(entry.name); });
    if (!masked || config_.violin) return;
    if (description_.config && description_.config->violin) {
      config_.violin = description_.config->violin;
    } else {
      config_.violin = infer_architecture(state_, {.img_size = config_.img_size}).config.violin;
    }
    note("the file has a mask, which the name does not say");
  }

  // Names of a .pth may share their numbers, parameters do not: a small file must not become a model without bound.
  void check_bytes() const {
    constexpr std::uintmax_t kMostShared = std::uintmax_t{64} << 20;
    std::error_code ignored;
    const std::uintmax_t file = std::filesystem::file_size(path_, ignored);
    std::uintmax_t bytes = 0;
    for (const StateEntry& entry : state_.entries) {
      std::uintmax_t own = info(entry.dtype).size;
      for (const std::int64_t size : entry.sizes) own *= static_cast<std::uintmax_t>(size);
      bytes += own;
    }
    if (bytes > file + std::max(file, kMostShared))
      throw Error(file_in_quotes(state_.file) + ": its tensors share memory, and would take " + std::to_string(bytes) +
                  " bytes out of a file of " + std::to_string(file));
  }

  // `config_` becomes what can be loaded as it is; `wanted_` remembers the size to go to. Sizes that memory depends on
  // are compared before anything is allocated.
  void fit_to_file() {
    own_preprocessing_ = default_preprocessing(family_, config_);
    wanted_ = options_.img_size.value_or(config_.img_size);
    expect_sizes(state_, "patch_embed.proj.weight",
                 {config_.embed_dim, config_.in_chans, config_.patch_size.height, config_.patch_size.width});
    std::int64_t depth = 0;
    while (state_.find("blocks." + std::to_string(depth) + ".norm1.weight") != nullptr) ++depth;
    if (depth != config_.depth && (depth > config_.depth || options_.strict)) {
      throw Error(file_in_quotes(state_.file) + ": it has " + std::to_string(depth) + " whole blocks; the model has " +
                  std::to_string(config_.depth) + " (give the model with --model or --config)");
    }
    const std::int64_t width = config_.embed_dim;
    const auto hidden = static_cast<std::int64_t>(static_cast<double>(width) * config_.mlp_ratio);
    for (std::int64_t block = 0; block < depth; ++block) {
      const std::string name = "blocks." + std::to_string(block);
      expect_sizes(state_, name + ".attn.qkv.weight", {3 * width, width});
      expect_sizes(state_, name + ".mlp.fc1.weight", {hidden, width});
    }
    // What a file says of its own sizes counts where tensors prove it, even if others may be missing.
    for (const char* name : {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"}) {
      if (told_by_file_ && state_.find(name) == nullptr) {
        throw Error(file_in_quotes(state_.file) + " describes a model and has no tensor " + in_quotes(name) +
                    "; give the model with --model or --config");
      }
    }
    expect_sizes(state_, "head.weight", {config_.num_classes, config_.embed_dim});
    if (config_.num_classes == 0 && state_.find("head.weight") != nullptr) adapted("head left out");
    expect_sizes(state_, "reg_token", {1, config_.reg_tokens, config_.embed_dim});
    fit_positions();
    if (options_.patch_size && *options_.patch_size != config_.patch_size) {
      const Size grid = config_.grid();
      adapted("patch embedding resampled: patches of " + to_string(config_.patch_size) + " to " +
              to_string(*options_.patch_size));
      file_patch_ = config_.patch_size;
      config_.patch_size = *options_.patch_size;
      config_.img_size = {grid.height * config_.patch_size.height, grid.width * config_.patch_size.width};
      nn::check(config_);
    }
  }

  // A position table for another grid than the configuration's is loaded for its own grid first.
  void fit_positions() {
    const StateEntry* positions = state_.find("pos_embed");
    if (config_.pos_embed != "learn" || positions == nullptr) return;
    const auto rows_of = [&](const Size& grid) { return grid.height * grid.width + prefix_rows(config_); };
    const std::vector<std::int64_t> expected = {1, rows_of(config_.grid()), config_.embed_dim};
    if (positions->sizes == expected) return;
    const bool table = positions->sizes.size() == 3 && positions->sizes[0] == 1 && positions->sizes[2] == expected[2];
    const bool flexible = options_.config || !options_.model.empty();
    const std::int64_t patches = table ? positions->sizes[1] - prefix_rows(config_) : 0;
    const auto side =
        static_cast<std::int64_t>(std::llround(std::sqrt(static_cast<double>(std::max<std::int64_t>(patches, 0)))));
    if (!table || !flexible || patches < 1 || side * side != patches) mismatch(state_, *positions, expected);
    config_.img_size = {side * config_.patch_size.height, side * config_.patch_size.width};
  }

  at::Tensor take(const StateEntry& entry, const at::Tensor& place) {
    at::Tensor tensor = entry.make();
    if (!at::isFloatingType(tensor.scalar_type())) {
      throw Error(file_in_quotes(state_.file) + ": tensor " + in_quotes(entry.source) + " holds " +
                  std::string(info(entry.dtype).torch) + "; expected floating-point numbers");
    }
    if (file_patch_ && entry.name == "patch_embed.proj.weight")
      tensor = resample_patches(tensor.to(at::kFloat), config_.patch_size);
    if (tensor.sizes() != place.sizes()) mismatch(state_, entry, place.sizes().vec());
    if (tensor.scalar_type() != place.scalar_type()) converted_[std::string(info(entry.dtype).torch)] += 1;
    tensor = tensor.to(place.scalar_type()).contiguous();
    // Parameters never share memory, whatever the tensors of a file do.
    if (!taken_.insert(tensor.storage().data()).second) tensor = tensor.clone();
    return tensor;
  }

  // Names follow from the structure alone: a model one wide tells them and costs nothing, whatever sizes a file claims.
  void find_missing() {
    ModelConfig narrow = config_;
    narrow.img_size = narrow.patch_size = {1, 1};
    narrow.in_chans = narrow.embed_dim = narrow.num_heads = 1;
    narrow.mlp_ratio = 1;
    narrow.num_classes = std::min<std::int64_t>(config_.num_classes, 1);
    narrow.reg_tokens = std::min<std::int64_t>(config_.reg_tokens, 1);
    if (narrow.violin) narrow.violin->heads.clear();
    if (narrow.adapters)
      for (auto& [target, rank] : narrow.adapters->ranks) rank = 1;
    std::vector<std::string>& missing = result_.report.missing;
    for (const auto& [name, unused] : nn::state(nn::VisionTransformer(narrow, nn::Uninitialised{})))
      if (state_.find(name) == nullptr) missing.push_back(name);
    if (missing.empty() || !options_.strict) return;
    throw Error(file_in_quotes(state_.file) + ": " + std::to_string(missing.size()) +
                (missing.size() == 1 ? " weight of the model is" : " weights of the model are") +
                " missing: " + in_quotes(missing.front()) + (missing.size() == 1 ? "" : ", …") +
                (nn::is_mask_parameter(missing.front()) ? " (load the model without its mask and plug one in)" : ""));
  }

  void build() {
    LoadReport& report = result_.report;
    result_.model = std::make_shared<nn::VisionTransformer>(config_, nn::Uninitialised{});
    std::set<std::string> used;
    std::vector<std::pair<std::string, at::Tensor>> absent;
    for (auto& [name, place] : nn::state(*result_.model)) {
      const StateEntry* entry = state_.find(name);
      if (entry == nullptr) {
        absent.emplace_back(name, place);
        continue;
      }
      place.set_data(take(*entry, place));
      used.insert(name);
      report.loaded.push_back(name);
    }
    for (const StateEntry& entry : state_.entries)
      if (!used.contains(entry.name)) report.unexpected.push_back(entry.source);
    if (!config_.violin && told_by_file_) {
      for (const StateEntry& entry : state_.entries) {
        if (nn::is_mask_parameter(entry.name))
          throw Error(file_in_quotes(state_.file) + " holds the mask parameter " + in_quotes(entry.name) +
                      " and describes a model without a mask; say what it is (--config)");
      }
    }
    for (const auto& [dtype, count] : converted_)
      adapted(counted(count, "tensor") + " converted: " + dtype + " to float32");
    if (!absent.empty()) initialise(absent);
  }

  void initialise(std::vector<std::pair<std::string, at::Tensor>>& absent) {
    const nn::VisionTransformer fresh(config_, options_.seed);
    for (const auto& [name, tensor] : nn::state(fresh)) {
      for (auto& [missing, place] : absent)
        if (missing == name) place.set_data(tensor.detach().clone());
    }
    note("missing weights have initial values");
  }

  void adapt() {
    nn::VisionTransformer& model = *result_.model;
    if (options_.num_classes && *options_.num_classes != config_.num_classes) {
      model.replace_head(*options_.num_classes, options_.seed);
      adapted("head replaced: " + std::to_string(config_.num_classes) + " to " + std::to_string(*options_.num_classes) +
              " classes");
      description_.classes.clear();
    }
    if (wanted_ == model.config().img_size) return;
    const Size before = model.config().grid();
    model.resize(wanted_);
    const Size after = model.config().grid();
    if (before != after && model.pos_embed.defined()) {
      adapted("positions resampled (" + model.config().pos_resample + "): " + to_string(before) + " to " +
              to_string(after));
    }
  }

  void describe_data() {
    const ModelConfig& config = result_.model->config();
    if (description_.preprocessing) {
      result_.preprocessing = *description_.preprocessing;
      const bool asked = options_.img_size || options_.config || !options_.model.empty();
      // One number beside a rectangular model leaves the other side out; the model knows both.
      const bool half_said = result_.preprocessing.size.is_square() && !config.img_size.is_square();
      if (asked || half_said) result_.preprocessing = data::at_size(result_.preprocessing, wanted_);
    } else {
      result_.preprocessing = data::at_size(own_preprocessing_, config.img_size);
      note("the file does not say how images are prepared: " +
           std::string(family_ == "ViT" ? "mean and deviation 0.5" : "ImageNet statistics") + ", " +
           short_text(result_.preprocessing.size) + " pixels, crop_pct " +
           (result_.preprocessing.crop_pct == 1 ? "1" : "0.9"));
    }
    result_.classes = description_.classes;
    if (!result_.classes.empty() && static_cast<std::int64_t>(result_.classes.size()) != config.num_classes) {
      if (config.num_classes > 0) {
        note("names of " + std::to_string(result_.classes.size()) + " classes do not go with a head of " +
             std::to_string(config.num_classes) + " and are left out");
      }
      result_.classes.clear();
    }
  }

  const LoadOptions& options_;
  std::filesystem::path path_;
  TensorFile file_;
  State state_;
  FileDescription description_;
  LoadedModel result_;
  ModelConfig config_;
  std::string family_;
  Size wanted_;
  data::EvalOptions own_preprocessing_;  // of the family at the size of the weights, for files that do not say
  std::optional<Size> file_patch_;       // where patches are resampled
  std::map<std::string, std::int64_t> converted_;
  std::set<const void*> taken_;
  bool told_by_file_ = false;  // the architecture is what the file's metadata say
};

}  // namespace

std::string LoadReport::text() const {
  std::string out = file + ": " + format + (branch.empty() ? "" : ", branch " + branch) + "\n  " + architecture + ", " +
                    std::to_string(loaded.size()) + " tensors loaded\n";
  const auto add = [&](const char* title, const std::vector<std::string>& lines) {
    constexpr std::size_t kMost = 12;
    for (std::size_t i = 0; i < std::min(lines.size(), kMost); ++i) {
      out += "  ";
      out += i == 0 ? title : "";
      out += std::string(i == 0 ? 12 - std::string_view(title).size() : 12, ' ') + printable(lines[i], 400) + "\n";
    }
    if (lines.size() > kMost) out += std::string(14, ' ') + "and " + std::to_string(lines.size() - kMost) + " more\n";
  };
  add("adapted", adapted);
  add("missing", missing);
  add("unexpected", unexpected);
  add("ignored", ignored);
  add("note", notes);
  return out;
}

std::vector<std::string> LoadReport::warnings() const {
  std::vector<std::string> lines = notes;
  if (unexpected.empty()) return lines;
  constexpr std::size_t kMost = 3;
  std::string names;
  for (std::size_t i = 0; i < std::min(unexpected.size(), kMost); ++i) names += (i == 0 ? "" : ", ") + unexpected[i];
  if (unexpected.size() > kMost) names += ", …";
  const bool one = unexpected.size() == 1;
  lines.push_back(std::to_string(unexpected.size()) +
                  (one ? " tensor of the weights has" : " tensors of the weights have") +
                  " no place in the model and " + (one ? "is" : "are") + " left out: " + names);
  return lines;
}

nlohmann::ordered_json LoadReport::json() const {
  return {{"file", file},       {"format", format},   {"branch", branch},   {"architecture", architecture},
          {"loaded", loaded},   {"adapted", adapted}, {"missing", missing}, {"unexpected", unexpected},
          {"ignored", ignored}, {"notes", notes}};
}

std::filesystem::path resolve_weights(const std::filesystem::path& path, const std::string& branch) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return path;
  if (branch == "ema") {
    for (const char* place : {"best", "last", "."}) {
      const std::filesystem::path average = (path / place).lexically_normal() / kAverageFile;
      if (std::filesystem::is_regular_file(average, ignored)) return average;
    }
    throw Error(file_in_quotes(path.string()) + " holds no average of weights; train with --ema 0.9999 to keep one");
  }
  for (const char* place : {"best/model.safetensors", "last/model.safetensors", "model.safetensors"}) {
    if (std::filesystem::is_regular_file(path / place, ignored)) return path / place;
  }
  // Where a run that replaces another was killed before its first steps.
  const std::filesystem::path before = path / ".replaced";
  throw Error(file_in_quotes(path.string()) +
              " holds no weights: neither best/model.safetensors nor last/model.safetensors is there" +
              (std::filesystem::is_directory(before, ignored)
                   ? "; those of the run that was there before are in " + file_in_quotes(before.string())
                   : ""));
}

FileDescription describe(const TensorFile& file, const std::string& file_name) {
  FileDescription result;
  try {
    if (const auto model = metadata_json(file.metadata(), kModelKey)) result.config = nn::model_from_json(*model);
    if (const auto preprocessing = metadata_json(file.metadata(), kPreprocessingKey))
      result.preprocessing = preprocessing_from_json(*preprocessing);
    if (const auto classes = metadata_json(file.metadata(), kClassesKey)) {
      const bool good = classes->is_array() && std::all_of(classes->begin(), classes->end(),
                                                           [](const json& name) { return name.is_string(); });
      if (!good) throw Error("metadata '" + std::string(kClassesKey) + "' is no list of names");
      result.classes = classes->get<std::vector<std::string>>();
    }
  } catch (const Error& error) {
    throw Error(file_in_quotes(file_name) + ": " + error.what());
  }
  return result;
}

LoadedModel load_model(const std::filesystem::path& path, const LoadOptions& options) {
  LoadedModel loaded;
  try {
    loaded = Loader(path, options).load();
  } catch (const c10::Error& error) {  // what torch cannot do with the file's numbers
    const std::string text = error.what_without_backtrace();
    throw Error(file_in_quotes(path.string()) + ": no model can be made of it: " + text.substr(0, text.find('\n')));
  }
  if (options.device != at::kCPU) loaded.model->to(options.device);
  return loaded;
}

void save_model(const std::filesystem::path& path, const nn::VisionTransformer& model,
                const data::EvalOptions& preprocessing, const std::vector<std::string>& classes, const Metadata& extra,
                at::ScalarType dtype) {
  if (!classes.empty() && static_cast<std::int64_t>(classes.size()) != model.config().num_classes) {
    throw Error("cannot save " + file_in_quotes(path.string()) + ": " + std::to_string(classes.size()) +
                " class names for a head of " + std::to_string(model.config().num_classes));
  }
  for (const auto& block : model.blocks) {
    for (const auto& layer : {block->attn->qkv, block->attn->proj, block->mlp->fc1, block->mlp->fc2}) {
      if (layer->merged())
        throw Error("cannot save " + file_in_quotes(path.string()) +
                    ": adapters are merged into the weights; unmerge or drop them first");
    }
  }
  Metadata metadata = extra;
  metadata[kModelKey] = nn::to_json(model.config()).dump();
  metadata[kPreprocessingKey] = to_json(preprocessing).dump();
  if (!classes.empty()) {
    try {
      metadata[kClassesKey] = json(classes).dump();
    } catch (const json::exception&) {
      throw Error("cannot save " + file_in_quotes(path.string()) + ": a class name is not UTF-8");
    }
    if (metadata[kClassesKey].size() > kMaxTextBytes) {
      throw Error("cannot save " + file_in_quotes(path.string()) + ": the names of classes take more than " +
                  std::to_string(kMaxTextBytes) + " bytes");
    }
  }
  metadata[kVersionKey] = version();
  NamedTensors tensors;
  for (const auto& [name, tensor] : nn::state(model))
    tensors.emplace_back(name, nn::is_mask_parameter(name) ? tensor.detach() : tensor.detach().to(dtype));
  save_safetensors(path, tensors, metadata);
}

at::Tensor resample_patches(const at::Tensor& weight, const Size& size) {
  const torch::NoGradGuard no_grad;
  const std::int64_t height = weight.size(2), width = weight.size(3), before = height * width;
  if (height == size.height && width == size.width) return weight;
  // Scaling as a matrix, [old pixels, new pixels]: its rows are scaled unit patches.
  const at::Tensor unit = at::eye(before, at::kFloat).view({before, 1, height, width});
  const at::Tensor scaling = at::_upsample_bicubic2d_aa(unit, {size.height, size.width}, false).view({before, -1});
  const at::Tensor inverse = at::linalg_pinv(scaling.to(at::kDouble));  // [new, old]
  const at::Tensor flat = weight.to(at::kDouble).reshape({-1, before});
  return at::matmul(flat, inverse.t())
      .reshape({weight.size(0), weight.size(1), size.height, size.width})
      .to(weight.scalar_type());
}

}  // namespace violin::checkpoint
