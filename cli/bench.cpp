// violin bench: ratios against peers on this machine, measured now.

#include "bench/attention.h"

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench_data.h"
#include "cli/bench_model.h"
#include "cli/common.h"
#include "violin/number_text.h"
#include "violin/ops/path.h"

namespace violin::cli {
namespace {

struct Options {
  std::vector<std::string> shapes;
  bench::AttentionOptions attention;
  int threads = 0;
  bool no_formula = false;
  bool json = false;
};

std::string times(double ratio) {
  return std::isnan(ratio) ? "-" : number_text(ratio, "%.2fx");
}

std::string milliseconds(const bench::Timing& time) {
  if (std::isnan(time.median)) return "        - (does not fit into memory)";
  char text[96];
  std::snprintf(text, sizeof(text), "%9.3f (%.3f-%.3f)", time.median * 1e3, time.low * 1e3, time.high * 1e3);
  return text;
}

void print_table(const bench::AttentionResult& result) {
  print("\nB,h,N,d = " + result.shape.to_string() + "   " + std::to_string(result.rounds) +
        " rounds, ms: median (quartiles), ratio to sdpa within a round\n");
  char line[256];
  std::snprintf(line, sizeof(line), "  %-12s %-30s %7s   %-30s %7s\n", "", "forward", "ratio", "forward + backward",
                "ratio");
  print(line);
  for (const bench::Row& row : result.rows) {
    std::snprintf(line, sizeof(line), "  %-12s %-30s %7s   %-30s %7s\n", row.name.c_str(),
                  milliseconds(row.forward).c_str(), times(result.forward_ratio(row.name, "sdpa")).c_str(),
                  milliseconds(row.both).c_str(), times(result.both_ratio(row.name, "sdpa")).c_str());
    print(line);
  }
  if (result.rows.size() > 3) {
    print("  formula / violin gain: " + times(result.forward_ratio("formula", "violin gain")) + " forward, " +
          times(result.both_ratio("formula", "violin gain")) + " forward + backward\n");
  }
  print("  memory beyond inputs, tables and results, forward + backward with gain: " +
        number_text(result.extra_memory / (1024 * 1024), "%.1f MiB\n"));
  std::fflush(stdout);
}

nlohmann::json to_json(const bench::Timing& time) {
  if (std::isnan(time.median)) return nullptr;
  return {{"median_ms", time.median * 1e3}, {"low_ms", time.low * 1e3}, {"high_ms", time.high * 1e3}};
}

nlohmann::json to_json(const bench::AttentionResult& result) {
  nlohmann::json rows;
  for (const bench::Row& row : result.rows) {
    rows[row.name] = {{"forward", to_json(row.forward)},
                      {"both", to_json(row.both)},
                      {"forward_ratio", result.forward_ratio(row.name, "sdpa")},
                      {"both_ratio", result.both_ratio(row.name, "sdpa")}};  // NaN becomes null
  }
  return {{"shape", {result.shape.batch, result.shape.heads, result.shape.tokens, result.shape.dim}},
          {"rounds", result.rounds},
          {"rows", rows},
          {"extra_memory_bytes", result.extra_memory}};
}

void run_attention(Options options) {
  if (!options.shapes.empty()) {
    options.attention.shapes.clear();
    for (const std::string& text : options.shapes) {
      options.attention.shapes.push_back(argument("--shape", [&] { return bench::parse_shape(text); }));
    }
  }
  options.attention.formula = !options.no_formula;
  bench::keep_freed_memory();
  if (options.threads > 0) torch::set_num_threads(options.threads);
  const std::string path = ops::path_name(ops::choose_path(torch::kCPU));
  nlohmann::json document = {{"path", path}, {"threads", torch::get_num_threads()}, {"dtype", options.attention.dtype}};
  if (!options.json) {
    print("attention on the CPU: path " + path + ", " + std::to_string(torch::get_num_threads()) + " threads, " +
          options.attention.dtype + ", peer at::scaled_dot_product_attention without a mask\n");
  }
  for (const bench::AttentionShape& shape : options.attention.shapes) {
    note("measuring " + shape.to_string());
    const bench::AttentionResult result = bench::bench_attention(shape, options.attention, {});
    if (options.json) {
      document["attention"].push_back(to_json(result));
    } else {
      print_table(result);
    }
  }
  const bench::MaskResult mask = bench::bench_decay_mask();
  if (options.json) {
    document["decay_mask"] = {
        {"mask", to_json(mask.mask)}, {"attention", to_json(mask.attention)}, {"ratio", mask.ratio}};
    print(document.dump(2) + "\n");
  } else {
    print("\ndecay_mask, 8 curves, 12 heads, 14x14: " + number_text(mask.mask.median * 1e3, "%.3f ms, ") +
          number_text(mask.ratio * 100, "%.2f%% of the attention at batch 64 ") +
          number_text(mask.attention.median * 1e3, "(%.2f ms)\n"));
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("bench", "Measure against peers on this machine");
  verb->group("Verbs");
  verb->require_subcommand(1);
  CLI::App* attention = verb->add_subcommand("attention", "Attention with and without a mask against torch's own");
  auto options = std::make_shared<Options>();
  attention->add_option("--shape", options->shapes, "BATCH,HEADS,TOKENS,DIM; repeatable")->expected(1)->take_all();
  attention->add_option("--dtype", options->attention.dtype, "Of q, k and v")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->capture_default_str();
  attention->add_option("--seconds", options->attention.seconds, "To spend on each shape")
      ->check(check_seconds)
      ->capture_default_str();
  attention->add_option("--threads", options->threads, "Default: torch's")->check(CLI::Range(1, 1024));
  attention->add_flag("--no-formula", options->no_formula, "Leave out the slow plain formula");
  attention->add_flag("--json", options->json, "One JSON document on stdout");
  attention->callback([options] { run_attention(*options); });
  add_bench_data(*verb);
  add_bench_model(*verb);
}

}  // namespace violin::cli
