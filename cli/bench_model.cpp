// violin bench model: a model with its mask against the same model without one, with our attention and with torch's.

#include "cli/bench_model.h"

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "bench/model.h"
#include "cli/common.h"
#include "cli/compute.h"
#include "cli/weights.h"
#include "violin/nn/registry.h"

namespace violin::cli {
namespace {

struct ModelBench {
  std::string model = "violin_deit_tiny_patch16_224";
  std::string config;
  std::int64_t batch = 8;
  double seconds = 20;
  std::string peer, trace;
  bool adapters = false;
  ComputeOptions compute;
  bool json = false;
};

void run_model(const ModelBench& options) {
  std::error_code failure;
  if (!options.trace.empty()) std::filesystem::create_directories(options.trace, failure);
  if (failure) throw Error("cannot make the folder '" + options.trace + "' (--trace): " + failure.message());
  const Compute compute = start_compute(options.compute);
  bench::ModelOptions settings;
  settings.config = options.config.empty() ? nn::find_model(options.model) : read_model_config(options.config);
  if (!settings.config.violin) settings.config.violin = nn::MaskConfig{};
  settings.batch = options.batch;
  settings.device = compute.device;
  settings.bf16 = compute.precision == nn::Precision::kBf16;
  settings.seconds = options.seconds;
  settings.peer = options.peer;
  settings.trace = options.trace;
  settings.adapters = options.adapters;
  const bench::ModelResult result = bench::bench_model(settings, [](const std::string& line) { note(line); });
  const std::string name = options.config.empty() ? options.model : options.config;
  if (options.json) {
    nlohmann::ordered_json document = {{"model", name},
                                       {"batch", options.batch},
                                       {"device", compute.device.str()},
                                       {"threads", at::get_num_threads()},
                                       {"infer_rounds", result.infer_rounds},
                                       {"train_rounds", result.train_rounds}};
    for (const bench::ModelRow& row : result.rows)
      document["rows"].push_back({{"name", row.name},
                                  {"infer_ms", row.infer_ms},
                                  {"infer_ratio", row.infer_ratio},
                                  {"train_ms", row.train_ms},
                                  {"train_ratio", row.train_ratio},
                                  {"issue_ms", row.issue_ms}});
    print(document.dump(2) + "\n");
    return;
  }
  std::array<char, 160> line{};
  std::snprintf(line.data(), line.size(),
                "%s, batch %lld, %s: ms and ratio to vanilla, medians of %lld and %lld rounds\n", name.c_str(),
                static_cast<long long>(options.batch), compute.device.str().c_str(),
                static_cast<long long>(result.infer_rounds), static_cast<long long>(result.train_rounds));
  std::string text = line.data();
  text += "            inference               training step       issued after\n";
  for (const bench::ModelRow& row : result.rows) {
    std::snprintf(line.data(), line.size(), "  %-8s %9.1f  %6.3fx      %9.1f  %6.3fx      %9.1f\n", row.name.c_str(),
                  row.infer_ms, row.infer_ratio, row.train_ms, row.train_ratio, row.issue_ms);
    text += line.data();
  }
  text += "  torch: vanilla with torch's attention instead of ours\n";
  print(text);
}

}  // namespace

void add_bench_model(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand(
      "model", "A model with its mask against its twins without one, with our attention and torch's");
  const auto options = std::make_shared<ModelBench>();
  CLI::Option* model = verb->add_option("--model", options->model, "Name of a model")->capture_default_str();
  verb->add_option("--config", options->config, "JSON file that describes the model, instead of a name")
      ->type_name("FILE")
      ->excludes(model);
  verb->add_option("--batch", options->batch, "Images per step")->check(CLI::Range(1, 65536))->capture_default_str();
  verb->add_option("--seconds", options->seconds, "To spend on each of inference and training")
      ->check(check_seconds)
      ->capture_default_str();
  verb->add_option("--peer", options->peer, "Also timm's twin: \"python3 bench/model_peer.py [--compile]\"")
      ->type_name("COMMAND");
  verb->add_option("--trace", options->trace, "Also a trace of one training step of each, for tools/trace_summary.py")
      ->type_name("FOLDER");
  verb->add_flag("--adapters", options->adapters, "Also with LoRA and DoRA adapters of rank 8");
  verb->add_flag("--json", options->json, "Print JSON");
  add_compute_options(*verb, options->compute, Draws::kNone);
  verb->callback([options] { run_model(*options); });
}

}  // namespace violin::cli
