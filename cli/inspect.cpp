// violin inspect: what a weights file holds: tensors, the model they belong to, preprocessing, classes, and the decay
// of every layer and head.

#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/weights.h"
#include "violin/nn/json_text.h"
#include "violin/nn/mask.h"
#include "violin/number_text.h"
#include "violin/text.h"
#include "violin/viz/decay_chart.h"
#include "violin/viz/terminal.h"

namespace violin::cli {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::string path;
  WeightsOptions weights;
  PictureOptions picture;
  bool full = false;
  bool time = false;
  bool json = false;
};

// The mask of one layer.
struct Layer {
  std::int64_t block = 0;
  at::Tensor log_gamma;  // [C,h] or [C,A,h] float64; undefined without curves
  at::Tensor alpha;      // [h] float64; undefined without
};

struct Masks {
  std::vector<std::string> curves;  // one per row of log_gamma; per axis "manhattan/0", …
  std::vector<Layer> layers;
  std::int64_t heads = 0;
};

struct Inspected {
  std::string file;
  std::string format;
  std::int64_t bytes = 0;
  std::vector<checkpoint::NamedRef> tensors;
  std::int64_t numbers = 0;  // in all tensors
  checkpoint::State state;
  std::optional<checkpoint::Architecture> architecture;
  std::string no_architecture;  // why there is none
  std::optional<data::EvalOptions> preprocessing;
  std::int64_t class_names = 0;
  Masks masks;
};

double value_of(const at::Tensor& tensor, std::int64_t row, std::int64_t column) {
  return tensor[row][column].item<double>();
}

Masks read_masks(const checkpoint::State& state, const nn::ModelConfig& config) {
  Masks masks;
  if (!config.violin) return masks;
  const torch::NoGradGuard no_grad;
  for (std::int64_t block = 0; block < config.depth; ++block) {
    if (!config.violin->covers_block(block)) continue;
    nn::Mask mask(*config.violin, config.num_heads, config.grid(), std::make_shared<nn::TableBudget>());
    const std::string layer = "blocks." + std::to_string(block) + ".attn.violin.";
    for (auto& [name, place] : nn::state(mask)) {
      const std::string full_name = layer + name;
      const checkpoint::StateEntry* entry = state.find(full_name);
      if (entry == nullptr || place.sizes().vec() != entry->sizes) {
        throw Error(file_in_quotes(state.file) + ": tensor '" + full_name + "' " +
                    (entry == nullptr ? "is missing"
                                      : "is " + checkpoint::shape_text(entry->sizes) + "; expected " +
                                            checkpoint::shape_text(place.sizes().vec())));
      }
      place.copy_(entry->make());
    }
    mask.to(at::kDouble);
    Layer read{.block = block, .log_gamma = {}, .alpha = {}};
    masks.curves = mask.curve_names();
    masks.heads = static_cast<std::int64_t>(mask.masked_heads().size());
    if (!masks.curves.empty()) {
      const at::Tensor decay = mask.log_decay();
      if (decay.dim() == 3) {
        std::vector<std::string> rows;
        for (const std::string& curve : masks.curves)
          for (std::int64_t axis = 0; axis < decay.size(1); ++axis) rows.push_back(curve + "/" + std::to_string(axis));
        masks.curves = rows;
      }
      read.log_gamma = decay.reshape({-1, masks.heads}).contiguous();
    }
    if (mask.alpha.defined()) read.alpha = mask.alpha.detach().contiguous();
    masks.layers.push_back(std::move(read));
  }
  return masks;
}

// Only prefix tokens are read behind the last block, and their rows of the mask do not depend on the decay.
bool last_decay_is_idle(const nn::ModelConfig& config) {
  return config.violin && !config.violin->decay && !config.violin->curves.empty() && config.global_pool == "token" &&
         config.violin->covers_block(config.depth - 1);
}

Inspected inspect(const Options& options) {
  Inspected result;
  const std::filesystem::path path = checkpoint::resolve_weights(options.path);
  const checkpoint::TensorFile file = checkpoint::TensorFile::open(path);
  result.file = path.string();
  result.format = to_string(file.format());
  result.bytes = static_cast<std::int64_t>(file.bytes());
  result.tensors = file.list();
  for (const checkpoint::NamedRef& entry : result.tensors) {
    std::int64_t numbers = 1;
    for (const std::int64_t size : entry.tensor.sizes) numbers *= size;
    result.numbers += numbers;
  }
  const checkpoint::FileDescription description = checkpoint::describe(file, result.file);
  result.preprocessing = description.preprocessing;
  result.class_names = static_cast<std::int64_t>(description.classes.size());
  const checkpoint::LoadOptions load = load_options(options.weights);
  result.state = checkpoint::translate(file, result.file, options.weights.branch);
  try {
    checkpoint::Architecture architecture;
    if (load.config || description.config) {
      architecture.config = load.config ? *load.config : *description.config;
    } else {
      architecture = checkpoint::infer_architecture(result.state, {load.num_heads, load.img_size});
    }
    if (load.config || description.config) {
      // The tensors tell the name.
      try {
        const checkpoint::Architecture told =
            checkpoint::infer_architecture(result.state, {architecture.config.num_heads, architecture.config.img_size});
        architecture.name = told.name;
        architecture.family = told.family;
      } catch (const Error&) {
        architecture.name.clear();
      }
    }
    result.architecture = std::move(architecture);
  } catch (const Error& error) {
    result.no_architecture = error.what();
    return result;
  }
  result.masks = read_masks(result.state, result.architecture->config);
  return result;
}

std::string size_text(double bytes) {
  if (bytes >= 1e9) return number_text(bytes / 1e9, "%.2f GB");
  if (bytes >= 1e6) return number_text(bytes / 1e6, "%.1f MB");
  return number_text(bytes / 1e3, "%.1f kB");
}

std::string count_text(double count) {
  if (count >= 1e6) return number_text(count / 1e6, "%.2f M");
  return std::to_string(static_cast<std::int64_t>(count));
}

// gamma with digits that tell it from 1.
std::string gamma_text(double log_gamma) {
  if (log_gamma == 0) return "1";
  const double away = -std::expm1(log_gamma);
  const int digits = std::clamp(static_cast<int>(std::ceil(-std::log10(std::max(away, 1e-12)))) + 1, 4, 12);
  char text[48];
  std::snprintf(text, sizeof text, "%.*f", digits, std::exp(log_gamma));
  return text;
}

std::string architecture_line(const checkpoint::Architecture& architecture) {
  const nn::ModelConfig& config = architecture.config;
  std::string text = architecture.name.empty() ? "vision transformer" : architecture.name;
  text += ": width " + std::to_string(config.embed_dim) + ", depth " + std::to_string(config.depth) + ", heads " +
          (architecture.heads_known ? std::to_string(config.num_heads) : "unknown") + ", patches " +
          to_string(config.patch_size) + " of " + to_string(config.img_size);
  if (config.class_token) text += ", class token";
  if (config.distilled) text += ", distillation token";
  if (config.reg_tokens > 0) text += ", " + std::to_string(config.reg_tokens) + " registers";
  if (config.init_values) text += ", layer scale";
  text += config.num_classes > 0 ? ", " + std::to_string(config.num_classes) + " classes" : ", no head";
  return text;
}

std::string mask_line(const nn::MaskConfig& mask) {
  std::string text = "curves " + (mask.curves.empty() ? std::string("none") : mask.curves) + ", strategy " +
                     mask.strategy + ", decay " + (mask.decay ? number_text(*mask.decay, "%.6g") : "learned");
  if (mask.uses_rate()) text += " (rate)";
  text += mask.alpha ? ", alpha" : ", no alpha";
  if (mask.curve_weights) text += ", curve weights";
  if (mask.learned_prefix_decay) text += ", learned decay of prefix tokens";
  return text;
}

// Smallest, mean and largest of some numbers.
struct Range {
  double low = 0, mean = 0, high = 0;
};
Range range(const at::Tensor& values) {
  return {values.min().item<double>(), values.mean().item<double>(), values.max().item<double>()};
}

void print_masks(const Masks& masks, bool full) {
  if (masks.layers.empty()) return;
  const bool decays = !masks.curves.empty();
  const bool alphas = masks.layers.front().alpha.defined();
  std::vector<std::vector<std::string>> rows;
  if (full) {
    rows = {{"layer.head"}};
    for (const std::string& curve : masks.curves) rows[0].push_back("γ " + curve);
    if (alphas) rows[0].emplace_back("α");
    for (const Layer& layer : masks.layers) {
      for (std::int64_t h = 0; h < masks.heads; ++h) {
        std::vector<std::string> row = {std::to_string(layer.block) + "." + std::to_string(h)};
        for (std::int64_t c = 0; c < static_cast<std::int64_t>(masks.curves.size()); ++c)
          row.push_back(gamma_text(value_of(layer.log_gamma, c, h)));
        if (alphas) row.push_back(number_text(layer.alpha[h].item<double>(), "%.4f"));
        rows.push_back(std::move(row));
      }
    }
    print("\n" + viz::table(rows));
    return;
  }
  const auto gamma_cells = [](std::vector<std::string>& row, const at::Tensor& log_gamma) {
    const Range logs = range(log_gamma);
    for (const double value : {logs.low, std::log(log_gamma.exp().mean().item<double>()), logs.high})
      row.push_back(gamma_text(value));
  };
  rows = {{"layer"}};
  if (decays) rows[0].insert(rows[0].end(), {"γ smallest", "mean", "largest"});
  if (alphas) rows[0].insert(rows[0].end(), {"α smallest", "mean", "largest"});
  for (const Layer& layer : masks.layers) {
    std::vector<std::string> row = {std::to_string(layer.block)};
    if (decays) gamma_cells(row, layer.log_gamma);
    if (alphas) {
      const Range alpha = range(layer.alpha);
      for (const double value : {alpha.low, alpha.mean, alpha.high}) row.push_back(number_text(value, "%.4f"));
    }
    rows.push_back(std::move(row));
  }
  print("\n" + viz::table(rows));
  if (!decays) return;
  rows = {{"curve", "γ smallest", "mean", "largest"}};
  for (std::size_t c = 0; c < masks.curves.size(); ++c) {
    std::vector<at::Tensor> over_layers;
    over_layers.reserve(masks.layers.size());
    for (const Layer& layer : masks.layers) over_layers.push_back(layer.log_gamma[static_cast<std::int64_t>(c)]);
    std::vector<std::string> row = {masks.curves[c]};
    gamma_cells(row, at::stack(over_layers));
    rows.push_back(std::move(row));
  }
  print("\n" + viz::table(rows));
}

constexpr const char* kIdleNote =
    "the decay of the last layer has exactly zero gradient: only prefix tokens are read behind it, and their rows of "
    "the "
    "mask do not depend on it";

void print_text(const Inspected& result, const Options& options) {
  std::vector<std::vector<std::string>> rows = {{"tensor", "shape", "dtype"}};
  for (const checkpoint::NamedRef& entry : result.tensors) {
    rows.push_back({printable(entry.name, 200), checkpoint::shape_text(entry.tensor.sizes),
                    std::string(checkpoint::info(entry.tensor.dtype).torch)});
  }
  print(viz::table(rows));
  const auto line = [](const std::string& title, const std::string& text) {
    print(title + std::string(title.size() < 15 ? 15 - title.size() : 1, ' ') + printable(text) + "\n");
  };
  print("\n");
  line("file", result.format + ", " + size_text(static_cast<double>(result.bytes)) +
                   (result.state.branch.empty() ? "" : ", branch " + result.state.branch));
  line("tensors",
       std::to_string(result.tensors.size()) + " with " + count_text(static_cast<double>(result.numbers)) + " numbers");
  for (const std::string& text : result.state.ignored) line("beside", text);
  for (const std::string& text : result.state.renamed) line("names", text);
  if (!result.architecture) return line("architecture", "unknown: " + result.no_architecture);
  const nn::ModelConfig& config = result.architecture->config;
  line("architecture", architecture_line(*result.architecture));
  for (const std::string& text : result.architecture->notes) line("", text);
  line("preprocessing",
       result.preprocessing ? checkpoint::to_json(*result.preprocessing).dump() : "the file does not say");
  line("class names", result.class_names > 0 ? std::to_string(result.class_names) : "none");
  if (!config.violin) return;
  line("mask", mask_line(*config.violin));
  if (last_decay_is_idle(config)) line("", kIdleNote);
  print_masks(result.masks, options.full);
}

ordered_json numbers(const at::Tensor& tensor) {
  ordered_json list = ordered_json::array();
  if (tensor.dim() > 1) {
    for (std::int64_t i = 0; i < tensor.size(0); ++i) list.push_back(numbers(tensor[i]));
    return list;
  }
  const auto* values = tensor.const_data_ptr<double>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) list.push_back(values[i]);
  return list;
}

ordered_json to_json(const Inspected& result) {
  ordered_json tensors = ordered_json::array();
  for (const checkpoint::NamedRef& entry : result.tensors) {
    tensors.push_back(
        {{"name", entry.name}, {"shape", entry.tensor.sizes}, {"dtype", checkpoint::info(entry.tensor.dtype).torch}});
  }
  ordered_json json = {{"file", result.file},
                       {"format", result.format},
                       {"bytes", result.bytes},
                       {"branch", result.state.branch},
                       {"tensors", tensors},
                       {"numbers", result.numbers},
                       {"ignored", result.state.ignored},
                       {"architecture", nullptr},
                       {"preprocessing", nullptr},
                       {"class_names", result.class_names}};
  if (result.preprocessing) json["preprocessing"] = checkpoint::to_json(*result.preprocessing);
  if (!result.architecture) {
    json["problem"] = result.no_architecture;
    return json;
  }
  ordered_json model = nn::to_json(result.architecture->config);
  if (!result.architecture->heads_known) model["num_heads"] = nullptr;
  json["architecture"] = {{"name", nullptr}, {"model", model}, {"notes", result.architecture->notes}};
  if (!result.architecture->name.empty()) json["architecture"]["name"] = result.architecture->name;
  if (!result.architecture->config.violin) return json;
  ordered_json layers = ordered_json::array();
  for (const Layer& layer : result.masks.layers) {
    ordered_json one = {{"block", layer.block}};
    if (layer.log_gamma.defined()) {
      one["gamma"] = numbers(layer.log_gamma.exp());
      one["log_gamma"] = numbers(layer.log_gamma);
    }
    if (layer.alpha.defined()) one["alpha"] = numbers(layer.alpha);
    layers.push_back(std::move(one));
  }
  json["violin"] = {{"curves", result.masks.curves},
                    {"layers", layers},
                    {"last_decay_has_no_gradient", last_decay_is_idle(result.architecture->config)}};
  return json;
}

viz::DecayChart chart_of(const Inspected& result) {
  if (!result.architecture || result.masks.layers.empty()) {
    throw Error(file_in_quotes(result.file) + " has no mask to draw" +
                (result.no_architecture.empty() ? "" : ": " + result.no_architecture));
  }
  viz::DecayChart chart;
  const std::string& name = result.architecture->name;
  chart.title = "Decay by layer, head and curve" + (name.empty() ? "" : ": " + name);
  chart.curves = result.masks.curves;
  chart.heads = result.masks.heads;
  for (const Layer& layer : result.masks.layers) {
    chart.blocks.push_back(layer.block);
    const auto append = [](std::vector<double>& to, const at::Tensor& from) {
      if (from.defined())
        to.insert(to.end(), from.const_data_ptr<double>(), from.const_data_ptr<double>() + from.numel());
    };
    append(chart.log_gamma, layer.log_gamma);
    append(chart.alpha, layer.alpha);
  }
  return chart;
}

// How long loading takes and how much memory, against reading the file's bytes; all of it out of the cache.
void time_loading(const Options& options) {
  const std::filesystem::path path = checkpoint::resolve_weights(options.path);
  const auto bytes = static_cast<std::size_t>(std::filesystem::file_size(path));
  const auto seconds = [](const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto peak = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_maxrss) * 1024;
  };
  const auto read = [&](std::size_t piece) {
    const std::unique_ptr<char[]> buffer(new char[piece]);
    std::ifstream in(path, std::ios::binary);
    in.rdbuf()->pubsetbuf(nullptr, 0);
    while (in.read(buffer.get(), static_cast<std::streamsize>(piece)) || in.gcount() > 0) {
    }
  };
  read(1 << 20);  // into the cache
  const checkpoint::LoadOptions load = load_options(options.weights);
  const double before = peak();
  std::vector<double> loads, reads;
  double memory = 0;
  constexpr int kRepeats = 7;
  for (int i = 0; i < kRepeats; ++i) {
    loads.push_back(seconds([&] { checkpoint::load_model(options.path, load); }));
    if (i == 0) memory = peak() - before;
    reads.push_back(seconds([&] { read(bytes); }));
  }
  const auto median = [](std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
  };
  const double loading = median(loads), reading = median(reads), size = static_cast<double>(bytes);
  if (options.json) {
    const ordered_json json = {{"bytes", bytes},          {"load_seconds", loading},
                               {"read_seconds", reading}, {"load_over_read", loading / reading},
                               {"peak_bytes", memory},    {"peak_over_file", memory / size}};
    return print(json.dump() + "\n");
  }
  print("load  " + number_text(loading * 1e3, "%.1f ms") + ", " + number_text(loading / reading, "%.2f") +
        " times as long as reading the " + size_text(size) + " from the cache (" +
        number_text(reading * 1e3, "%.1f ms") + ", medians of " + std::to_string(kRepeats) + ")\npeak  " +
        size_text(memory) + ", " + number_text(memory / size, "%.2f") + " times the file\n");
}

void run_inspect(const Options& options) {
  if (options.json && options.picture.wanted()) throw Usage("--json prints values: it does not go with --svg or --png");
  if (options.time && options.picture.wanted()) throw Usage("--time measures and draws nothing");
  if (options.time) return time_loading(options);
  const Inspected result = inspect(options);
  if (options.json) return print(nn::json_text(to_json(result)) + "\n");
  if (options.picture.wanted())
    return write_pictures(viz::decay_chart(chart_of(result)), options.picture, {options.path});
  print_text(result, options);
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("inspect", "What a weights file holds, and the masks in it");
  verb->group("Verbs");
  verb->add_option("FILE", options->path, "Weights (.pth, .pt, .safetensors) or a run's folder")->required();
  add_weights_options(*verb, options->weights);
  verb->add_flag("--full", options->full, "Decay and alpha of every head instead of their ranges")->group("Output");
  verb->add_flag("--time", options->time, "Measure loading against reading the file from the cache")->group("Output");
  verb->add_flag("--json", options->json, "Print everything as JSON and nothing else")->group("Output");
  add_picture_options(*verb, options->picture);
  verb->footer(R"(A picture shows the decay of masks by layer, head and curve.

Examples:
  violin inspect deit_small_patch16_224.pth
  violin inspect run/ --full
  violin inspect run/ --png decay.png)");
  verb->callback([options] { run_inspect(*options); });
}

}  // namespace violin::cli
