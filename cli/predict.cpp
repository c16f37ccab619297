// violin predict: classes of images, and where the model looked.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/compute.h"
#include "cli/progress.h"
#include "cli/weights.h"
#include "violin/data/dataset.h"
#include "violin/data/loader.h"
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
  std::string attention;
  std::int64_t block = -1;
  std::string on_bad_image = "skip";
  WeightsOptions model;
  ComputeOptions compute;
  bool json = false;
};

void predict(const Options& options) {
  if (options.top < 1) throw Usage("--top must be at least 1");
  const data::OnBadImage policy =
      argument("--on-bad-image", [&] { return data::parse_on_bad_image(options.on_bad_image); });
  const Compute compute = start_compute(options.compute);
  PredictorOptions settings;
  settings.load = load_options(options.model);
  settings.load.device = compute.device;
  settings.precision = compute.precision;
  checkpoint::LoadedModel loaded = checkpoint::load_model(options.weights, settings.load);
  const nn::Model model = loaded.model;
  const Predictor predictor(std::move(loaded), settings);
  std::vector<std::filesystem::path> paths(options.images.begin(), options.images.end());
  const data::SampleSet set = data::open_images(paths);

  ordered_json list = ordered_json::array();
  std::vector<viz::AttentionEntry> sheet;
  std::string text;
  std::int64_t skipped = 0;
  Progress progress("predict", set.size(), "images");
  for (std::int64_t begin = 0; begin < set.size(); begin += settings.batch) {
    std::vector<Image> images;
    std::vector<std::string> names;
    for (std::int64_t i = begin; i < std::min(set.size(), begin + settings.batch); ++i) {
      try {
        images.push_back(set.decode(i));
        names.push_back(set[i].path);
      } catch (const Error& error) {
        if (policy == data::OnBadImage::kFatal) throw;
        progress.message(std::string("skipped a bad image: ") + error.what());
        ++skipped;
      }
    }
    const std::vector<std::vector<Guess>> guesses = predictor.classify(images, options.top);
    for (std::size_t i = 0; i < images.size(); ++i) {
      ordered_json classes = ordered_json::array();
      text += names[i] + "\n";
      for (const Guess& guess : guesses[i]) {
        classes.push_back({{"name", guess.name}, {"probability", guess.probability}});
        text += number_text(100 * guess.probability, "  %6.2f%%  ") + guess.name + "\n";
      }
      list.push_back({{"image", names[i]}, {"classes", classes}});
      if (!options.attention.empty()) {
        sheet.push_back({images[i], attention_map(*model, predictor.prepare(images[i]), options.block),
                         std::filesystem::path(names[i]).filename().string(),
                         guesses[i].front().name + number_text(100 * guesses[i].front().probability, " %.0f%%")});
        // What the model saw is what the map lies on.
        sheet.back().image = data::eval_pixels(images[i], predictor.preprocessing());
      }
    }
    progress.advance(static_cast<std::int64_t>(std::min(set.size(), begin + settings.batch) - begin));
  }
  progress.finish();
  if (list.empty()) throw Error("none of the images could be read");
  if (!options.attention.empty()) {
    const viz::Scene scene = viz::attention_sheet(sheet);
    PictureOptions pictures;
    const bool svg = options.attention.ends_with(".svg");
    (svg ? pictures.svg : pictures.png) = options.attention;
    write_pictures(scene, pictures);
  }
  if (skipped > 0) note("skipped " + std::to_string(skipped) + " bad images");
  print(options.json ? list.dump(2) + "\n" : text);
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
