// violin report: a page about one run, or several side by side.

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/common.h"
#include "cli/compute.h"
#include "cli/progress.h"
#include "violin/checkpoint/model_file.h"
#include "violin/curves/curves.h"
#include "violin/data/file.h"
#include "violin/predict/attention_map.h"
#include "violin/train/train.h"
#include "violin/version.h"
#include "violin/viz/grid_plot.h"
#include "violin/viz/pictures.h"
#include "violin/viz/report.h"

namespace violin::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::int64_t kMaxEvaluated = 2000;  // images that predictions are chosen from
constexpr std::size_t kShown = 8;             // predictions of a sort
constexpr std::int64_t kMaxMaskHeads = 6;

struct Options {
  std::vector<std::string> runs;
  std::string out;
  bool no_images = false;
  ComputeOptions compute;
};

std::string number(double value, const char* format) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string shown(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// Runs of one group have equal configurations but for seeds and files.
std::string group_of(json config) {
  for (const char* name : {"violin", "torch", "fingerprint", "data", "weights"}) config.erase(name);
  if (config.contains("options")) config["options"].erase("seed");
  return config.dump();
}

viz::DecayChart decay_of(const nn::VisionTransformer& model) {
  const torch::NoGradGuard no_grad;
  viz::DecayChart chart;
  for (std::size_t i = 0; i < model.blocks.size(); ++i) {
    const std::shared_ptr<nn::Mask>& mask = model.blocks[i]->attn->violin;
    if (!mask || mask->curve_names().empty()) continue;
    at::Tensor decay = mask->log_decay().to(at::kCPU, at::kDouble);
    if (decay.dim() == 3) decay = decay.mean(1);  // over the axes
    decay = decay.contiguous();
    chart.curves = mask->curve_names();
    chart.heads = decay.size(1);
    chart.blocks.push_back(static_cast<std::int64_t>(i));
    chart.log_gamma.insert(chart.log_gamma.end(), decay.const_data_ptr<double>(),
                           decay.const_data_ptr<double>() + decay.numel());
    if (mask->alpha.defined()) {
      const at::Tensor alpha = mask->alpha.to(at::kCPU, at::kDouble).contiguous();
      chart.alpha.insert(chart.alpha.end(), alpha.const_data_ptr<double>(),
                         alpha.const_data_ptr<double>() + alpha.numel());
    }
  }
  return chart;
}

// The mask of heads with a short, a middle and a long reach, around three patches.
std::optional<viz::Scene> masks_of(nn::VisionTransformer& model) {
  const torch::NoGradGuard no_grad;
  struct Head {
    std::int64_t block, head;
    double reach;
  };
  const nn::Size grid = model.config().grid();
  const std::int64_t patches = grid.height * grid.width;
  if (patches > 4096) return std::nullopt;
  std::vector<Head> heads;
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    const std::shared_ptr<nn::Mask>& mask = model.blocks[b]->attn->violin;
    if (!mask || mask->curve_names().empty() || mask->config().strategy == "log") continue;
    const at::Tensor mean = mask->mask(grid, 0).mean(at::IntArrayRef({1, 2})).to(at::kCPU, at::kDouble);
    for (std::int64_t h = 0; h < mean.size(0); ++h)
      heads.push_back({static_cast<std::int64_t>(b), h, mean[h].item<double>()});
  }
  if (heads.empty()) return std::nullopt;
  std::stable_sort(heads.begin(), heads.end(), [](const Head& a, const Head& b) { return a.reach < b.reach; });
  const std::int64_t count = std::min<std::int64_t>(kMaxMaskHeads, static_cast<std::int64_t>(heads.size()));
  constexpr double kSide = 118, kGap = 12, kMargin = 24, kTop = 40, kLabel = 70;
  viz::Scene scene;
  scene.title = "Masks of chosen heads around three patches";
  scene.width = 2 * kMargin + kLabel + static_cast<double>(count) * (kSide + kGap);
  scene.height = kTop + 3 * (kSide + kGap) + kMargin;
  const std::array<std::int64_t, 3> cells = {0, grid.height / 2 * grid.width + grid.width / 2, patches - 1};
  for (std::int64_t column = 0; column < count; ++column) {
    const Head& head = heads[static_cast<std::size_t>(
        count == 1 ? 0 : column * (static_cast<std::int64_t>(heads.size()) - 1) / (count - 1))];
    const at::Tensor mask = model.blocks[static_cast<std::size_t>(head.block)]
                                ->attn->violin->mask(grid, 0)[head.head]
                                .to(at::kCPU, at::kFloat)
                                .contiguous();
    const double x = kMargin + kLabel + static_cast<double>(column) * (kSide + kGap);
    scene.shapes.push_back(
        viz::Text{{x, kTop - 12}, "block " + std::to_string(head.block) + ", head " + std::to_string(head.head), 11});
    for (std::size_t row = 0; row < cells.size(); ++row) {
      Image image(grid.width, grid.height);
      const float* values = mask.const_data_ptr<float>() + cells[row] * patches;
      for (std::int64_t i = 0; i < patches; ++i)
        viz::set_pixel(image, i % grid.width, i / grid.width, viz::mask_color(std::clamp<double>(values[i], 0, 1)));
      const double y = kTop + static_cast<double>(row) * (kSide + kGap);
      scene.shapes.push_back(viz::Picture{{x, y, kSide, kSide}, std::make_shared<Image>(image), false});
      if (column == 0)
        scene.shapes.push_back(viz::Text{
            {kMargin, y + kSide / 2},
            "patch " + std::to_string(cells[row] / grid.width) + "," + std::to_string(cells[row] % grid.width),
            11,
            viz::kSoftInk});
    }
  }
  return scene;
}

viz::Prediction prediction_of(nn::VisionTransformer& model, const train::Task& task, const data::SampleSet& set,
                              std::int64_t index, const at::Tensor& probabilities) {
  const Image image = set.decode(index);
  const auto transform = data::EvalTransform(task.preprocessing);
  at::Tensor input = at::empty({3, task.preprocessing.size, task.preprocessing.size}, at::kFloat);
  data::Random random(0, data::Purpose::kAugment);
  transform.apply(image, random, input.mutable_data_ptr<float>());
  const std::int64_t guess = probabilities.argmax().item<std::int64_t>(), label = set[index].label;
  const auto name = [&](std::int64_t i) { return task.classes.at(static_cast<std::size_t>(i)); };
  return {data::eval_pixels(image, task.preprocessing),
          attention_map(model, input),
          fs::path(set[index].name()).filename().string(),
          name(label),
          name(guess),
          probabilities[guess].item<double>(),
          guess == label};
}

// Confusion, the surest right and wrong answers, and the first image of some classes.
void add_predictions(viz::RunReport& report, nn::VisionTransformer& model, const train::Task& task,
                     const data::SampleSet& set, const std::string& split, const Compute& compute) {
  const data::SampleSet part = set.limited(kMaxEvaluated, 0);
  train::EvaluateOptions settings;
  settings.workers = compute.workers;
  settings.device = compute.device;
  settings.precision = compute.precision;
  Progress progress("report " + report.name, part.size(), "images");
  settings.progress = [&](std::int64_t images) { progress.advance(images); };
  const train::Evaluation evaluation = train::evaluate(model, part, task.preprocessing, settings, true);
  progress.finish();
  report.confusion = evaluation.metrics.confusion;
  report.notes.push_back("Predictions are on " + std::to_string(evaluation.metrics.images) + " images of " + split +
                         ": top-1 " + number(evaluation.metrics.top1, "%.2f%%") + ".");
  const at::Tensor probabilities = at::softmax(evaluation.logits.to(at::kDouble), 1);
  const at::Tensor surest = std::get<0>(probabilities.max(1)), guesses = probabilities.argmax(1);
  std::vector<std::int64_t> order(evaluation.indices.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  const auto* sure = surest.const_data_ptr<double>();
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return sure[a] > sure[b]; });
  std::set<std::int64_t> classes;
  for (const std::int64_t row : order) {
    const std::int64_t index = evaluation.indices[static_cast<std::size_t>(row)];
    const bool right = guesses[row].item<std::int64_t>() == part[index].label;
    std::vector<viz::Prediction>& list = right ? report.best : report.worst;
    if (list.size() < kShown) list.push_back(prediction_of(model, task, part, index, probabilities[row]));
    if (report.best.size() == kShown && report.worst.size() == kShown) break;
  }
  for (std::size_t row = 0; row < evaluation.indices.size() && report.shared.size() < kShown; ++row) {
    const std::int64_t index = evaluation.indices[row];
    if (classes.insert(part[index].label).second)
      report.shared.push_back(prediction_of(model, task, part, index, probabilities[static_cast<std::int64_t>(row)]));
  }
}

viz::RunReport collect(const fs::path& folder, const Options& options, const Compute& compute, bool many) {
  if (!train::is_run_folder(folder))
    throw Error("'" + folder.string() + "' holds no run; give the folder that --out named");
  const json config = train::read_json_file(folder / "config.json");
  const train::Task task = train::task_from_json(config);
  viz::RunReport report;
  report.name = folder.filename().empty() ? folder.parent_path().filename().string() : folder.filename().string();
  report.group = group_of(config);
  report.classes = task.classes;
  for (const json& line : train::read_log(folder)) {
    if (line.value("type", "") != "epoch") continue;
    viz::EpochRow row;
    row.epoch = line.value("epoch", 0.0) + 1;
    row.lr = line.value("lr", 0.0);
    row.train_loss = line.value("train_loss", 0.0);
    if (line.contains("val_loss")) row.val_loss = line.at("val_loss").get<double>();
    if (line.contains("val_top1")) row.val_top1 = line.at("val_top1").get<double>();
    if (row.val_top1) report.best_top1 = std::max(report.best_top1.value_or(0), *row.val_top1);
    report.images_per_second = line.value("images_per_second", 0.0);
    report.epochs.push_back(row);
  }
  std::string test = "–";
  if (fs::exists(folder / "result.json")) {
    const json result = train::read_json_file(folder / "result.json");
    report.images_per_second = result.value("images_per_second", report.images_per_second);
    if (result.contains("test")) {
      report.test_top1 = result.at("test").at("top1").get<double>();
      test = number(*report.test_top1, "%.2f%%") + " on " +
             std::to_string(result.at("test").at("images").get<std::int64_t>()) + " images";
    }
  } else {
    report.notes.push_back("This run has not finished: " + std::to_string(report.epochs.size()) + " of " +
                           std::to_string(task.options.epochs) + " epochs.");
  }
  const nn::Cost cost = nn::cost(task.model, task.model.img_size);
  report.parameters = cost.parameters;
  report.mask_parameters = cost.mask_parameters;
  report.facts = {
      {"model", "ViT, width " + std::to_string(task.model.embed_dim) + ", " + std::to_string(task.model.depth) +
                    " blocks, " + std::to_string(task.model.num_heads) + " heads, patch " +
                    nn::to_string(task.model.patch_size) + ", " + std::to_string(task.preprocessing.size) + " px"},
      {"parameters", number(static_cast<double>(cost.parameters) / 1e6, "%.2f million") + ", of the mask " +
                         std::to_string(cost.mask_parameters)},
      {"mask", task.model.violin ? task.model.violin->curves + ", " + task.model.violin->strategy + ", init " +
                                       task.model.violin->init
                                 : "none"},
      {"data", task.data.filename().string() + ", " + std::to_string(task.classes.size()) + " classes"},
      {"started from", task.weights.empty() ? "scratch" : task.weights.filename().string()},
      {"recipe", task.options.recipe + ", " + std::to_string(task.options.epochs) + " epochs, batch " +
                     std::to_string(task.options.batch_size) + ", learning rate " +
                     number(task.options.peak_lr(), "%.3g") + ", seed " + std::to_string(task.options.seed)},
      {"val top-1", report.best_top1 ? number(*report.best_top1, "%.2f%%") + " (best epoch)" : "–"},
      {"test top-1", test},
      {"speed", number(report.images_per_second, "%.0f training images/s")}};
  for (const auto& [key, value] : config.at("options").items()) report.options.emplace_back(key, shown(value));
  for (const auto& [key, value] : config.at("model").items()) report.options.emplace_back("model." + key, shown(value));

  const bool has_weights =
      fs::exists(folder / "best/model.safetensors") || fs::exists(folder / "last/model.safetensors");
  if (!has_weights) {
    report.notes.push_back("There are no weights yet.");
    return report;
  }
  checkpoint::LoadOptions load;
  load.device = compute.device;
  const checkpoint::LoadedModel loaded = checkpoint::load_model(folder, load);
  if (loaded.model->config().violin) {
    viz::DecayChart chart = decay_of(*loaded.model);
    if (!chart.blocks.empty()) {
      chart.title = "Decay by layer, head and curve" + (many ? ": " + report.name : "");
      report.decay = std::move(chart);
      report.masks = masks_of(*loaded.model);
    }
    if (task.model.global_pool == "token" && task.model.violin && !task.model.violin->learned_prefix_decay)
      report.notes.push_back(
          "Only the class token is read, whose mask is 1: the decay of the last block has no influence and stayed as "
          "it began.");
  }
  if (options.no_images) return report;
  try {
    const data::Dataset dataset = train::open_task_data(task);
    // What training never saw, if there is any.
    const data::SampleSet& set = !dataset.test.empty()  ? dataset.test
                                 : !dataset.val.empty() ? dataset.val
                                                        : dataset.train;
    const std::string split = !dataset.test.empty() ? "test" : !dataset.val.empty() ? "val" : "train";
    add_predictions(report, *loaded.model, task, set, split, compute);
  } catch (const Error& error) {
    report.notes.push_back(std::string("No predictions: ") + error.what());
  }
  return report;
}

void write_report(const Options& options) {
  const Compute compute = start_compute(options.compute);
  viz::Report page;
  const bool many = options.runs.size() > 1;
  for (const std::string& run : options.runs) page.runs.push_back(collect(run, options, compute, many));
  // Names tell runs apart, also when folders share theirs.
  for (std::size_t i = 0; i < page.runs.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (page.runs[i].name == page.runs[j].name) page.runs[i].name = options.runs[i];
  page.title = many ? std::to_string(options.runs.size()) + " runs" : page.runs.front().name;
  page.footer = std::string("Written by violin ") + version() + ".";
  const json config = train::read_json_file(fs::path(options.runs.front()) / "config.json");
  const train::Task task = train::task_from_json(config);
  for (const std::string& run : options.runs) {
    const train::Task other = train::task_from_json(train::read_json_file(fs::path(run) / "config.json"));
    if (page.curves || !other.model.violin || other.model.violin->curves.empty()) continue;
    const nn::Size grid = other.model.grid();
    if (grid.height * grid.width > 1024) continue;
    page.curves = viz::curve_gallery(curves::parse_curves(other.model.violin->curves), {0, grid.height, grid.width});
  }
  const fs::path out = !options.out.empty() ? fs::path(options.out)
                       : many               ? fs::path("report.html")
                                            : fs::path(options.runs.front()) / "report.html";
  write_file_atomically(out, viz::report_html(page));
  print(out.string() + "\n");
}

}  // namespace

void add_report(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("report", "Write a page about a run, or about several side by side");
  const auto options = std::make_shared<Options>();
  verb->add_option("runs", options->runs, "Folders of runs")->required()->type_name("RUN…");
  verb->add_option("--out", options->out, "The page (default: report.html in the run; for several, here)")
      ->type_name("FILE");
  verb->add_flag("--no-images", options->no_images, "Leave predictions out");
  add_compute_options(*verb, options->compute, Draws::kNone);
  verb->footer(R"(Examples:
  violin report runs/photos
  violin report runs/violin-1 runs/violin-2 runs/vanilla-1 runs/vanilla-2 --out compare.html)");
  verb->callback([options] { write_report(*options); });
}

}  // namespace violin::cli
