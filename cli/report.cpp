// violin report: a page about one run, or several side by side.

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/common.h"
#include "cli/compute.h"
#include "cli/progress.h"
#include "violin/checkpoint/model_file.h"
#include "violin/curves/curves.h"
#include "violin/data/file.h"
#include "violin/nn/json_text.h"
#include "violin/number_text.h"
#include "violin/predict/attention_map.h"
#include "violin/train/evaluate.h"
#include "violin/train/run_folder.h"
#include "violin/train/task.h"
#include "violin/version.h"
#include "violin/viz/grid_plot.h"
#include "violin/viz/pictures.h"
#include "violin/viz/report.h"
#include "violin/viz/terminal.h"

namespace violin::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::int64_t kMaxEvaluated = 2000;  // images that predictions are chosen from
constexpr std::size_t kShown = 8;             // predictions of a sort
constexpr std::int64_t kMaxMaskHeads = 6;
constexpr std::int64_t kMaxPatches = 4096;  // masks of larger grids are not built
constexpr std::int64_t kMaxGalleryPatches = 1024;
constexpr std::size_t kMaxGalleries = 3;
constexpr viz::Color kFrame = viz::rgb(0x35c4d7);

struct Options {
  std::vector<std::string> runs;
  std::string out;
  std::int64_t batch = 64;
  bool no_images = false;
  bool json = false;
  ComputeOptions compute;
};

std::string shown(const json& value) {
  if (!value.is_array()) return value.is_string() ? value.get<std::string>() : value.dump();
  std::string list;
  for (const json& item : value) list += (list.empty() ? "" : ", ") + shown(item);
  return list;
}

// Nested ones under dotted names.
void add_options(viz::RunReport& report, const std::string& prefix, const json& object) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      add_options(report, prefix + key + ".", value);
    } else {
      report.options.emplace_back(prefix + key, shown(value));
    }
  }
}

// What a run saw: each text is equal for equal images.
struct RunData {
  std::optional<data::Dataset> dataset;
  std::string problem;  // why there is none
  std::string all;      // whatever the seed held out
  std::string val, test;
};

// From names and labels, and from the pixels of a few images, since other images may have the same names.
std::string identity(const std::vector<const data::SampleSet*>& sets) {
  constexpr std::int64_t kLookedAt = 4;  // of each
  std::string text;
  for (const data::SampleSet* set : sets) {
    text += set->fingerprint();
    const std::int64_t count = std::min(set->size(), kLookedAt);
    for (std::int64_t i = 0; i < count; ++i) {
      try {
        const Image image = set->decode(i * set->size() / count);
        text.append(image.pixels.begin(), image.pixels.end());
      } catch (const Error&) {
        text += "unreadable";
      }
    }
  }
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016zx", std::hash<std::string>()(text));
  return digits.data();
}

// `known` holds what was found for the same path before.
RunData data_of(const train::Task& task, std::map<fs::path, std::string>& known) {
  RunData result;
  try {
    result.dataset = train::open_task_data(task);
    result.val = identity({&result.dataset->val});
    result.test = identity({&result.dataset->test});
    std::string& all = known[task.data];
    if (all.empty()) {
      const data::Dataset whole = data::open_dataset(task.data, {.held_out = 0});
      all = identity({&whole.train, &whole.val, &whole.test});
    }
    result.all = all;
  } catch (const Error& error) {
    result.problem = error.what();
    result.all = result.test = "images that are gone, from " + task.data.string();
    result.val = result.all + number_text(task.options.held_out, ", %g held out");
  }
  return result;
}

// Runs of one group have equal configurations, images and weights to start from; only their seeds differ. A learning
// rate that a search chose and statistics that were measured are what came of it, and may be others with another seed.
std::string group_of(json config, const std::string& images) {
  for (const char* name : {"violin", "torch", "fingerprint", "threads", "processes"}) config.erase(name);
  config["data"] = images;
  const bool searched = config.value("lr_search", json()) == true;
  if (searched) config.erase("peak_lr");
  if (config.contains("options")) {
    config["options"].erase("seed");
    if (searched) config["options"].erase("lr");
    if (config["options"].value("statistics", json()) == "data" && config.contains("preprocessing"))
      for (const char* name : {"mean", "std"}) config["preprocessing"].erase(name);
  }
  return nn::json_text(config);
}

// Decays and alphas of the blocks that have a mask; without curves, alphas alone.
viz::DecayChart decay_of(const nn::VisionTransformer& model) {
  const torch::NoGradGuard no_grad;
  viz::DecayChart chart;
  const auto append = [](std::vector<double>& values, const at::Tensor& tensor) {
    const at::Tensor plain = tensor.to(at::kCPU, at::kDouble).contiguous();
    values.insert(values.end(), plain.const_data_ptr<double>(), plain.const_data_ptr<double>() + plain.numel());
  };
  for (std::size_t i = 0; i < model.blocks.size(); ++i) {
    const std::shared_ptr<nn::Mask>& mask = model.blocks[i]->attn->violin;
    if (!mask || (mask->curve_names().empty() && !mask->alpha.defined())) continue;
    chart.blocks.push_back(static_cast<std::int64_t>(i));
    chart.curves = mask->curve_names();
    if (!chart.curves.empty()) {
      at::Tensor decay = mask->log_decay();
      if (decay.dim() == 3) decay = decay.mean(1);  // over the axes
      chart.heads = decay.size(1);
      append(chart.log_gamma, decay);
    }
    if (mask->alpha.defined()) {
      chart.heads = mask->alpha.numel();
      append(chart.alpha, mask->alpha);
    }
  }
  return chart;
}

// [heads, patches, patches], 0 to 1, of one block; undefined where there is no decay.
at::Tensor mask_of(const nn::VisionTransformer& model, std::int64_t block) {
  const std::shared_ptr<nn::Mask>& mask = model.blocks[static_cast<std::size_t>(block)]->attn->violin;
  if (!mask || mask->curve_names().empty()) return {};
  const at::Tensor values = mask->mask(model.config().grid(), 0).to(at::kCPU, at::kFloat);
  return (mask->config().strategy == "log" ? values.exp() : values).contiguous();
}

std::optional<viz::MaskMeans> means_of(const nn::VisionTransformer& model) {
  const torch::NoGradGuard no_grad;
  const Size grid = model.config().grid();
  if (grid.height * grid.width > kMaxPatches) return std::nullopt;
  viz::MaskMeans means;
  for (std::size_t block = 0; block < model.blocks.size(); ++block) {
    const at::Tensor mask = mask_of(model, static_cast<std::int64_t>(block));
    if (!mask.defined()) continue;
    const at::Tensor mean = mask.mean(at::IntArrayRef({1, 2})).to(at::kDouble).contiguous();
    means.blocks.push_back(static_cast<std::int64_t>(block));
    means.heads = mean.numel();
    means.values.insert(means.values.end(), mean.const_data_ptr<double>(),
                        mean.const_data_ptr<double>() + mean.numel());
  }
  if (means.blocks.empty()) return std::nullopt;
  return means;
}

// The mask of heads with a short, a middle and a long reach, around three patches.
viz::Scene masks_of(const nn::VisionTransformer& model, const viz::MaskMeans& means) {
  const torch::NoGradGuard no_grad;
  struct Head {
    std::int64_t block, head;
    double reach;
  };
  const Size grid = model.config().grid();
  const std::int64_t patches = grid.height * grid.width;
  std::vector<Head> heads;
  for (std::size_t i = 0; i < means.values.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    heads.push_back({means.blocks[static_cast<std::size_t>(at / means.heads)], at % means.heads, means.values[i]});
  }
  std::stable_sort(heads.begin(), heads.end(), [](const Head& a, const Head& b) { return a.reach < b.reach; });
  const std::int64_t count = std::min<std::int64_t>(kMaxMaskHeads, static_cast<std::int64_t>(heads.size()));
  constexpr double kSide = 126, kGap = 14, kMargin = 24, kTop = 46, kLabel = 96, kLegend = 46;
  const double longer = static_cast<double>(std::max(grid.height, grid.width));
  const double width = kSide * static_cast<double>(grid.width) / longer;
  const double height = kSide * static_cast<double>(grid.height) / longer;
  viz::Scene scene;
  scene.title = "Masks of chosen heads around three patches";
  scene.width = 2 * kMargin + kLabel + static_cast<double>(count) * (kSide + kGap) - kGap;
  scene.width = std::max(scene.width, 440.0);
  scene.height = kTop + 3 * (height + kGap) + kLegend;
  const std::array<std::int64_t, 3> cells = {0, grid.height / 2 * grid.width + grid.width / 2, patches - 1};
  const auto text = [&](double x, double y, const std::string& words, viz::Color color, bool bold = false) {
    scene.shapes.push_back(viz::Text{{x, y}, words, 12, color, viz::Anchor::kStart, bold});
  };
  for (std::int64_t column = 0; column < count; ++column) {
    const Head& head = heads[static_cast<std::size_t>(
        count == 1 ? 0 : column * (static_cast<std::int64_t>(heads.size()) - 1) / (count - 1))];
    const at::Tensor mask = mask_of(model, head.block);
    const float* own = mask.const_data_ptr<float>() + head.head * patches * patches;
    const double x = kMargin + kLabel + static_cast<double>(column) * (kSide + kGap);
    text(x, kTop - 24, "layer " + std::to_string(head.block) + ", head " + std::to_string(head.head), viz::kInk, true);
    text(x, kTop - 9, "mean " + number_text(head.reach, "%.2f"), viz::kSoftInk);
    for (std::size_t row = 0; row < cells.size(); ++row) {
      Image image(grid.width, grid.height);
      const float* values = own + cells[row] * patches;
      for (std::int64_t i = 0; i < patches; ++i)
        viz::set_pixel(image, i % grid.width, i / grid.width, viz::mask_color(std::clamp<double>(values[i], 0, 1)));
      const double y = kTop + static_cast<double>(row) * (height + kGap);
      scene.shapes.push_back(viz::Picture{{x, y, width, height}, std::make_shared<Image>(image), false});
      const double cell = kSide / longer;
      const std::int64_t r = cells[row] / grid.width, c = cells[row] % grid.width;
      const viz::Box frame = {x + static_cast<double>(c) * cell, y + static_cast<double>(r) * cell, cell, cell};
      scene.shapes.push_back(viz::Rectangle{.box = frame, .stroke = kFrame, .stroke_width = 2});
      if (column > 0) continue;
      text(kMargin, y + height / 2 - 4, "row " + std::to_string(r + 1) + ",", viz::kSoftInk);
      text(kMargin, y + height / 2 + 12, "column " + std::to_string(c + 1), viz::kSoftInk);
    }
  }
  const double y = scene.height - kLegend + 12, x = kMargin + kLabel;
  text(kMargin, y + 10, "mask", viz::kSoftInk);
  scene.shapes.push_back(viz::Picture{{x, y, 200, 10}, viz::color_ramp(viz::mask_color), true});
  text(x, y + 25, "0", viz::kSoftInk);
  scene.shapes.push_back(viz::Text{{x + 200, y + 25}, "1", 12, viz::kSoftInk, viz::Anchor::kEnd});
  return scene;
}

viz::Prediction prediction_of(nn::VisionTransformer& model, const train::Task& task, const data::SampleSet& set,
                              std::int64_t index, const at::Tensor& probabilities) {
  const Image image = set.decode(index);
  const auto transform = data::EvalTransform(task.preprocessing);
  at::Tensor input = at::empty({3, transform.size().height, transform.size().width}, at::kFloat);
  data::Random random(0, data::Purpose::kAugment);
  transform.apply(image, random, input.mutable_data_ptr<float>());
  const std::int64_t guess = probabilities.argmax().item<std::int64_t>(), label = set[index].label;
  const auto name = [&](std::int64_t i) { return task.classes.at(static_cast<std::size_t>(i)); };
  return {data::eval_pixels(image, task.preprocessing),
          attention_map(model, input),
          set[index].name(),
          fs::path(set[index].name()).filename().string(),
          name(label),
          name(guess),
          probabilities[guess].item<double>(),
          guess == label};
}

// Confusion, the surest right and wrong answers, and the first image of some classes.
void add_predictions(viz::RunReport& report, nn::VisionTransformer& model, const train::Task& task,
                     const data::SampleSet& set, const std::string& split, const Compute& compute, std::int64_t batch,
                     std::size_t count) {
  const data::SampleSet part = set.limited(kMaxEvaluated, 0);
  train::EvaluateOptions settings;
  settings.batch_size = batch;
  settings.batch_option = "--batch";
  settings.workers = compute.workers;
  settings.device = compute.device;
  settings.precision = compute.precision;
  Progress progress("report " + report.score.name, part.size(), "images");
  settings.progress = [&](std::int64_t images) { progress.advance(images); };
  const train::Evaluation evaluation = train::evaluate(model, part, task.preprocessing, settings, true);
  progress.finish();
  if (evaluation.indices.empty())
    throw Error("none of the " + std::to_string(part.size()) + " images of " + split + " could be read" +
                (evaluation.bad_images.empty() ? "" : ", the first: " + evaluation.bad_images.front().message));
  note_skipped(evaluation.bad_images);
  if (!evaluation.bad_images.empty())
    report.notes.push_back(counted(std::ssize(evaluation.bad_images), "image") + " of " + split +
                           " could not be read, the first: " + evaluation.bad_images.front().message);
  report.confusion = evaluation.metrics.confusion;
  report.predicted = counted(evaluation.metrics.images, "image") + " of " + split + ", of which " +
                     number_text(evaluation.metrics.top1, "%.2f%%") + " are named right";
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
    if (list.size() < count) list.push_back(prediction_of(model, task, part, index, probabilities[row]));
    if (report.best.size() == count && report.worst.size() == count) break;
  }
  for (std::size_t row = 0; row < evaluation.indices.size() && report.shared.size() < kShown; ++row) {
    const std::int64_t index = evaluation.indices[row];
    if (classes.insert(part[index].label).second)
      report.shared.push_back(prediction_of(model, task, part, index, probabilities[static_cast<std::int64_t>(row)]));
  }
}

std::string mask_text(const std::optional<nn::MaskConfig>& mask) {
  if (!mask) return "none";
  const std::string curves = mask->curves == "violin" ? "the eight curves below" : mask->curves;
  return (curves.empty() ? "no curves, alpha alone" : curves) + "; strategy " + mask->strategy + ", decay " +
         (mask->decay ? number_text(*mask->decay, "%g") + " (fixed)" : "learned") + ", started as " + mask->init;
}

viz::RunReport collect(const fs::path& folder, const Options& options, const Compute& compute, bool many,
                       std::map<fs::path, std::string>& known_data) {
  if (!train::is_run_folder(folder))
    throw Error("'" + folder.string() + "' holds no run; give the folder that --out named");
  const json config = train::read_json_file(folder / "config.json");
  const train::Task task = train::task_from_json(config);
  viz::RunReport report;
  viz::RunScore& score = report.score;
  score.name = folder.filename().empty() ? folder.parent_path().filename().string() : folder.filename().string();
  RunData seen;
  if (many || !options.no_images) seen = data_of(task, known_data);
  score.group = group_of(config, seen.all);
  score.val_set = seen.val;
  score.test_set = seen.test;
  score.seed = static_cast<std::uint64_t>(task.options.seed);
  report.classes = task.classes;
  for (const json& line : train::read_log(folder)) {
    if (line.value("type", "") != "epoch") continue;
    viz::EpochRow row;
    row.epoch = train::number_in(line, "epoch").value_or(0) + 1;
    row.lr = train::number_in(line, "lr").value_or(0);
    row.train_loss = train::number_in(line, "train_loss").value_or(std::nan(""));
    row.val_loss = train::number_in(line, "val_loss");
    row.val_top1 = train::number_in(line, "val_top1");
    if (row.val_top1) score.val_top1 = std::max(score.val_top1.value_or(0), *row.val_top1);
    score.images_per_second = train::number_in(line, "images_per_second").value_or(0);
    report.epochs.push_back(row);
  }
  std::string test = "–";
  if (const std::optional<json> result = train::readable_object(folder / "result.json")) {
    score.images_per_second = train::number_in(*result, "images_per_second").value_or(score.images_per_second);
    const json measured = result->value("test", json::object());
    if (const std::optional<double> top1 = train::number_in(measured, "top1")) {
      score.test_top1 = top1;
      score.test_images = static_cast<std::int64_t>(train::number_in(measured, "images").value_or(0));
      test = number_text(*top1, "%.2f%%") + " on " + std::to_string(score.test_images) + " images";
    }
  } else {
    report.notes.push_back("This run has not finished: " + std::to_string(report.epochs.size()) + " of " +
                           std::to_string(task.options.epochs) + " epochs.");
  }
  const nn::Cost cost = nn::cost(task.model, task.model.img_size);
  score.parameters = cost.parameters;
  score.mask_parameters = cost.mask_parameters;
  report.facts = {
      {"model", "ViT, width " + std::to_string(task.model.embed_dim) + ", " + std::to_string(task.model.depth) +
                    " blocks, " + std::to_string(task.model.num_heads) + " heads, patches of " +
                    to_string(task.model.patch_size) + " pixels, images of " + short_text(task.preprocessing.size) +
                    " px"},
      {"parameters", number_text(static_cast<double>(cost.parameters) / 1e6, "%.2f million") + ", of the mask " +
                         std::to_string(cost.mask_parameters)},
      {"mask", mask_text(task.model.violin)},
      {"data", task.data.filename().string() + ", " + std::to_string(task.classes.size()) + " classes"},
      {"started from", task.weights.empty() ? "scratch" : task.weights.filename().string()},
      {"recipe", task.options.recipe + ", " + counted(task.options.epochs, "epoch") + ", batch " +
                     std::to_string(task.options.batch_size) + ", learning rate " +
                     number_text(task.options.peak_lr(), "%.3g") + ", seed " + std::to_string(task.options.seed)},
      {"validation top-1", score.val_top1 ? number_text(*score.val_top1, "%.2f%%") + " in the best epoch" : "–"},
      {"test top-1", test},
      {"speed", number_text(score.images_per_second, "%.0f training images/s")}};
  // Of several runs these say what else than options may differ.
  if (many) {
    report.options.emplace_back(
        "data", task.data.filename().string() + (seen.dataset ? ", images " + seen.all : ", which are gone"));
    report.options.emplace_back("weights", task.weights.empty() ? "none" : task.weights.string());
    if (!seen.dataset) report.notes.push_back("Its images are told from others by their path alone: " + seen.problem);
  }
  add_options(report, "", config.at("options"));
  add_options(report, "model.", config.at("model"));

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
      chart.title = many ? score.name : "Decay by layer, head and curve";
      report.decay = std::move(chart);
      report.means = means_of(*loaded.model);
      if (report.means) report.masks = masks_of(*loaded.model, *report.means);
    }
    if (task.model.global_pool == "token" && task.model.violin && !task.model.violin->learned_prefix_decay)
      report.notes.push_back(
          "Only the class token is read, whose mask is 1: the decay of the last block has no influence and stayed as "
          "it began.");
  }
  if (options.no_images) return report;
  const auto without_predictions = [&](const std::string& reason) {
    note((many ? score.name + ": " : "") + "no predictions: " + reason);
    report.notes.push_back("No predictions: " + reason);
  };
  if (!seen.dataset) {
    without_predictions(seen.problem);
    return report;
  }
  try {
    const data::Dataset& dataset = *seen.dataset;
    // What training never saw, if there is any.
    const data::SampleSet& set = !dataset.test.empty()  ? dataset.test
                                 : !dataset.val.empty() ? dataset.val
                                                        : dataset.train;
    const std::string split = !dataset.test.empty() ? "test" : !dataset.val.empty() ? "val" : "train";
    add_predictions(report, *loaded.model, task, set, split, compute, options.batch, many ? kShown / 2 : kShown);
  } catch (const Error& error) {
    without_predictions(error.what());
  }
  return report;
}

ordered_json to_json(const viz::Spread& spread) {
  if (spread.count == 0) return nullptr;
  ordered_json object = {{"mean", spread.mean}, {"deviation", nullptr}, {"seeds", spread.count}};
  if (spread.deviation) object["deviation"] = *spread.deviation;
  return object;
}

ordered_json to_json(const std::vector<viz::RunScore>& runs, const std::vector<viz::RunGroup>& groups,
                     const fs::path& page, std::size_t bytes) {
  ordered_json list = ordered_json::array();
  for (const viz::RunGroup& group : groups) {
    ordered_json names = ordered_json::array();
    for (const std::size_t i : group.members) names.push_back(runs[i].name);
    list.push_back({{"name", group.name},
                    {"runs", names},
                    {"seeds", group.seeds},
                    {"test_top1", to_json(group.test)},
                    {"val_top1", to_json(group.val)},
                    {"reference", group.reference},
                    {"difference", to_json(group.difference)},
                    {"other_images", group.other_images},
                    {"parameters", group.parameters},
                    {"mask_parameters", group.mask_parameters},
                    {"images_per_second", group.images_per_second}});
  }
  return {{"report", page.string()}, {"bytes", bytes}, {"groups", list}};
}

// The table of the page, as text.
std::string summary(const std::vector<viz::RunScore>& runs, const std::vector<viz::RunGroup>& groups) {
  const auto reference = std::find_if(groups.begin(), groups.end(), [](const auto& group) { return group.reference; });
  std::vector<std::vector<std::string>> rows = {{"runs", "seeds", "test top-1 %",
                                                 "against " + printable(reference->name), "val top-1 %", "parameters",
                                                 "images/s"}};
  for (const viz::RunGroup& group : groups)
    rows.push_back({printable(group.name), std::to_string(group.seeds), viz::to_string(group.test),
                    group.reference ? "" : viz::to_string(group.difference, true), viz::to_string(group.val),
                    std::to_string(group.parameters), number_text(group.images_per_second, "%.0f")});
  std::string text = viz::table(rows);
  for (const viz::RunGroup& group : groups)
    if (!group.reference) text += printable(viz::verdict(group, *reference, runs.front().test_images)) + "\n";
  return text;
}

// Each folder once.
std::vector<std::string> different_runs(const std::vector<std::string>& given) {
  std::vector<std::string> runs;
  std::set<fs::path> seen;
  for (const std::string& run : given) {
    if (seen.insert(fs::weakly_canonical(fs::path(run) / "config.json")).second) {
      runs.push_back(run);
    } else {
      note("'" + run + "' is given twice and counts once");
    }
  }
  return runs;
}

// What keeps runs from being compared as they seem to be.
std::vector<std::string> warnings(const std::vector<viz::RunScore>& runs, const std::vector<viz::RunGroup>& groups) {
  std::vector<std::string> lines;
  for (const viz::RunGroup& group : groups) {
    if (group.seeds < group.members.size())
      lines.push_back(group.name + ": " + std::to_string(group.members.size()) + " runs have " +
                      std::to_string(group.seeds) + (group.seeds == 1 ? " seed" : " different seeds") +
                      "; runs with the same seed count as one, with their mean.");
    const auto reference = std::find_if(groups.begin(), groups.end(), [](const auto& each) { return each.reference; });
    if (group.other_images) lines.push_back(viz::verdict(group, *reference, runs.front().test_images));
  }
  return lines;
}

void write_report(const Options& options) {
  if (options.batch < 1) throw Usage("--batch must be at least 1");
  const Compute compute = start_compute(options.compute);
  const std::vector<std::string> runs = different_runs(options.runs);
  check_output("--out", options.out, runs);
  viz::Report page;
  const bool many = runs.size() > 1;
  std::map<fs::path, std::string> known_data;
  for (const std::string& run : runs) page.runs.push_back(collect(run, options, compute, many, known_data));
  // Names tell runs apart, also when folders share theirs.
  for (std::size_t i = 0; i < page.runs.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (page.runs[i].score.name == page.runs[j].score.name) page.runs[i].score.name = runs[i];
  page.title = many ? std::to_string(runs.size()) + " runs" : page.runs.front().score.name;
  page.footer = std::string("Written by violin ") + version() + ".";
  std::set<std::string> drawn;
  for (const std::string& run : runs) {
    const nn::ModelConfig model = train::task_from_json(train::read_json_file(fs::path(run) / "config.json")).model;
    const Size grid = model.grid();
    if (!model.violin || model.violin->curves.empty() || grid.height * grid.width > kMaxGalleryPatches) continue;
    if (drawn.size() == kMaxGalleries || !drawn.insert(model.violin->curves + to_string(grid)).second) continue;
    page.curves.push_back(viz::curve_gallery(curves::parse_curves(model.violin->curves), {0, grid.height, grid.width}));
  }
  const fs::path out = !options.out.empty() ? fs::path(options.out)
                       : many               ? fs::path("report.html")
                                            : fs::path(runs.front()) / "report.html";
  std::vector<viz::RunScore> scores;
  scores.reserve(page.runs.size());
  for (const viz::RunReport& run : page.runs) scores.push_back(run.score);
  const std::vector<viz::RunGroup> groups = viz::compare(scores);
  page.notes = warnings(scores, groups);
  for (const std::string& line : page.notes) note(line);
  const std::string html = viz::report_html(page);
  write_file_atomically(out, html);
  if (options.json) {
    print(nn::json_text(to_json(scores, groups, out, html.size()), 2) + "\n");
  } else {
    print((many ? summary(scores, groups) + "\n" : "") + printable(out.string()) + "\n");
  }
}

}  // namespace

void add_report(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("report", "Write a page about a run, or about several side by side");
  verb->group("Verbs");
  const auto options = std::make_shared<Options>();
  verb->add_option("runs", options->runs, "Folders of runs")->required()->type_name("RUN…");
  verb->add_option("--out", options->out, "The page (default: report.html in the run; for several, here)")
      ->type_name("FILE");
  CLI::Option* batch =
      verb->add_option("--batch", options->batch, "Images per forward pass (default 64)")->type_name("N");
  verb->add_flag("--no-images", options->no_images, "Leave predictions out")->excludes(batch);
  verb->add_flag("--json", options->json, "Print what was measured as JSON");
  add_compute_options(*verb, options->compute, Draws::kNone);
  verb->footer(R"(Examples:
  violin report runs/photos
  violin report runs/violin-1 runs/violin-2 runs/vanilla-1 runs/vanilla-2 --out compare.html)");
  verb->callback([options] { write_report(*options); });
}

}  // namespace violin::cli
