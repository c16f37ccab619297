#include "violin/train/model_card.h"

#include "violin/number_text.h"
#include "violin/text.h"
#include "violin/version.h"

namespace violin::train {
namespace {

// Of "photos/" too.
std::string last_name(const std::filesystem::path& path) {
  const std::filesystem::path whole = std::filesystem::absolute(path).lexically_normal();
  return (whole.has_filename() ? whole : whole.parent_path()).filename().string();
}

}  // namespace

std::string model_card(const Task& task, const data::Dataset& dataset, const Outcome& outcome) {
  std::string card = "# " + std::to_string(task.classes.size()) + "-class image classifier\n\n";
  const auto line = [&](const std::string& name, const std::string& value) {
    card += "| " + name + " | " + value + " |\n";
  };
  const auto number = [](double value) { return number_text(value, "%.2f"); };
  card += "Trained by `violin " + task.command + "` (violin " + version() +
          "). Weights: " + (outcome.best_epoch >= 0 ? "`best/model.safetensors`, the best epoch on val; " : "") +
          "`last/model.safetensors`, the last one. They carry preprocessing and class names.\n\n| | |\n|---|---|\n";
  line("data", "`" + last_name(task.data) + "`, " + std::to_string(dataset.train.size()) + " training images" +
                   (outcome.skipped > 0 ? " (" + std::to_string(outcome.skipped) + " of them unreadable)" : "") +
                   (dataset.held_out ? ", val held out of them" : ""));
  line("model", "ViT, width " + std::to_string(task.model.embed_dim) + ", " + std::to_string(task.model.depth) +
                    " blocks, " + std::to_string(task.model.num_heads) + " heads, patch " +
                    to_string(task.model.patch_size) + ", " + short_text(task.preprocessing.size) + " px");
  const auto curves = [](const nn::MaskConfig& mask) { return mask.curves.empty() ? "alpha alone" : mask.curves; };
  line("mask", task.model.violin ? curves(*task.model.violin) + ", " + task.model.violin->strategy + ", init " +
                                       task.model.violin->init
                                 : "none");
  line("started from", task.weights.empty() ? "scratch" : "`" + last_name(task.weights) + "`");
  line("recipe", task.options.recipe + ", " + counted(outcome.epochs, "epoch") + ", batch " +
                     std::to_string(task.options.batch_size) + ", seed " + std::to_string(task.options.seed));
  if (outcome.best_epoch >= 0)
    line("val top-1", number(outcome.best_top1) + "% in epoch " + std::to_string(outcome.best_epoch + 1));
  if (outcome.test)
    line("test top-1 / top-5", number(outcome.test->top1) + "% / " + number(outcome.test->top5) + "% on " +
                                   std::to_string(outcome.test->images) + " images");
  card += "\nUse it: `violin predict FOLDER image.jpg`. Repeat it: the options are in `config.json`.\n";
  return card;
}

}  // namespace violin::train
