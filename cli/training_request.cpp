#include "cli/training_request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/common.h"
#include "cli/weights.h"
#include "violin/train/run_folder.h"

namespace violin::cli {
namespace {

using nlohmann::json;

std::filesystem::path free_folder(const std::string& command) {
  for (int number = 1;; ++number) {
    const std::filesystem::path path = "runs/" + command + "-" + std::to_string(number);
    if (!std::filesystem::exists(path)) return path;
  }
}

void check_folder(const std::filesystem::path& folder, const std::string& data, const std::string& weights) {
  // Runs among the images would be classes the next time the data are read.
  if (lies_inside(folder, data))
    throw Error("the run's folder '" + folder.string() + "' lies inside of the data folder '" + data +
                "'; give one elsewhere with --out");
  if (!weights.empty() && lies_inside(weights, folder))
    throw Error("the weights '" + weights + "' lie in the run's folder '" + folder.string() +
                "' and would be replaced; give another with --out");
}

// The mask with the options that were given.
nn::MaskConfig with_options(nn::MaskConfig mask, const TrainingArguments& arguments) {
  if (arguments.init) mask.init = *arguments.init;
  if (arguments.curves) mask.curves = *arguments.curves == "none" ? "" : *arguments.curves;
  if (arguments.strategy) mask.strategy = *arguments.strategy;
  if (arguments.parameterisation) mask.parameterisation = *arguments.parameterisation;
  if (arguments.decay && *arguments.decay == "learned") mask.decay.reset();
  if (arguments.decay && *arguments.decay != "learned") {
    double value = 0;
    const std::string& text = *arguments.decay;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size())
      throw Usage("--decay '" + text + "': expected learned or a number above 0 and at most 1");
    mask.decay = value;
  }
  mask.alpha = mask.alpha && !arguments.no_alpha;
  mask.curve_weights = mask.curve_weights || arguments.curve_weights;
  mask.learned_prefix_decay = mask.learned_prefix_decay || arguments.prefix_decay;
  mask.decay_per_axis = mask.decay_per_axis || arguments.decay_per_axis;
  if (!arguments.blocks.empty()) mask.blocks = parse_integers("--mask-blocks", arguments.blocks);
  if (!arguments.heads.empty()) mask.heads = parse_integers("--mask-heads", arguments.heads);
  return mask;
}

// Of weights that have a mask only what is named changes, and where that is what they have, they keep it as it was
// trained. An initial value is one of a fresh mask.
std::optional<nn::MaskConfig> changed_mask(const nn::MaskConfig& own, const TrainingArguments& arguments,
                                           bool trained) {
  nn::MaskConfig wanted = with_options(own, arguments);
  nn::MaskConfig same = own;
  same.parameterisation = wanted.parameterisation;
  if (!arguments.init && wanted == same && wanted.uses_rate() == own.uses_rate()) return std::nullopt;
  if (trained) {
    wanted.init = arguments.init.value_or("identity");
    if (!arguments.parameterisation) wanted.parameterisation = "auto";
  }
  argument("", [&] { return nn::check(wanted), 0; });
  return wanted;
}

bool mask_options_given(const TrainingArguments& a) {
  return a.curves || a.strategy || a.init || a.parameterisation || a.decay || a.no_alpha || a.curve_weights ||
         a.prefix_decay || a.decay_per_axis || !a.blocks.empty() || !a.heads.empty();
}

void check_resumed(const CLI::App& verb, const TrainingArguments& arguments) {
  if (arguments.force) throw Usage("--resume and --force contradict each other");
  if (arguments.resume_folder.empty() && arguments.out.empty())
    throw Usage("--resume: say which run, as --resume DIR or with --out DIR");
  if (!arguments.resume_folder.empty() && !arguments.out.empty() && arguments.out != arguments.resume_folder)
    throw Usage("--resume '" + arguments.resume_folder + "' and --out '" + arguments.out +
                "' name two folders: give one");
  const bool named = std::ranges::any_of(
      std::array{"--recipe", "--model", "--config", "--options", "--weights", "--branch", "--seed", "--precision"},
      [&](const char* option) { return verb.get_option(option)->count() > 0; });
  if (named || !arguments.given.is_null() || arguments.search_lr || arguments.violin || mask_options_given(arguments))
    throw Usage(
        "--resume: a run keeps its options; only --device, --threads, --workers and, where the images were moved, "
        "--data may be given");
}

// The recipe's options, over them those of the file, over these the command line's.
train::Options options_of(const CLI::App& verb, const TrainingArguments& arguments, const json& from_file,
                          const std::string& default_recipe) {
  std::string recipe = arguments.recipe;
  if (recipe.empty() && from_file.contains("recipe") && from_file.at("recipe").is_string())
    recipe = from_file.at("recipe").get<std::string>();
  if (recipe.empty()) recipe = default_recipe;
  train::Options options;
  train::apply_recipe(recipe, options);
  train::merge_json(from_file, options);
  options.recipe = recipe;
  if (!arguments.given.is_null()) train::merge_json(arguments.given, options);
  if (verb.get_option("--seed")->count() > 0) options.seed = arguments.compute.seed;
  if (verb.get_option("--precision")->count() > 0) options.precision = arguments.compute.precision;
  return options;
}

// The mask that is asked for: `like` is the model of a run whose config.json is given as options.
void plan_mask(const TrainingArguments& arguments, const std::optional<nn::ModelConfig>& like,
               train::Request& request) {
  const bool any_option = mask_options_given(arguments), fine = !request.weights.empty();
  if (arguments.violin == false && any_option) throw Usage("--no-violin contradicts the options of the mask");
  if (arguments.violin.value_or(fine || any_option)) {
    nn::MaskConfig mask;
    mask.init = fine ? "identity" : "pretrain";
    request.mask = mask = with_options(mask, arguments);
    // Whether that goes with the initial values of a fresh mask shows when there is need of one.
    if (fine && !arguments.init) mask.parameterisation = "auto";
    argument("", [&] { return nn::check(mask), 0; });
  }
  request.unplug = arguments.violin == false;
  if (any_option) {
    request.change_mask = [arguments, fine](const auto& own) { return changed_mask(own, arguments, fine); };
  } else if (like && !arguments.violin) {
    request.mask = like->violin;
    request.unplug = !like->violin;
    if (like->violin)
      request.change_mask = [mask = like->violin](const auto& own) { return own == *mask ? std::nullopt : mask; };
  }
}

}  // namespace

TrainingPlan plan_training(const CLI::App& verb, const std::string& command, const TrainingArguments& arguments,
                           const std::string& default_recipe) {
  TrainingPlan plan{.command = command, .folder = arguments.out};
  plan.resuming = verb.get_option("--resume")->count() > 0;
  if (plan.resuming) {
    check_resumed(verb, arguments);
    if (!arguments.resume_folder.empty()) plan.folder = arguments.resume_folder;
    return plan;
  }
  if (arguments.data.empty()) throw Usage("--data is missing: the folder with the images");
  if (!arguments.model.empty() && !arguments.model_file.empty())
    throw Usage("--model and --config both say what the model is: give one");
  if (!arguments.branch.empty() && arguments.weights.empty())
    throw Usage("--branch is one of a weights file: add --weights");
  if (plan.folder.empty()) plan.folder = free_folder(command);
  check_folder(plan.folder, arguments.data, arguments.weights);

  train::Request& request = plan.request;
  request.command = command;
  request.data = arguments.data;
  request.weights = arguments.weights;
  request.model = arguments.model;
  request.branch = arguments.branch;
  if (!arguments.model_file.empty()) request.config = read_model_config(arguments.model_file);
  json from_file = json::object();
  if (!arguments.options_file.empty()) from_file = train::read_json_file(arguments.options_file);
  std::optional<nn::ModelConfig> like;
  if (train::is_run_config(from_file)) {
    like = train::task_from_json(from_file).model;
    from_file = json(from_file.at("options"));
  }
  plan.search_lr = arguments.search_lr;
  if (from_file.value("lr", json()) == "auto") {
    plan.search_lr = plan.search_lr || !arguments.given.contains("lr");
    from_file.erase("lr");
  }
  argument("", [&] { return request.options = options_of(verb, arguments, from_file, default_recipe), 0; });
  plan.precision_given = verb.get_option("--precision")->count() > 0 || from_file.contains("precision");
  for (const char* name : {"rank", "adapter_targets", "adapter_alpha"})
    if (arguments.given.contains(name) && request.options.adapter.empty())
      throw Usage(option_name(name) + " is one of adapters: add --recipe lora or --recipe dora");
  plan_mask(arguments, like, request);
  if (request.weights.empty() && request.model.empty() && !request.config) {
    if (!like) throw Usage("--model is missing: a name of violin models, or --config with a file that describes one");
    request.config = like;
    request.config->adapters.reset();  // options say which there will be
  }
  argument("", [&] { return train::check(request), 0; });
  return plan;
}

}  // namespace violin::cli
