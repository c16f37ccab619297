// violin eval: accuracy of weights on labelled images.

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/common.h"
#include "cli/compute.h"
#include "cli/progress.h"
#include "cli/weights.h"
#include "violin/data/csv.h"
#include "violin/number_text.h"
#include "violin/train/evaluate.h"
#include "violin/train/predictions.h"

namespace violin::cli {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::string weights;
  std::string data;
  std::string split;
  std::int64_t batch = 64;
  std::string resolutions;
  bool per_class = false;
  std::string confusion, predictions, against;
  std::string on_bad_image = "skip";
  WeightsOptions model;
  ComputeOptions compute;
  bool json = false;
};

data::SampleSet chosen_split(const data::Dataset& dataset, const std::string& name, std::string& used) {
  used = name.empty() ? dataset.evaluated_name() : name;
  if (name.empty()) return dataset.evaluated();
  const data::SampleSet* set = name == "train"  ? &dataset.train
                               : name == "val"  ? &dataset.val
                               : name == "test" ? &dataset.test
                                                : nullptr;
  if (set == nullptr) throw Usage("--split '" + name + "': expected train, val or test");
  if (set->empty()) throw Error("the data have no images in the split '" + name + "'");
  return *set;
}

std::vector<std::int64_t> parse_resolutions(const std::string& text, std::int64_t own) {
  if (text.empty()) return {own};
  const std::vector<std::int64_t> sizes = parse_integers("--resolutions", text);
  for (const std::int64_t size : sizes)
    if (size < 1 || size > 8192) throw Usage("--resolutions '" + text + "': expected sizes from 1 to 8192 pixels");
  return sizes;
}

// One row per label: the counts of each prediction.
void write_confusion(const std::string& path, const std::vector<std::string>& names, const train::Metrics& metrics) {
  std::string csv = "label";
  for (const std::string& name : names) csv += "," + data::csv_field(name);
  csv += "\n";
  for (std::size_t label = 0; label < metrics.confusion.size(); ++label) {
    csv += data::csv_field(names[label]);
    for (const std::int64_t count : metrics.confusion[label]) csv += "," + std::to_string(count);
    csv += "\n";
  }
  write_file_atomically(path, csv);
}

void evaluate_weights(const Options& options) {
  if (options.data.empty()) throw Usage("--data is missing: the folder with the images");
  if (options.batch < 1) throw Usage("--batch must be at least 1");
  // Read first: a mistake here must not cost an evaluation.
  std::vector<train::Prediction> other;
  if (!options.against.empty()) other = train::read_predictions(options.against);
  const Compute compute = start_compute(options.compute);
  train::EvaluateOptions settings;
  settings.on_bad_image = argument("--on-bad-image", [&] { return data::parse_on_bad_image(options.on_bad_image); });
  settings.batch_size = options.batch;
  settings.workers = compute.workers;
  settings.device = compute.device;
  settings.precision = compute.precision;

  checkpoint::LoadOptions load = load_options(options.model);
  load.device = compute.device;
  checkpoint::LoadedModel loaded = checkpoint::load_model(options.weights, load);
  const std::int64_t outputs = loaded.model->config().num_classes;
  if (outputs == 0)
    throw Error("'" + options.weights + "' has no classifier; train one with violin finetune --recipe head");
  const data::Dataset dataset = data::open_dataset(options.data);
  std::string split;
  const data::SampleSet set = chosen_split(dataset, options.split, split);
  settings.columns = train::match_classes(loaded.classes, dataset.classes);
  if (loaded.classes.empty() && outputs != static_cast<std::int64_t>(dataset.classes.size())) {
    throw Error("'" + options.weights + "' has " + std::to_string(outputs) +
                " classes without names, the images have " + std::to_string(dataset.classes.size()) +
                "; convert the weights with --classes to name them");
  }
  std::vector<std::string> names = loaded.classes.empty() ? dataset.classes : loaded.classes;

  ordered_json rows = ordered_json::array();
  std::string text;
  train::Evaluation own;
  const std::vector<std::int64_t> sizes = parse_resolutions(options.resolutions, loaded.preprocessing.size);
  for (const std::int64_t size : sizes) {
    data::EvalOptions preprocessing = loaded.preprocessing;
    preprocessing.size = size;
    Progress progress("eval " + std::to_string(size) + " px", set.size(), "images");
    settings.progress = [&](std::int64_t images) { progress.advance(images); };
    const bool keep = size == sizes.front() && !(options.predictions.empty() && options.against.empty());
    train::Evaluation evaluation = train::evaluate(*loaded.model, set, preprocessing, settings, keep);
    progress.finish();
    const train::Metrics& metrics = evaluation.metrics;
    if (metrics.images == 0) throw Error("none of the images could be read: " + evaluation.bad_images.front().message);
    rows.push_back({{"resolution", size},
                    {"images", metrics.images},
                    {"top1", metrics.top1},
                    {"top5", metrics.top5},
                    {"loss", metrics.loss},
                    {"images_per_second", metrics.images_per_second()}});
    std::array<char, 160> line{};
    std::snprintf(line.data(), line.size(),
                  "%s, %lld images, %lld px: top-1 %.2f%%, top-5 %.2f%%, loss %.4f, %.0f images/s\n", split.c_str(),
                  static_cast<long long>(metrics.images), static_cast<long long>(size), metrics.top1, metrics.top5,
                  metrics.loss, metrics.images_per_second());
    text += line.data();
    if (size == sizes.front()) own = std::move(evaluation);
  }
  for (const data::BadImage& bad : own.bad_images) note("skipped a bad image: " + bad.message);
  const train::Metrics& metrics = own.metrics;
  ordered_json classes = ordered_json::array();
  for (std::size_t label = 0; label < metrics.confusion.size(); ++label) {
    std::int64_t count = 0;
    for (const std::int64_t cell : metrics.confusion[label]) count += cell;
    if (count == 0) continue;
    const double top1 = 100.0 * static_cast<double>(metrics.confusion[label][label]) / static_cast<double>(count);
    classes.push_back({{"name", names[label]}, {"images", count}, {"top1", top1}});
    if (options.per_class)
      text += "  " + number_text(top1, "%.2f%%") + "  " + names[label] + " (" + std::to_string(count) + ")\n";
  }
  if (!options.confusion.empty()) write_confusion(options.confusion, names, metrics);
  const std::vector<train::Prediction> predictions = train::predictions(own, set, names, settings.columns);
  if (!options.predictions.empty()) write_file_atomically(options.predictions, train::to_csv(predictions));
  std::optional<train::Comparison> comparison;
  if (!options.against.empty()) {
    comparison = train::compare(predictions, other);
    text += "against '" + options.against + "': both right " + std::to_string(comparison->both) + ", only this " +
            std::to_string(comparison->only_first) + ", only the other " + std::to_string(comparison->only_second) +
            ", neither " + std::to_string(comparison->neither) + "; McNemar's p " + number_text(comparison->p, "%.3g") +
            "\n";
  }
  if (!options.json) {
    print(text);
    return;
  }
  ordered_json object = {{"images", metrics.images},
                         {"top1", metrics.top1},
                         {"top5", metrics.top5},
                         {"loss", metrics.loss},
                         {"images_per_second", metrics.images_per_second()},
                         {"split", split},
                         {"skipped", own.bad_images.size()}};
  if (sizes.size() > 1) object["resolutions"] = rows;
  if (options.per_class) object["classes"] = classes;
  if (!options.confusion.empty()) object["confusion"] = metrics.confusion;
  if (comparison) {
    object["against"] = {{"file", options.against},
                         {"both_right", comparison->both},
                         {"only_this_right", comparison->only_first},
                         {"only_other_right", comparison->only_second},
                         {"neither_right", comparison->neither},
                         {"mcnemar_p", comparison->p}};
  }
  print(object.dump(2) + "\n");
}

}  // namespace

void add_eval(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("eval", "Accuracy of weights on labelled images");
  verb->group("Verbs");
  const auto options = std::make_shared<Options>();
  verb->add_option("weights", options->weights, "Weights file or folder of a run")
      ->required()
      ->type_name("RUN_OR_WEIGHTS");
  verb->add_option("--data", options->data, "Folder of images, CIFAR files or a manifest")->type_name("PATH");
  verb->add_option("--split", options->split, "train, val or test (default: test, else val, else all)")
      ->type_name("NAME");
  verb->add_option("--batch", options->batch, "Images per forward pass (default 64)")->type_name("N");
  verb->add_option("--resolutions", options->resolutions, "Evaluate at these sizes in pixels")->type_name("144,224,…");
  verb->add_flag("--per-class", options->per_class, "Accuracy of every class");
  verb->add_option("--confusion", options->confusion, "Write the confusion matrix as CSV")->type_name("FILE");
  verb->add_option("--predictions", options->predictions, "Write what the model says about each image as CSV")
      ->type_name("FILE");
  verb->add_option("--against", options->against,
                   "Predictions of another model on the same images: who is right where, and McNemar's test")
      ->type_name("FILE");
  verb->add_option("--on-bad-image", options->on_bad_image, "skip (name and count it) or fatal")->type_name("WHAT");
  verb->add_flag("--json", options->json, "Print JSON");
  add_weights_options(*verb, options->model);
  add_compute_options(*verb, options->compute, Draws::kNone);
  verb->footer(R"(Examples:
  violin eval runs/photos --data photos
  violin eval deit_small.safetensors --data imagenet/val --resolutions 144,224,384 --json
  violin eval runs/vanilla --data photos --predictions vanilla.csv
  violin eval runs/violin --data photos --against vanilla.csv)");
  verb->callback([options] { evaluate_weights(*options); });
}

}  // namespace violin::cli
