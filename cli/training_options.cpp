// The options of the training verbs, as the command line takes them.
#include <algorithm>
#include <charconv>

#include "cli/common.h"
#include "cli/training.h"
#include "violin/nn/json_text.h"

namespace violin::cli {

std::string option_name(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

void add_training_options(CLI::App& verb, const std::shared_ptr<TrainingArguments>& a, bool needs_weights) {
  verb.add_option("--data", a->data,
                  "Folder of images (train/CLASS/…, val/CLASS/…, or CLASS/…), CIFAR files or a manifest")
      ->type_name("PATH")
      ->group("Run");
  verb.add_option("--out", a->out, "Folder of the run (default: runs/VERB-1, or the next number that is free)")
      ->type_name("DIR")
      ->group("Run");
  verb.add_option("--resume", a->resume_folder, "Continue the run in --out, or in the folder given here")
      ->type_name("[DIR]")
      ->expected(0, 1)
      ->group("Run");
  verb.add_flag("--force", a->force, "Replace the run that is in the folder")->group("Run");
  verb.add_option("--recipe", a->recipe, "Defaults of the options below: deit, finetune, vtab, lora, dora, head, mask")
      ->type_name("NAME")
      ->group("Run");
  verb.add_option("--options", a->options_file, "JSON file with options, under their names with _ for -")
      ->type_name("FILE")
      ->group("Run");
  verb.add_flag("--json", a->json, "Print the result as JSON")->group("Run");

  verb.add_option("--weights", a->weights, "Weights to start from: a file or the folder of a run")
      ->type_name("PATH")
      ->group("Model");
  verb.add_option("--model", a->model,
                  needs_weights ? "Name of the weights' model, where they do not say"
                                : "Name of a model; violin models lists them")
      ->type_name("NAME")
      ->group("Model");
  verb.add_option("--config", a->model_file, "JSON file that describes the model")->type_name("FILE")->group("Model");
  verb.add_option("--branch", a->branch, "Of a weights file with several (teacher, student, ema)")
      ->type_name("NAME")
      ->group("Model");

  CLI::Option* plug = verb.add_flag_callback(
                              "--violin", [a] { a->violin = true; }, "Plug a mask in (default for finetune)")
                          ->group("Mask");
  verb.add_flag_callback(
          "--no-violin", [a] { a->violin = false; }, "Train without a mask")
      ->excludes(plug)
      ->group("Mask");
  verb.add_option("--curves", a->curves, "Set or comma-separated list of curves; none: alpha alone")->group("Mask");
  verb.add_option("--strategy", a->strategy, "mul_v1, mul_v2, add_v1, mul_after_sm, add_after_sm or log")
      ->group("Mask");
  verb.add_option("--init", a->init, "pretrain, finetune, none, spread or identity")->group("Mask");
  verb.add_option("--parameterisation", a->parameterisation, "sigmoid or rate")->group("Mask");
  verb.add_option("--decay", a->decay, "learned, or a fixed gamma")->group("Mask");
  verb.add_flag("--no-alpha", a->no_alpha, "Without the factor of the mask")->group("Mask");
  verb.add_flag("--curve-weights", a->curve_weights, "Learn the weights of the curves")->group("Mask");
  verb.add_flag("--prefix-decay", a->prefix_decay, "Learn the decay of class token and registers")->group("Mask");
  verb.add_flag("--decay-per-axis", a->decay_per_axis, "Manhattan: a decay per row and per column")->group("Mask");
  verb.add_option("--mask-blocks", a->blocks, "Blocks that have a mask (default: all)")
      ->type_name("0,1,…")
      ->group("Mask");
  verb.add_option("--mask-heads", a->heads, "Heads that have one (default: all)")->type_name("0,1,…")->group("Mask");

  add_compute_options(verb, a->compute);
  train::Options defaults;
  train::visit_options(defaults, [&](const std::string& name, auto& field, const char* group, const char* help) {
    using Field = std::decay_t<decltype(field)>;
    if (name == "seed" || name == "precision") return;  // among the options of all verbs that compute
    const std::string option = option_name(name);
    if constexpr (std::is_same_v<Field, bool>) {
      verb.add_flag_callback(option, [a, name] { a->given[name] = true; }, help)->group(group);
    } else if constexpr (std::is_same_v<Field, std::optional<double>>) {
      verb.add_option_function<std::string>(
              option,
              [a, name](const std::string& text) {
                if (text == "auto") {
                  a->search_lr = true;
                  return;
                }
                double value = 0;
                const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
                if (error != std::errc() || end != text.data() + text.size())
                  throw Usage(option_name(name) + " '" + text + "': expected a number or auto");
                a->given[name] = value;
              },
              std::string(help) + "; auto: try five rates on a fifth of the images")
          ->type_name("RATE")
          ->group(group);
    } else if constexpr (std::is_same_v<Field, Size>) {
      verb.add_option_function<std::string>(
              option,
              [a, name](const std::string& text) {
                const std::optional<Size> size = violin::parse_size(text);
                if (!size) throw Usage(option_name(name) + " '" + text + "': expected N or HxW, in pixels");
                a->given[name] = nn::to_json(*size);
              },
              help)
          ->type_name("SIZE")
          ->group(group);
    } else {
      verb.add_option_function<Field>(
              option, [a, name](const Field& value) { a->given[name] = value; }, help)
          ->type_name(std::is_same_v<Field, std::string> ? "TEXT" : "N")
          ->group(group);
    }
  });
}

}  // namespace violin::cli
