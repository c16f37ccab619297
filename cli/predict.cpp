// violin predict: classes of images, and where the model looked.

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/common.h"
#include "cli/compute.h"
#include "cli/progress.h"
#include "cli/weights.h"
#include "violin/data/dataset.h"
#include "violin/data/loader.h"
#include "violin/nn/json_text.h"
#include "violin/number_text.h"
#include "violin/predict/attention_map.h"
#include "violin/predict/predictor.h"
#include "violin/viz/attention_sheet.h"

namespace violin::cli {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::string weights;
  std::vector<std::string> images;
  std::int64_t top = 5;
  std::int64_t batch = PredictorOptions().batch;
  std::string attention;
  std::optional<std::int64_t> block;
  std::string on_bad_image = "skip";
  WeightsOptions model;
  ComputeOptions compute;
  bool json = false;
};

// The block whose attention is shown; a mistake must not cost the predictions.
std::int64_t chosen_block(const Options& options, std::int64_t depth) {
  const std::int64_t block = options.block.value_or(-1);
  if (block < -depth || block >= depth)
    throw Usage("--block " + std::to_string(block) + ": the model has blocks 0 to " + std::to_string(depth - 1));
  return block;
}

void predict(const Options& options) {
  if (options.top < 1) throw Usage("--top must be at least 1");
  if (options.batch < 1) throw Usage("--batch must be at least 1");
  if (options.block && options.attention.empty()) throw Usage("--block says whose attention is shown: add --attention");
  if (!options.attention.empty() && !options.attention.ends_with(".svg") && !options.attention.ends_with(".png"))
    throw Usage("--attention '" + options.attention + "': expected a name that ends in .png or .svg");
  std::vector<std::string> read = options.images;
  read.push_back(options.weights);
  check_replaces("--attention", options.attention, read);
  const Compute compute = start_compute(options.compute);
  data::LoaderOptions loading;
  loading.workers = compute.workers;
  loading.on_bad_image = argument("--on-bad-image", [&] { return data::parse_on_bad_image(options.on_bad_image); });
  PredictorOptions settings;
  settings.precision = compute.precision;
  settings.batch = options.batch;
  settings.batch_option = "--batch";
  checkpoint::LoadedModel loaded = load_weights(options.weights, options.model, compute.device);
  const nn::Model model = loaded.model;
  const std::int64_t block = chosen_block(options, model->config().depth);
  const Predictor predictor(std::move(loaded), settings);
  std::vector<std::filesystem::path> paths(options.images.begin(), options.images.end());
  const data::SampleSet set = data::open_images(paths);
  PictureOptions pictures;
  const std::size_t shown = options.attention.empty() ? 0 : viz::attention_sheet_limit(pictures.scale);

  ordered_json list = ordered_json::array();
  std::vector<viz::AttentionEntry> sheet;
  std::string text;
  data::Loader loader(set, std::make_shared<data::EvalTransform>(predictor.preprocessing()), loading);
  loader.start(data::in_order(set.size()), settings.batch, 0);
  Progress progress("predict", set.size(), "images");
  while (const std::optional<data::Batch> batch = loader.next()) {
    const at::Tensor probabilities = predictor.probabilities(batch->images);
    for (std::int64_t i = 0; i < batch->size(); ++i) {
      const std::int64_t index = batch->indices[i].item<std::int64_t>();
      const std::string& name = set[index].path;
      const std::vector<Guess> guesses = predictor.best(probabilities[i], options.top);
      ordered_json classes = ordered_json::array();
      text += printable(name) + "\n";
      for (const Guess& guess : guesses) {
        classes.push_back({{"name", guess.name}, {"probability", guess.probability}});
        text += number_text(100 * guess.probability, "  %6.2f%%  ") + printable(guess.name) + "\n";
      }
      list.push_back({{"image", name}, {"classes", classes}});
      if (sheet.size() < shown)
        // What the model saw is what the map lies on.
        sheet.push_back({data::eval_pixels(set.decode(index), predictor.preprocessing()),
                         attention_map(*model, batch->images[i], block),
                         printable(std::filesystem::path(name).filename().string()),
                         guesses.front().name + number_text(100 * guesses.front().probability, " %.0f%%")});
    }
    progress.advance(batch->size());
  }
  progress.finish();
  const std::vector<data::BadImage> bad = loader.bad_images();
  note_skipped(bad);
  if (list.empty()) throw Error("none of the images could be read");
  // First what was asked for: a picture that cannot be written takes nothing away.
  print(options.json ? nn::json_text(list, 2) + "\n" : text);
  if (options.attention.empty()) return;
  (options.attention.ends_with(".svg") ? pictures.svg : pictures.png) = options.attention;
  write_pictures(viz::attention_sheet(sheet), pictures);
  if (sheet.size() < list.size())
    note("'" + options.attention + "' shows the first " + std::to_string(sheet.size()) + " of " +
         std::to_string(list.size()) + " images; more do not fit into a picture");
}

}  // namespace

void add_predict(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("predict", "Classes of images");
  verb->group("Verbs");
  const auto options = std::make_shared<Options>();
  verb->add_option("weights", options->weights, "Weights file or folder of a run")
      ->required()
      ->type_name("RUN_OR_WEIGHTS");
  verb->add_option("images", options->images, "Images or folders of images")->required()->type_name("IMG…");
  verb->add_option("--top", options->top, "Classes per image (default 5)")->type_name("N");
  verb->add_option("--batch", options->batch, "Images per forward pass (default 32)")->type_name("N");
  verb->add_option("--attention", options->attention, "Write a picture of where the model looked (.png or .svg)")
      ->type_name("FILE");
  verb->add_option("--block", options->block, "Block whose attention is shown (default: the last)")->type_name("N");
  verb->add_option("--on-bad-image", options->on_bad_image, "skip (name and count it) or fatal")->type_name("WHAT");
  verb->add_flag("--json", options->json, "Print JSON");
  add_weights_options(*verb, options->model);
  add_compute_options(*verb, options->compute, Draws::kNone);
  verb->footer(R"(Examples:
  violin predict runs/photos holiday.jpg
  violin predict runs/photos new_photos/ --attention looked.png --json)");
  verb->callback([options] { predict(*options); });
}

}  // namespace violin::cli
