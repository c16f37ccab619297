// violin convert: any weights that can be read, as a safetensors file that says what it is.

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/weights.h"
#include "violin/nn/json_text.h"
#include "violin/text.h"

namespace violin::cli {
namespace {

struct Options {
  std::string in;
  std::string out;
  WeightsOptions weights;
  std::optional<std::int64_t> num_classes;
  std::string classes;
  std::string statistics;
  std::optional<double> crop_pct;
  std::string dtype = "fp32";
  bool allow_missing = false;
  bool merge_adapters = false;
  bool json = false;
};

at::ScalarType parse_dtype(const std::string& name) {
  if (name == "fp32") return at::kFloat;
  if (name == "fp16") return at::kHalf;
  if (name == "bf16") return at::kBFloat16;
  throw Usage("--dtype '" + name + "': there are fp32, fp16 and bf16");
}

void run_convert(const Options& options) {
  const at::ScalarType dtype = parse_dtype(options.dtype);
  check_output("OUT", options.out, {options.in});
  if (options.out.ends_with(".pth") || options.out.ends_with(".pt"))
    throw Usage("OUT '" + options.out +
                "': what is written is a safetensors file; give a name that ends in .safetensors");
  checkpoint::LoadOptions load = load_options(options.weights);
  if (options.num_classes && *options.num_classes < 0) throw Usage("--num-classes must be 0 or more");
  if (options.crop_pct && !(*options.crop_pct >= 0.05 && *options.crop_pct <= 1))
    throw Usage("--crop-pct must be from 0.05 to 1");
  std::optional<data::Normalisation> statistics;
  if (!options.statistics.empty())
    statistics = argument("--statistics", [&] { return data::parse_statistics(options.statistics); });
  load.num_classes = options.num_classes;
  load.strict = !options.allow_missing;
  checkpoint::LoadedModel loaded = checkpoint::load_model(options.in, load);
  if (options.merge_adapters) {
    if (!loaded.model->config().adapters)
      throw Usage("--merge-adapters: " + file_in_quotes(options.in) + " has no adapters");
    loaded.model->merge_adapters();
    loaded.model->drop_adapters();
    loaded.report.adapted.push_back("adapters merged into the weights");
  }
  if (!options.classes.empty()) loaded.classes = read_class_names(options.classes);
  if (statistics) loaded.preprocessing.normalisation = *statistics;
  if (options.crop_pct) loaded.preprocessing.crop_pct = *options.crop_pct;
  // What others wrote into the metadata stays.
  checkpoint::Metadata extra;
  for (const auto& [key, text] : loaded.metadata)
    if (!key.starts_with("violin.")) extra[key] = text;
  checkpoint::save_model(options.out, *loaded.model, loaded.preprocessing, loaded.classes, extra, dtype);
  if (options.json) {
    nlohmann::ordered_json json = loaded.report.json();
    json["out"] = options.out;
    json["model"] = nn::to_json(loaded.model->config());
    json["preprocessing"] = checkpoint::to_json(loaded.preprocessing);
    json["classes"] = loaded.classes.size();
    return print(nn::json_text(json) + "\n");
  }
  loaded.report.file = printable(loaded.report.file);
  print(loaded.report.text());
  note("wrote " + options.out);
}

}  // namespace

void add_convert(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("convert", "Weights of timm, DeiT, DINO or Violin as a safetensors file");
  verb->group("Verbs");
  verb->add_option("IN", options->in, "Weights (.pth, .pt, .safetensors) or a run's folder")->required();
  verb->add_option("OUT", options->out, "The safetensors file to write")->required();
  add_weights_options(*verb, options->weights);
  verb->add_option("--num-classes", options->num_classes, "Another number of classes: a fresh head; 0: no head")
      ->type_name("N")
      ->group("Model");
  verb->add_flag("--allow-missing", options->allow_missing, "Weights that are missing get initial values")
      ->group("Model");
  verb->add_flag("--merge-adapters", options->merge_adapters, "Add LoRA's or DoRA's adapters to what they adapt")
      ->group("Model");
  verb->add_option("--classes", options->classes, "Names of the classes, one per line or a JSON list")
      ->type_name("FILE")
      ->group("Images");
  verb->add_option("--statistics", options->statistics,
                   "Mean and deviation: imagenet, inception, cifar10, cifar100 or m,m,m:d,d,d")
      ->type_name("NAME")
      ->group("Images");
  verb->add_option("--crop-pct", options->crop_pct, "Share of the image that evaluation looks at")
      ->type_name("X")
      ->group("Images");
  verb->add_option("--dtype", options->dtype, "fp32 (default), fp16 or bf16; masks stay fp32")
      ->type_name("T")
      ->group("Output");
  verb->add_flag("--json", options->json, "Print the report as JSON and nothing else")->group("Output");
  verb->footer(R"(The report says what was loaded, adapted, missing and unexpected.

Examples:
  violin convert deit_small_patch16_224.pth deit_small.safetensors --classes imagenet.txt
  violin convert dino_deitsmall16_pretrain_full_checkpoint.pth dino.safetensors --branch teacher
  violin convert deit_base.safetensors deit_base_384.safetensors --img-size 384
  violin convert runs/lora plain.safetensors --merge-adapters)");
  verb->callback([options] { run_convert(*options); });
}

}  // namespace violin::cli
