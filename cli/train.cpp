// violin train: a classifier from a folder of images, from scratch.

#include "cli/common.h"
#include "cli/training.h"

namespace violin::cli {

void add_train(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("train", "Train a model on a folder of images, from scratch");
  verb->group("Verbs");
  const auto arguments = std::make_shared<TrainingArguments>();
  add_training_options(*verb, arguments, false);
  verb->footer(R"(Examples:
  violin train --data photos --model violin_deit_tiny_patch16_224 --epochs 100 --out runs/photos
  violin train --data cifar100 --model vit_tiny_patch2_32 --violin --batch-size 128 --epochs 60
  violin train --resume runs/photos)");
  verb->callback([verb, arguments] { run_training(*verb, "train", *arguments, "deit"); });
}

}  // namespace violin::cli
