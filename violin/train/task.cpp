#include "violin/train/task.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "violin/checkpoint/model_file.h"
#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/nn/registry.h"
#include "violin/train/schedule.h"
#include "violin/version.h"

namespace violin::train {
namespace {

using nlohmann::json;

constexpr std::int64_t kDeitRepeats = 3;
constexpr std::int64_t kImagesMeasured = 10000;  // more tell no more

data::EvalOptions fresh_preprocessing(const nn::ModelConfig& model, data::Layout layout) {
  data::EvalOptions result;
  result.size = model.img_size;
  const bool small = data::is_small(result.size);
  result.crop_pct = small || result.size.longer() >= 384 ? 1 : 0.9;
  if (layout == data::Layout::kCifar10) {
    result.normalisation = data::kCifar10Statistics;
  } else if (small) {
    result.normalisation = data::kCifar100Statistics;
  }
  return result;
}

nn::AdapterConfig adapters_of(const Options& options) {
  nn::AdapterConfig adapters;
  adapters.kind = options.adapter;
  adapters.alpha = options.adapter_alpha;
  for (const std::string& target : adapter_targets(options)) adapters.ranks[target] = options.rank;
  return adapters;
}

// A size that is asked for: what lies beyond its last whole patch would never be seen.
void check_whole_patches(const Size& size, const Size& patch) {
  const auto nearest = [](std::int64_t side, std::int64_t step) {
    return std::max<std::int64_t>((side + step / 2) / step, 1) * step;
  };
  const Size fitting = {nearest(size.height, patch.height), nearest(size.width, patch.width)};
  if (size != fitting)
    throw Error("option img_size is " + short_text(size) + "; expected whole patches of " + to_string(patch) +
                " pixels, as in " + short_text(fitting));
}

data::Dataset open_data(const std::filesystem::path& path, const Options& options) {
  data::DatasetOptions opened;
  opened.held_out = options.held_out;
  opened.seed = options.seed;
  data::Dataset dataset = data::open_dataset(path, opened);
  if (dataset.train.empty()) throw Error("'" + path.string() + "' has no training images");
  if (options.limit > 0 && options.limit < dataset.train.size()) {
    dataset.train = dataset.train.limited(options.limit, options.seed);
    dataset.notes.push_back("training on " + std::to_string(dataset.train.size()) + " images (limit)");
  }
  return dataset;
}

}  // namespace

nlohmann::ordered_json to_json(const Task& task) {
  return {{"violin", version()},
          {"torch", TORCH_VERSION},
          {"command", task.command},
          {"data", std::filesystem::absolute(task.data).lexically_normal().string()},
          {"fingerprint", task.fingerprint},
          {"weights", task.weights.empty() ? "" : std::filesystem::absolute(task.weights).lexically_normal().string()},
          {"branch", task.branch},
          {"threads", task.threads},
          {"processes", task.processes},
          {"options", to_json(task.options)},
          {"peak_lr", task.options.peak_lr()},
          {"model", nn::to_json(task.model)},
          {"preprocessing", checkpoint::to_json(task.preprocessing)},
          {"classes", task.classes}};
}

Task task_from_json(const json& object) {
  Task task;
  try {
    task.command = object.at("command").get<std::string>();
    task.data = object.at("data").get<std::string>();
    task.weights = object.at("weights").get<std::string>();
    task.branch = object.value("branch", "");
    task.threads = object.value("threads", 0);
    task.processes = object.value("processes", std::int64_t{1});
    task.fingerprint = object.at("fingerprint").get<std::string>();
    task.classes = object.at("classes").get<std::vector<std::string>>();
    merge_json(object.at("options"), task.options);
    task.model = nn::model_from_json(object.at("model"));
    task.preprocessing = checkpoint::preprocessing_from_json(object.at("preprocessing"));
  } catch (const json::exception&) {
    throw Error("config.json is not that of a run; was it changed by hand?");
  }
  check(task.options);
  if (task.threads < 0 || task.threads > kMostThreads)
    throw Error("config.json asks for " + std::to_string(task.threads) + " threads; was it changed by hand?");
  if (std::ssize(task.classes) != task.model.num_classes)
    throw Error("config.json names " + std::to_string(task.classes.size()) + " classes for a model with " +
                std::to_string(task.model.num_classes) + "; was it changed by hand?");
  return task;
}

namespace {

// Options of a mask that would have no effect.
void check_effects(const nn::MaskConfig& mask) {
  if (mask.curves.empty() && (mask.decay || mask.learned_prefix_decay))
    throw Error(std::string(mask.decay ? "a fixed decay" : "a learned prefix decay") +
                " has no effect on a mask without curves; leave it out, or give curves");
  if (!mask.decay_per_axis) return;
  const auto list = mask.curves.empty() ? std::vector<curves::Curve>{} : curves::parse_curves(mask.curves);
  const bool by_axis = std::any_of(list.begin(), list.end(),
                                   [](const curves::Curve& curve) { return curve.kind == curves::Kind::kManhattan; });
  if (!by_axis || mask.decay)
    throw Error("decay_per_axis has no effect but on learned decays of manhattan (--curves manhattan); leave it out");
}

// Before anything is written: a run whose images cannot be read must not take the place of another.
void check_readable(const data::SampleSet& set, const char* split) {
  std::string reason;
  for (std::int64_t i = 0; i < set.size(); ++i) {
    try {
      set.decode(i);
      return;
    } catch (const Error& error) {
      if (reason.empty()) reason = error.what();
    }
  }
  if (!set.empty())
    throw Error("none of the " + std::to_string(set.size()) + " images of " + split + " can be read: " + reason);
}

// The mask to begin with in place of `own`, or nothing where that stays.
std::optional<nn::MaskConfig> fresh_mask(const Request& request, const std::optional<nn::MaskConfig>& own) {
  if (request.unplug) return std::nullopt;
  if (!own) return request.mask;
  std::optional<nn::MaskConfig> changed;
  if (request.change_mask) changed = request.change_mask(*own);
  if (changed) check_effects(*changed);
  return changed;
}

std::string short_text(const nn::MaskConfig& mask) {
  return (mask.curves.empty() ? "no curves" : mask.curves) + ", " + mask.strategy;
}

}  // namespace

void check(const Request& request) {
  check(request.options);
  for (const auto& mask : {request.mask, request.config ? request.config->violin : std::nullopt})
    if (mask) check_effects(*mask);
}

Prepared prepare(const Request& request) {
  check(request);
  Prepared prepared;
  Task& task = prepared.task;
  task.command = request.command;
  task.data = request.data;
  task.weights = request.weights;
  task.branch = request.branch;
  task.options = request.options;
  task.processes = request.processes;
  if (task.options.repeats == 0) task.options.repeats = request.processes > 1 ? kDeitRepeats : 1;
  prepared.dataset = open_data(request.data, request.options);
  const data::Dataset& dataset = prepared.dataset;
  task.classes = dataset.classes;
  task.notes = dataset.notes;
  if (request.options.repeats == 0 && task.options.repeats > 1)
    task.notes.push_back(
        "repeated augmentation, as DeiT has it with several processes: an epoch meets a third of the images three "
        "times each; --repeats 1 for all of them once, as one process does");
  const auto classes = static_cast<std::int64_t>(dataset.classes.size());
  if (classes < 2) throw Error("'" + request.data.string() + "' has one class; a classifier needs at least two");
  check_readable(dataset.train, "train");
  check_readable(dataset.val, "val");
  const Options& options = request.options;

  if (request.weights.empty()) {
    if (request.model.empty() && !request.config) throw Error("no model was named; give one with --model or --config");
    nn::ModelConfig config = request.config ? *request.config : nn::find_model(request.model);
    config.num_classes = classes;
    if (config.distilled) throw Error("distilled models need a teacher, which is not offered; take the plain model");
    if (options.img_size != Size{}) config.img_size = options.img_size;
    if (const auto mask = fresh_mask(request, config.violin)) config.violin = mask;
    if (request.unplug) config.violin.reset();
    prepared.model = std::make_shared<nn::VisionTransformer>(config, options.seed);
    if (options.train_what != "all")
      task.notes.push_back("only a part of the weights is trained (" + options.train_what +
                           "), and the others are random: violin finetune --weights starts from trained ones");
    task.preprocessing = fresh_preprocessing(config, dataset.layout);
  } else {
    checkpoint::LoadOptions load;
    load.model = request.model;
    load.config = request.config;
    load.branch = request.branch;
    load.num_classes = classes;
    load.seed = options.seed;
    if (options.img_size != Size{}) load.img_size = options.img_size;
    checkpoint::LoadedModel loaded = checkpoint::load_model(request.weights, load);
    prepared.model = loaded.model;
    task.preprocessing = loaded.preprocessing;
    for (const auto& lines : {loaded.report.adapted, loaded.report.warnings()})
      task.notes.insert(task.notes.end(), lines.begin(), lines.end());
    // A head for as many, but other classes starts afresh as well.
    const bool same_classes = !loaded.classes.empty() && loaded.classes == dataset.classes;
    if (loaded.model->config().num_classes == classes && !loaded.classes.empty() && !same_classes) {
      prepared.model->replace_head(classes, options.seed);
      task.notes.push_back("the weights name other classes: a fresh head");
    }
    if (prepared.model->config().adapters) {
      prepared.model->merge_adapters();
      prepared.model->drop_adapters();
      task.notes.push_back("adapters of the weights were merged into them");
    }
    const std::optional<nn::MaskConfig> own = prepared.model->config().violin;
    if (own && request.unplug) {
      prepared.model->unplug();
      task.notes.push_back("the mask of the weights (" + short_text(*own) + ") is dropped");
    }
    if (const auto mask = fresh_mask(request, own)) {
      prepared.model->plug(*mask, options.seed);
      if (own)
        task.notes.push_back("the mask of the weights (" + short_text(*own) + ") is replaced by a fresh one (" +
                             short_text(*mask) + ")");
    }
  }
  nn::VisionTransformer& model = *prepared.model;
  if (model.config().in_chans != 3)
    throw Error("training takes images of 3 channels; the model's have " + std::to_string(model.config().in_chans));
  if (options.img_size != Size{}) check_whole_patches(options.img_size, model.config().patch_size);
  task.preprocessing = data::at_size(task.preprocessing, model.config().img_size);
  if (options.statistics == "data") {
    const data::Measurement measured =
        data::measure_statistics(dataset.train.limited(kImagesMeasured, options.seed), at::get_num_threads());
    task.preprocessing.normalisation = measured.normalisation;
    task.notes.push_back("statistics of " + std::to_string(measured.images) +
                         " training images: " + data::to_string(measured.normalisation));
  } else if (options.statistics != "auto") {
    task.preprocessing.normalisation = data::parse_statistics(options.statistics);
  }
  if (options.crop == "squash") {
    task.preprocessing.crop = data::EvalCrop::kSquash;
    task.preprocessing.crop_pct = 1;
  } else if (options.crop == "centre") {
    task.preprocessing.crop = data::EvalCrop::kCentre;  // whatever the weights were trained with
  }
  model.set_drop_path_rate(options.drop_path);
  model.set_drop_rate(options.drop);
  if (!options.adapter.empty()) model.adapt(adapters_of(options), options.seed);
  choose_trainable(model, options.train_what);
  model.train();
  task.model = model.config();
  task.fingerprint = dataset.fingerprint();
  return prepared;
}

data::Dataset open_task_data(const Task& task) {
  data::Dataset dataset = open_data(task.data, task.options);
  if (dataset.fingerprint() != task.fingerprint) {
    throw Error("the images in '" + task.data.string() +
                "' are not those that the run began with; put them back or begin a new run with --out");
  }
  return dataset;
}

data::TrainOptions train_transform(const Options& options, const data::EvalOptions& preprocessing, const Image& first) {
  data::TrainOptions result;
  result.size = preprocessing.size;
  result.normalisation = preprocessing.normalisation;
  result.interpolation = preprocessing.interpolation;
  std::string crop = options.crop;
  if (crop == "auto") {
    const bool as_it_is = Size{first.height, first.width} == result.size;
    crop = as_it_is && data::is_small(result.size) ? "padded" : "resized";
  }
  result.crop = crop == "padded"    ? data::TrainCrop::kPadded
                : crop == "resized" ? data::TrainCrop::kRandomResized
                : crop == "centre"  ? data::TrainCrop::kCentre
                                    : data::TrainCrop::kSquash;
  result.crop_pct = preprocessing.crop_pct;
  result.scale = {options.min_scale, 1.0};
  result.flip = options.flip;
  result.rand_augment = options.rand_augment == "none" ? "" : options.rand_augment;
  result.colour_jitter = options.colour_jitter;
  result.erase = options.erase;
  return result;
}

}  // namespace violin::train
