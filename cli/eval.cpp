// violin eval: accuracy of weights on labelled images.

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "cli/common.h"
#include "cli/compute.h"
#include "cli/progress.h"
#include "cli/weights.h"
#include "violin/data/csv.h"
#include "violin/nn/json_text.h"
#include "violin/number_text.h"
#include "violin/train/evaluate.h"
#include "violin/train/predictions.h"
#include "violin/train/run_folder.h"
#include "violin/train/task.h"

namespace violin::cli {
namespace {

namespace fs = std::filesystem;
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

// The run that weights belong to: those of its folder, of its best/ or last/, or a file in one of these.
std::optional<train::Task> run_of(const fs::path& weights) {
  fs::path folder = fs::absolute(weights).lexically_normal();
  if (folder.filename().empty() || !fs::is_directory(folder)) folder = folder.parent_path();
  if (!train::is_run_folder(folder)) {
    if (folder.filename() != "best" && folder.filename() != "last") return std::nullopt;
    folder = folder.parent_path();
    if (!train::is_run_folder(folder)) return std::nullopt;
  }
  return train::task_from_json(train::read_json_file(folder / "config.json"));
}

// The run's own images with the split that it made. Nothing for other images.
std::optional<data::Dataset> data_of(train::Task run, const fs::path& data) {
  run.data = data;
  try {
    return train::open_task_data(run);
  } catch (const Error&) {
    return std::nullopt;
  }
}

struct Evaluated {
  data::SampleSet set;
  std::string split;
  std::vector<std::string> classes;
};

Evaluated chosen_split(const data::Dataset& dataset, const std::string& name, bool of_run) {
  if (name.empty() && !of_run) return {dataset.evaluated(), dataset.evaluated_name(), dataset.classes};
  // A run's val is what it held out, also of one folder of classes.
  const std::string split = !name.empty()           ? name
                            : !dataset.test.empty() ? "test"
                            : !dataset.val.empty()  ? "val"
                                                    : "train";
  const data::SampleSet* set = split == "train" ? &dataset.train : split == "val" ? &dataset.val : &dataset.test;
  if (set->empty())
    throw Error("the data have no images in the split '" + split + "'; without --split all that there are count");
  return {*set, split, dataset.classes};
}

// Where an image lies, and, for copies elsewhere, what its folder and itself are called.
std::pair<std::string, std::int64_t> place_of(const data::Sample& sample) {
  return {fs::absolute(sample.path).lexically_normal().string(), sample.record};
}
std::pair<std::string, std::int64_t> name_of(const data::Sample& sample) {
  const fs::path path(sample.path);
  return {(path.parent_path().filename() / path.filename()).string(), sample.record};
}

template <class Key>
std::int64_t count_common(const data::SampleSet& set, const data::SampleSet& other, const Key& key) {
  std::set<std::pair<std::string, std::int64_t>> keys;
  for (const data::Sample& sample : other.samples()) keys.insert(key(sample));
  return std::ranges::count_if(set.samples(), [&](const data::Sample& sample) { return keys.contains(key(sample)); });
}

// Only a run knows what it held out. Elsewhere nothing is: a share of images that weights may have been trained on
// would look like validation images.
Evaluated open_images(const Options& options) {
  const std::optional<train::Task> run = run_of(options.weights);
  std::optional<data::Dataset> own = run ? data_of(*run, options.data) : std::nullopt;
  const data::Dataset dataset = own ? *own : data::open_dataset(options.data, {.held_out = 0});
  for (const std::string& line : dataset.notes) note(line);
  Evaluated evaluated = chosen_split(dataset, options.split, own.has_value());
  if (!run) return evaluated;
  const bool others = !own;
  if (others) {
    own = data_of(*run, run->data);
    note("the images in '" + options.data + "' are not those of the run: nothing is held out of them" +
         (own ? "" : ", and whether it was trained on some of them cannot be told"));
  }
  if (!own) return evaluated;
  const std::string of_these = " of these " + std::to_string(evaluated.set.size()) + " images";
  if (const auto trained = count_common(evaluated.set, own->train, place_of); trained > 0) {
    note("the run was trained on " + std::to_string(trained) + of_these + ": this is not its accuracy on new ones");
  } else if (const auto alike = others ? count_common(evaluated.set, own->train, name_of) : 0; alike > 0) {
    note(std::to_string(alike) + of_these + " have the names of images that the run was trained on: if they are " +
         "copies, this is not its accuracy on new ones");
  }
  return evaluated;
}

struct Resolution {
  Size size;
  bool one_number = true;  // "144" rather than "144x192"
};

// "144,192x256"
std::vector<Resolution> parse_resolutions(const std::string& text) {
  std::vector<Resolution> list;
  for (std::string_view left = text; !text.empty();) {
    const std::string_view item = left.substr(0, left.find(','));
    const std::optional<Size> size = violin::parse_size(item);
    if (!size || size->shorter() < 1 || size->longer() > data::kLargestSize)
      throw Usage("--resolutions '" + text + "': '" + std::string(item) + "' is not N or HxW, with sides from 1 to " +
                  std::to_string(data::kLargestSize) + " pixels");
    list.push_back({*size, item.find('x') == std::string_view::npos});
    if (item.size() == left.size()) break;
    left.remove_prefix(item.size() + 1);
  }
  return list;
}

// Sizes that the model takes. One number means a square, which for a rectangular model is hardly meant: there both
// sides are asked for, and the answer names those with the model's proportions.
void check_resolutions(const std::string& text, const std::vector<Resolution>& list, const nn::ModelConfig& model) {
  const Size patch = model.patch_size, own = model.img_size;
  for (const auto& [size, one_number] : list) {
    if (size.height < patch.height || size.width < patch.width)
      throw Usage("--resolutions '" + text + "': " + short_text(size) + " is less than a patch of the model, " +
                  to_string(patch));
    const Size seen = {size.height / patch.height * patch.height, size.width / patch.width * patch.width};
    if (size != seen)
      note("of " + short_text(size) + " pixels " + short_text(seen) + " are whole patches of " + to_string(patch) +
           "; the rest is not seen");
    if (own.is_square() || !one_number) continue;
    const auto scaled = [&, shorter = size.height](std::int64_t side, std::int64_t step) {
      const double wanted = static_cast<double>(side * shorter) / static_cast<double>(own.shorter());
      return std::max<std::int64_t>(std::llround(wanted / static_cast<double>(step)), 1) * step;
    };
    throw Usage("--resolutions '" + text + "': the model takes images of " + to_string(own) + ", so say both sides: " +
                to_string(Size{scaled(own.height, patch.height), scaled(own.width, patch.width)}) + " instead of " +
                short_text(size));
  }
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
  // A mistake here must not cost an evaluation.
  std::vector<Resolution> resolutions = parse_resolutions(options.resolutions);
  if (!options.split.empty() && options.split != "train" && options.split != "val" && options.split != "test")
    throw Usage("--split '" + options.split + "': expected train, val or test");
  for (const auto& [option, path] :
       {std::pair{"--confusion", options.confusion}, {"--predictions", options.predictions}})
    check_output(option, path, {options.weights, options.against, options.data});
  check_different("--predictions", options.predictions, "--confusion", options.confusion);
  std::vector<train::Prediction> other;
  if (!options.against.empty()) other = train::read_predictions(options.against);
  const Compute compute = start_compute(options.compute);
  train::EvaluateOptions settings;
  settings.on_bad_image = argument("--on-bad-image", [&] { return data::parse_on_bad_image(options.on_bad_image); });
  settings.batch_size = options.batch;
  settings.batch_option = "--batch";
  settings.workers = compute.workers;
  settings.device = compute.device;
  settings.precision = compute.precision;

  const checkpoint::LoadedModel loaded = load_weights(options.weights, options.model, compute.device);
  check_resolutions(options.resolutions, resolutions, loaded.model->config());
  if (resolutions.empty()) resolutions.push_back({loaded.preprocessing.size});
  const std::int64_t outputs = loaded.model->config().num_classes;
  if (outputs == 0)
    throw Error("'" + options.weights + "' has no classifier; train one with violin finetune --recipe head");
  const auto [set, split, labels] = open_images(options);
  settings.columns = train::match_classes(loaded.classes, labels);
  if (loaded.classes.empty() && outputs != static_cast<std::int64_t>(labels.size())) {
    throw Error("'" + options.weights + "' has " + std::to_string(outputs) +
                " classes without names, the images have " + std::to_string(labels.size()) +
                "; convert the weights with --classes to name them");
  }
  std::vector<std::string> names = loaded.classes.empty() ? labels : loaded.classes;

  ordered_json rows = ordered_json::array();
  std::string text;
  train::Evaluation own;
  for (const auto& [size, one_number] : resolutions) {
    const bool first = rows.empty();
    const data::EvalOptions preprocessing = data::at_size(loaded.preprocessing, size);
    Progress progress("eval " + short_text(size) + " px", set.size(), "images");
    settings.progress = [&](std::int64_t images) { progress.advance(images); };
    const bool keep = first && !(options.predictions.empty() && options.against.empty());
    train::Evaluation evaluation = train::evaluate(*loaded.model, set, preprocessing, settings, keep);
    progress.finish();
    const train::Metrics& metrics = evaluation.metrics;
    if (metrics.images == 0) throw Error("none of the images could be read: " + evaluation.bad_images.front().message);
    rows.push_back({{"resolution", nn::to_json(size)},
                    {"images", metrics.images},
                    {"top1", metrics.top1},
                    {"top5", metrics.top5},
                    {"loss", metrics.loss},
                    {"images_per_second", metrics.images_per_second()}});
    std::array<char, 160> line{};
    std::snprintf(line.data(), line.size(),
                  "%s, %lld images, %s px: top-1 %.2f%%, top-5 %.2f%%, loss %.4f, %.0f images/s\n", split.c_str(),
                  static_cast<long long>(metrics.images), short_text(size).c_str(), metrics.top1, metrics.top5,
                  metrics.loss, metrics.images_per_second());
    text += line.data();
    if (first) own = std::move(evaluation);
  }
  note_skipped(own.bad_images);
  const train::Metrics& metrics = own.metrics;
  ordered_json classes = ordered_json::array();
  for (std::size_t label = 0; label < metrics.confusion.size(); ++label) {
    std::int64_t count = 0;
    for (const std::int64_t cell : metrics.confusion[label]) count += cell;
    if (count == 0) continue;
    const double top1 = 100.0 * static_cast<double>(metrics.confusion[label][label]) / static_cast<double>(count);
    classes.push_back({{"name", names[label]}, {"images", count}, {"top1", top1}});
    if (options.per_class)
      text +=
          "  " + number_text(top1, "%.2f%%") + "  " + printable(names[label]) + " (" + std::to_string(count) + ")\n";
  }
  const std::string at = resolutions.size() > 1 ? " (at " + short_text(resolutions.front().size) + " px)" : "";
  for (const std::string& path : {options.confusion, options.predictions})
    if (!path.empty() && !at.empty()) note("'" + path + "' is of the first size" + at);
  if (!options.confusion.empty()) write_confusion(options.confusion, names, metrics);
  const std::vector<train::Prediction> predictions = train::predictions(own, set, names, settings.columns);
  if (!options.predictions.empty()) write_file_atomically(options.predictions, train::to_csv(predictions));
  std::optional<train::Comparison> comparison;
  if (!options.against.empty()) {
    try {
      comparison = train::compare(predictions, other);
    } catch (const Error&) {
      if (!options.json) print(text);  // what was measured stands
      throw;
    }
    text += "against '" + printable(options.against) + "'" + at + ": both right " + std::to_string(comparison->both) +
            ", only this " + std::to_string(comparison->only_first) + ", only the other " +
            std::to_string(comparison->only_second) + ", neither " + std::to_string(comparison->neither) +
            "; McNemar's p " + number_text(comparison->p, "%.3g") + "\n";
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
  if (!options.resolutions.empty()) object["resolutions"] = rows;
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
  print(nn::json_text(object, 2) + "\n");
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
  verb->add_option("--split", options->split,
                   "train, val or test, of a run as it was split (default: test, else val, else all)")
      ->type_name("NAME");
  verb->add_option("--batch", options->batch, "Images per forward pass (default 64)")->type_name("N");
  verb->add_option("--resolutions", options->resolutions,
                   "Evaluate at these sizes in pixels, N or HxW; N is a square, and weights for rectangles want HxW")
      ->type_name("144,192x256,…");
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
