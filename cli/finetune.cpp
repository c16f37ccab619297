// violin finetune: trained weights, a mask plugged in, a folder of images.

#include "cli/common.h"
#include "cli/training.h"

namespace violin::cli {

void add_finetune(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("finetune", "Adapt trained weights to a folder of images");
  verb->group("Verbs");
  const auto arguments = std::make_shared<TrainingArguments>();
  add_training_options(*verb, arguments, true);
  verb->footer(
      R"(Weights without a mask get one that changes nothing at first (--init identity); --no-violin leaves them as they are.

Examples:
  violin finetune --weights deit_small.safetensors --data photos --out runs/photos
  violin finetune --weights deit_small.pth --data photos --lr auto
  violin finetune --weights deit_small.pth --data photos --recipe lora --rank 8
  violin finetune --resume runs/photos)");
  verb->callback([verb, arguments] {
    if (verb->get_option("--resume")->count() == 0 && arguments->weights.empty())
      throw Usage("--weights is missing: a file or the folder of a run");
    run_training(*verb, "finetune", *arguments, "finetune");
  });
}

}  // namespace violin::cli
