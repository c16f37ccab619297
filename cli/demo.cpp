// violin demo: the main job on real images, and an honest look at it.
//
// A small vision transformer is trained three times over on images that come with Violin: without a mask, with the mask
// from space-filling curves, and with a mask from random orders, which has the same parameters but knows nothing about
// where patches lie. Within a seed all three have the same initial weights and the same images in the same order. Then:
// accuracy on other images, predictions, a report. All of it by the verbs that anyone would use.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/child.h"
#include "cli/common.h"
#include "cli/compute.h"
#include "cli/progress.h"
#include "violin/data/dataset.h"
#include "violin/nn/json_text.h"
#include "violin/number_text.h"
#include "violin/train/predictions.h"

namespace violin::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;
using Words = std::vector<std::string>;

constexpr std::size_t kShown = 6;  // classes of which an image is predicted

struct Options {
  std::string data, out = "out/demo", seeds = "0,1";
  std::int64_t epochs = 8;
  bool force = false, json = false;
  ComputeOptions compute;
};

struct Contestant {
  std::string name;
  Words options;
};
const std::vector<Contestant>& contestants() {
  static const std::vector<Contestant> all = {
      {"vanilla", {"--no-violin"}},
      {"random",
       {"--init", "spread", "--curves", "random:0,random:1,random:2,random:3,random:4,random:5,random:6,random:7"}},
      {"violin", {"--init", "spread"}}};
  return all;
}

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// Beside the program: where it was installed, or in the folder that it was built in.
fs::path images_that_come_along() {
  std::error_code error;
  const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* place : {"../share/violin/cifar100-sample", "../examples/cifar100-sample"})
    if (fs::is_directory(here / place / "train", error)) return fs::proximate(fs::canonical(here / place));
  throw Error("the images that come with Violin are not beside the program '" + here.string() +
              "/violin'; give a folder with train/CLASS and test/CLASS (--data)");
}

// As one calls it from here.
std::string program() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  const char* path = std::getenv("PATH");
  for (std::string_view left = path == nullptr ? "" : path; !left.empty();) {
    const std::size_t end = std::min(left.find(':'), left.size());
    if (fs::equivalent(left.substr(0, end), self.parent_path(), error)) return "violin";
    left.remove_prefix(std::min(end + 1, left.size()));
  }
  return fs::proximate(self, error).string();
}

// No option, whatever its name begins with.
fs::path as_operand(const std::string& path) {
  return path.starts_with('-') ? fs::path(".") / path : fs::path(path);
}

class Demo {
 public:
  Demo(const Options& options, fs::path data, std::vector<std::int64_t> seeds)
      : options_(options), data_(std::move(data)), out_(as_operand(options.out)), seeds_(std::move(seeds)) {
    const ComputeOptions& c = options.compute;
    compute_ = {"--device", c.device, "--precision", c.precision};
    if (c.threads > 0) compute_ = compute_ + Words{"--threads", std::to_string(c.threads)};
    if (c.workers >= 0) compute_ = compute_ + Words{"--workers", std::to_string(c.workers)};
  }

  void run() {
    const auto begin = std::chrono::steady_clock::now();
    look_at_images();
    check_folder();
    make_folder();
    train();
    evaluate();
    predict();
    const ordered_json report = compare();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (options_.json) {
      ordered_json object = report;
      object["predictions"] = predictions_;
      object["seconds"] = seconds;
      cli::print(nn::json_text(object, 2) + "\n");
      return;
    }
    const auto in_out = [&](const char* name) { return printable((out_ / name).string()); };
    print("\nDone in " + clock_text(seconds) + ". Open " + in_out("report.html") +
          " in a browser; pictures: " + in_out("attention.png") + ", " + in_out("curves.png") +
          ".\nA few epochs on a few images are a tour, not evidence.\nYour own images: " + program() +
          " train --data FOLDER --model NAME, or " + program() + " finetune --weights FILE --data FOLDER\n");
  }

 private:
  fs::path run_of(const Contestant& one, std::int64_t seed) const {
    return out_ / (one.name + "-" + std::to_string(seed));
  }
  fs::path report() const { return out_ / "report.html"; }
  fs::path masked_run() const { return run_of(contestants().back(), seeds_.front()); }
  fs::path log(const std::string& name) const { return out_ / "logs" / (name + ".log"); }
  std::string with_compute(const Words& words, const std::string& name) const {
    return run_verb(words + compute_, log(name));
  }
  void print(const std::string& text) const {
    if (options_.json) return;
    cli::print(text);
    std::fflush(stdout);  // in a pipe too, it comes before the messages of what follows
  }

  void look_at_images() {
    const data::Dataset images = data::open_dataset(data_);
    training_images_ = images.train.size() + images.val.size();
    classes_ = std::ssize(images.classes);
    if (images.test.empty())
      throw Error("'" + data_.string() + "' has no test images; expected train/CLASS and test/CLASS");
  }
  void make_folder() const {
    std::error_code error;
    fs::create_directories(out_ / "logs", error);
    if (error)
      throw Error("cannot make the folder '" + out_.string() + "': " + error.message() + "; --out names another");
    fs::remove(log("after"), error);
  }
  void check_folder() const {
    if (lies_inside(out_, data_))
      throw Error("'" + out_.string() + "' lies inside of the images' folder '" + data_.string() +
                  "'; give another with --out");
    bool taken = fs::exists(report());
    for (const Contestant& one : contestants())
      for (const std::int64_t seed : seeds_) taken = taken || fs::exists(run_of(one, seed));
    if (taken && !options_.force)
      throw Error("'" + out_.string() + "' holds a demo already; --force replaces it, --out names another folder");
  }

  void train() {
    print("1. Train: " + std::to_string(training_images_) + " images of " + std::to_string(classes_) + " classes" +
          ", a ViT of 0.7 million parameters, " + counted(options_.epochs, "epoch") + ", " +
          counted(std::ssize(seeds_), "seed") + "\n");
    for (const std::int64_t seed : seeds_) {
      for (const Contestant& one : contestants()) {
        const std::string name = one.name + "-" + std::to_string(seed);
        fs::remove(log(name));
        const Words words = Words{"train",
                                  "--data",
                                  data_.string(),
                                  "--model",
                                  "violin_vit_micro_patch4_32",
                                  "--out",
                                  run_of(one, seed).string(),
                                  "--seed",
                                  std::to_string(seed),
                                  "--epochs",
                                  std::to_string(options_.epochs),
                                  "--batch-size",
                                  "60",
                                  "--lr",
                                  "1e-3",
                                  "--warmup-epochs",
                                  std::to_string(std::min<std::int64_t>(1, options_.epochs - 1)),
                                  "--mixup",
                                  "0",
                                  "--cutmix",
                                  "0",
                                  "--erase",
                                  "0",
                                  "--drop-path",
                                  "0",
                                  "--json"};
        Progress progress("train " + name, options_.epochs, "epochs");
        const auto heed = [&](std::string_view line) {
          if (line.starts_with("epoch ") && line.find("lr ") != std::string_view::npos) progress.advance(1);
        };
        const json tested = json::parse(
            run_verb(words + one.options + (options_.force ? Words{"--force"} : Words{}) + compute_, log(name), heed));
        progress.finish();
        if (!tested.contains("test"))
          throw Error("none of the images in '" + (data_ / "test").string() + "' could be read");
        const json& test = tested.at("test");
        images_ = test.at("images");
        print("   " + one.name + std::string(9 - one.name.size(), ' ') + "seed " + std::to_string(seed) + ": " +
              clock_text(tested.at("seconds")) + ", top-1 " + number_text(test.at("top1"), "%.2f") + "%, top-5 " +
              number_text(test.at("top5"), "%.2f") + "% on " + std::to_string(test.at("images").get<int>()) +
              " images\n");
      }
    }
  }

  void evaluate() {
    print("\n2. Evaluate the masked one class by class, on " + std::to_string(images_) +
          " images that training never saw (one in " + std::to_string(classes_) + " is right by chance)\n");
    print(with_compute({"eval", masked_run().string(), "--data", data_.string(), "--per-class", "--predictions",
                        (out_ / "predictions.csv").string()},
                       "after"));
  }

  // The seventh image that could be read, or the last, of a few classes.
  Words some_images() const {
    std::map<std::string, Words> by_class;
    for (const train::Prediction& one : train::read_predictions(out_ / "predictions.csv"))
      by_class[one.label].push_back((data_ / one.image).string());
    std::vector<std::string> images;
    for (const auto& [name, all] : by_class) images.push_back(all[std::min<std::size_t>(6, all.size() - 1)]);
    Words some;
    const std::size_t shown = std::min(kShown, images.size());
    for (std::size_t i = 0; i < shown; ++i) some.push_back(images[i * images.size() / shown]);
    return some;
  }

  void predict() {
    print("\n3. Predict, and show where the model looked\n");
    const Words images = some_images();
    const std::string picture = (out_ / "attention.png").string();
    Words words = Words{"predict", masked_run().string()} + images + Words{"--top", "2", "--attention", picture};
    if (options_.json) words.emplace_back("--json");
    const std::string said = with_compute(words, "after");
    if (options_.json) predictions_ = ordered_json::parse(said);
    print(said);
    run_verb({"curves", "--grid", "8x8", "--image", images[images.size() / 3], "--png", (out_ / "curves.png").string()},
             log("after"));
  }

  // What report --json prints.
  ordered_json compare() const {
    Words words = {"report", "--out", report().string()};
    for (const Contestant& one : contestants())
      for (const std::int64_t seed : seeds_) words.push_back(run_of(one, seed).string());
    if (options_.json) return ordered_json::parse(with_compute(words + Words{"--json"}, "after"));
    print(
        "\n4. Compare. vanilla: no mask. random: the mask over random orders. violin: the mask over space-filling "
        "curves.\n   ± is the deviation over seeds; " +
        std::to_string(images_) + " test images alone leave an accuracy uncertain by about " +
        number_text(50 / std::sqrt(static_cast<double>(images_)), "%.0f") + " points.\n");
    print(with_compute(words, "after") + "One run alone: " + program() + " report " + printable(masked_run().string()) +
          "\n");
    return {};
  }

  const Options& options_;
  const fs::path data_, out_;
  const std::vector<std::int64_t> seeds_;
  Words compute_;
  std::int64_t training_images_ = 0, classes_ = 0, images_ = 0;  // images_: of the test
  ordered_json predictions_;
};

void demo(const Options& options) {
  if (options.epochs < 1) throw Usage("--epochs must be at least 1");
  std::vector<std::int64_t> seeds = parse_integers("--seeds", options.seeds);
  std::ranges::sort(seeds);
  seeds.erase(std::ranges::unique(seeds).begin(), seeds.end());
  if (seeds.empty() || seeds.front() < 0) throw Usage("--seeds '" + options.seeds + "': expected numbers from 0 on");
  Demo(options, options.data.empty() ? images_that_come_along() : as_operand(options.data), seeds).run();
}

}  // namespace

void add_demo(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("demo", "Train on the images that come along, with and without a mask: a tour");
  verb->group("Verbs");
  const auto options = std::make_shared<Options>();
  verb->add_option("--out", options->out, "Folder of its runs, report and pictures (default: out/demo)")
      ->type_name("DIR");
  verb->add_option("--epochs", options->epochs, "Epochs of each training (default 8)")->type_name("N");
  verb->add_option("--seeds", options->seeds, "Each is a training of all three models (default 0,1)")
      ->type_name("0,1,…");
  verb->add_option("--data", options->data, "Other images: train/CLASS and test/CLASS")->type_name("DIR");
  verb->add_flag("--force", options->force, "Replace the demo that is in the folder");
  verb->add_flag("--json", options->json, "Print what was measured as JSON");
  add_compute_options(*verb, options->compute, Draws::kNone);
  verb->footer(R"(Three minutes on two cores. Examples:
  violin demo
  violin demo --epochs 20 --seeds 0,1,2,3 --out out/longer)");
  verb->callback([options] { demo(*options); });
}

}  // namespace violin::cli
