// violin models: names, sizes and costs of the models that are known by name.

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/weights.h"
#include "violin/nn/registry.h"
#include "violin/nn/vit.h"
#include "violin/text.h"

namespace violin::cli {
namespace {

struct Options {
  std::string filter;
  std::string img_size;
  bool json = false;
};

template <class... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

std::vector<nn::ModelEntry> named(const std::string& filter) {
  const auto fits = [&](const std::string& name) { return name.find(filter) != std::string::npos; };
  std::vector<nn::ModelEntry> found;
  for (const nn::ModelEntry& entry : nn::model_registry())
    if (fits(entry.name) || std::any_of(entry.aliases.begin(), entry.aliases.end(), fits)) found.push_back(entry);
  // A name with violin_ in front that no table lists, or none, which the error says.
  if (found.empty()) found.push_back({filter, "Violin", argument("", [&] { return nn::find_model(filter); }), {}});
  return found;
}

void models(const Options& options) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  std::string table =
      formatted("%-36s %5s %6s %9s %9s %8s %8s\n", "model", "px", "tokens", "params M", "GMAC", "mask", "share");
  for (const nn::ModelEntry& entry : named(options.filter)) {
    Size image = entry.config.img_size;
    if (!options.img_size.empty()) image = parse_size("--img-size", options.img_size);
    if (image.height < entry.config.patch_size.height || image.width < entry.config.patch_size.width)
      throw Usage("--img-size " + options.img_size + ": smaller than a patch of " + entry.name);
    const nn::Cost plain = nn::cost(entry.config, image);
    // What a mask would add, or adds.
    nn::ModelConfig masked = entry.config;
    if (!masked.violin) masked.violin = nn::MaskConfig{};
    const std::int64_t mask = nn::cost(masked, image).mask_parameters;
    const double share =
        static_cast<double>(mask) / static_cast<double>(plain.parameters - plain.mask_parameters + mask);
    if (options.json) {
      list.push_back({{"name", entry.name},
                      {"family", entry.family},
                      {"aliases", entry.aliases},
                      {"img_size", {image.height, image.width}},
                      {"tokens", plain.tokens},
                      {"parameters", plain.parameters},
                      {"macs", plain.macs},
                      {"has_mask", entry.config.violin.has_value()},
                      {"mask_parameters", mask},
                      {"mask_share", share},
                      {"config", nn::to_json(entry.config)}});
    } else {
      const std::string pixels = short_text(image);
      table += formatted("%-36s %5s %6lld %9.2f %9.2f %8lld %7.4f%%\n", entry.name.c_str(), pixels.c_str(),
                         static_cast<long long>(plain.tokens), static_cast<double>(plain.parameters) / 1e6,
                         plain.macs / 1e9, static_cast<long long>(mask), 100 * share);
    }
  }
  if (options.json) {
    print(nlohmann::ordered_json{{"models", list}}.dump(2) + "\n");
    return;
  }
  print(table +
        "\nGMAC: multiply-adds of one image. mask: parameters of the mask of eight curves, where the model has one or "
        "when\n"
        "it is plugged in (violin_NAME is NAME with a mask).\n");
}

}  // namespace

void add_models(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("models", "List the models that are known by name, with their costs");
  verb->group("Verbs");
  const auto options = std::make_shared<Options>();
  verb->add_option("filter", options->filter, "Only names with this in them")->type_name("TEXT");
  verb->add_option("--img-size", options->img_size, "Cost at this size instead of the model's own")->type_name("N|HxW");
  verb->add_flag("--json", options->json, "Print JSON");
  verb->callback([options] { models(*options); });
}

}  // namespace violin::cli
