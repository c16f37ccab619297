#include "cli/training.h"

#include <torch/cuda.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/common.h"
#include "cli/progress.h"
#include "cli/weights.h"
#include "violin/checkpoint/model_file.h"
#include "violin/data/file.h"
#include "violin/nn/json_text.h"
#include "violin/nn/vit.h"
#include "violin/number_text.h"
#include "violin/train/distributed.h"
#include "violin/train/search.h"
#include "violin/train/trainer.h"

namespace violin::cli {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

std::atomic<bool> stop_requested = false;

// The first signal asks; a second one ends the process at once.
extern "C" void request_stop(int signal) {
  stop_requested = true;
  std::signal(signal, SIG_DFL);
}

// As a shell takes it for one word.
std::string shell_word(const std::string& text) {
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || std::strchr("_-./+:@%,=", c) != nullptr;
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? "'\\''" : std::string(1, c);
  return word + "'";
}

// One bar over all images of the run, a line per epoch above it.
class Report : public train::Listener {
 public:
  void on_start(const std::string& what) override {
    progress_.reset();
    note(what);
    val_.clear();
    start_ = std::chrono::steady_clock::now();
  }
  void on_step(const Step& step) override {
    if (!progress_) {
      // All steps of a run have as many images.
      const std::int64_t steps = (step.epochs - step.epoch) * step.batches - (step.batch - 1);
      progress_ = std::make_unique<Progress>("train", steps * step.images, "images", start_);
    }
    const std::string loss = std::isnan(step.loss) ? "" : "  loss " + number_text(step.loss, "%.3f");
    progress_->advance(step.images,
                       "epoch " + std::to_string(step.epoch + 1) + "/" + std::to_string(step.epochs) + loss + val_);
  }
  void on_epoch(const Epoch& epoch) override {
    std::string line = "epoch " + std::to_string(epoch.epoch + 1) + "/" + std::to_string(epoch.epochs) + "  loss " +
                       number_text(epoch.train_loss, "%.4f") + "  lr " + number_text(epoch.lr, "%.2e");
    if (epoch.val) {
      line += "  val top-1 " + number_text(epoch.val->top1, "%.2f") + "%" + (epoch.best ? " (best)" : "") + "  loss " +
              number_text(epoch.val->loss, "%.4f");
      val_ = "  val " + number_text(epoch.val->top1, "%.1f") + "%";
    }
    line += "  " + number_text(epoch.images_per_second, "%.0f") + " images/s";
    on_message(line);
  }
  void on_message(const std::string& line) override {
    if (progress_) {
      progress_->message(line);
    } else {
      note(line);
    }
  }
  void finish() { progress_.reset(); }

 private:
  std::unique_ptr<Progress> progress_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();  // before the first step
  std::string val_;
};

// Of several processes the first one reports; the others speak only of what they alone see.
class Aside : public train::Listener {
 public:
  explicit Aside(std::string who) : who_(std::move(who)) {}
  void on_message(const std::string& line) override { note(who_ + ": " + line); }

 private:
  std::string who_;
};

std::string process_name(const train::Launch& launch) {
  return "process " + std::to_string(launch.rank + 1) + " of " + std::to_string(launch.world);
}

// Each process its own GPU, or its share of the cores, where nothing else was asked for.
ComputeOptions share_of_machine(ComputeOptions options, const train::Launch& launch) {
  if (launch.by == train::Launch::By::kHand) return options;
  // torch counts them in eight bits. NOLINTNEXTLINE(bugprone-signed-char-misuse)
  const auto gpus = static_cast<std::int64_t>(torch::cuda::device_count());
  // mpirun means CPUs unless a GPU is asked for.
  if (options.device == "auto" && (launch.by == train::Launch::By::kMpirun || gpus == 0)) options.device = "cpu";
  if ((options.device == "auto" || options.device == "cuda") && gpus > 0)
    options.device = "cuda:" + std::to_string(launch.local_rank % gpus);
  if (launch.several()) {
    if (options.threads == 0) options.threads = train::fair_cores(launch);
    if (options.workers == -1) options.workers = std::min(train::fair_cores(launch), 8);
  }
  return options;
}

// What every process was asked for; 0 where machines differ.
int common_threads(train::Processes& processes, int own, c10::Device device) {
  at::Tensor all = at::zeros({processes.world()}, at::kFloat);
  all[processes.rank()] = own;
  all = all.to(device);
  processes.sum(all);
  return (all == own).all().item<bool>() ? own : 0;
}

std::filesystem::path free_folder(const std::string& command) {
  for (int number = 1;; ++number) {
    const std::filesystem::path path = "runs/" + command + "-" + std::to_string(number);
    if (!std::filesystem::exists(path)) return path;
  }
}

// False for what is not there: that is said where it is read.
bool lies_inside(const std::filesystem::path& path, const std::filesystem::path& folder) {
  std::error_code error;
  const std::filesystem::path outer = std::filesystem::canonical(folder, error);
  if (error || !std::filesystem::is_directory(outer, error)) return false;
  // Of a relative path of which nothing exists weakly_canonical makes no absolute one.
  const std::filesystem::path inner = std::filesystem::weakly_canonical(std::filesystem::absolute(path), error);
  return !error && std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
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

void print_outcome(const train::Outcome& outcome, const std::filesystem::path& run, bool as_json) {
  if (as_json) {
    ordered_json object = {{"run", run.string()},
                           {"epochs", outcome.epochs},
                           {"steps", outcome.steps},
                           {"train_loss", outcome.train_loss},
                           {"skipped", outcome.skipped}};
    if (outcome.best_epoch >= 0) {
      // As in result.json; epochs of files are counted from 0.
      object["best_epoch"] = outcome.best_epoch;
      object["best_val_top1"] = outcome.best_top1;
    }
    if (outcome.val) object["val"] = train::to_json(*outcome.val);
    if (outcome.test) object["test"] = train::to_json(*outcome.test);
    object["images_per_second"] = outcome.images_per_second;
    object["seconds"] = outcome.seconds;
    print(nn::json_text(object, 2) + "\n");
    return;
  }
  std::string text = "trained " + counted(outcome.epochs, "epoch") + " in " + clock_text(outcome.seconds) + " (" +
                     number_text(outcome.images_per_second, "%.0f") + " images/s)\n";
  if (outcome.skipped > 0) text += "skipped " + counted(outcome.skipped, "bad image") + " of train\n";
  if (outcome.best_epoch >= 0)
    text += "best val top-1 " + number_text(outcome.best_top1, "%.2f") + "% in epoch " +
            std::to_string(outcome.best_epoch + 1) + "\n";
  if (outcome.test)
    text += "test top-1 " + number_text(outcome.test->top1, "%.2f") + "%, top-5 " +
            number_text(outcome.test->top5, "%.2f") + "% on " + std::to_string(outcome.test->images) + " images\n";
  const std::filesystem::path weights = run / (outcome.best_epoch >= 0 ? "best" : "last") / "model.safetensors";
  text += "weights " + printable(weights.string()) + "\n";
  print(text);
}

// A stop on request, after which all processes have parted.
class Stopped : public Error {
 public:
  using Error::Error;
};

// What a run with given weights began with.
nn::Model load_initial(const train::RunFolder& run, const train::Task& task) {
  if (!std::filesystem::exists(run.initial_weights()))
    throw Error("'" + run.path().string() + "' has neither a checkpoint nor initial weights; begin anew with --force");
  checkpoint::LoadOptions load;
  load.config = task.model;
  return checkpoint::load_model(run.initial_weights(), load).model;
}

// `processes` is set once they have met.
void train_together(const CLI::App& verb, const std::string& command, const TrainingArguments& arguments,
                    const std::string& default_recipe, const train::Launch& launch,
                    std::unique_ptr<train::Processes>& processes) {
  const bool resuming = verb.get_option("--resume")->count() > 0;
  const auto was_given = [&](const char* name) { return verb.get_option(name)->count() > 0; };
  std::filesystem::path folder = arguments.resume_folder.empty() ? arguments.out : arguments.resume_folder;
  if (resuming && folder.empty()) throw Usage("--resume: say which run, as --resume DIR or with --out DIR");
  if (!resuming && arguments.data.empty()) throw Usage("--data is missing: the folder with the images");
  if (resuming && arguments.force) throw Usage("--resume and --force contradict each other");
  if (!arguments.resume_folder.empty() && !arguments.out.empty() && arguments.out != arguments.resume_folder)
    throw Usage("--resume '" + arguments.resume_folder + "' and --out '" + arguments.out +
                "' name two folders: give one");
  if (!arguments.model.empty() && !arguments.model_file.empty())
    throw Usage("--model and --config both say what the model is: give one");
  if (folder.empty()) folder = free_folder(command);
  if (!arguments.branch.empty() && arguments.weights.empty() && !resuming)
    throw Usage("--branch is one of a weights file: add --weights");
  if (!resuming) check_folder(folder, arguments.data, arguments.weights);

  train::Request request;
  request.command = command;
  request.data = arguments.data;
  request.weights = arguments.weights;
  request.model = arguments.model;
  request.branch = arguments.branch;
  if (!arguments.model_file.empty()) request.config = read_model_config(arguments.model_file);
  json from_file = json::object();
  if (!arguments.options_file.empty()) from_file = train::read_json_file(arguments.options_file);
  std::optional<nn::ModelConfig> like;  // the model of a run whose config.json is given
  if (train::is_run_config(from_file)) {
    like = train::task_from_json(from_file).model;
    from_file = json(from_file.at("options"));
  }
  bool search_lr = arguments.search_lr;
  if (from_file.value("lr", json()) == "auto") {
    search_lr = search_lr || !arguments.given.contains("lr");
    from_file.erase("lr");
  }
  argument("", [&] {
    const std::string recipe = !arguments.recipe.empty() ? arguments.recipe
                               : from_file.contains("recipe") && from_file.at("recipe").is_string()
                                   ? from_file.at("recipe").get<std::string>()
                                   : default_recipe;
    train::apply_recipe(recipe, request.options);
    train::merge_json(from_file, request.options);
    request.options.recipe = recipe;
    if (!arguments.given.is_null()) train::merge_json(arguments.given, request.options);
    if (was_given("--seed")) request.options.seed = arguments.compute.seed;
    if (was_given("--precision")) request.options.precision = arguments.compute.precision;
    return 0;
  });
  for (const char* name : {"rank", "adapter_targets", "adapter_alpha"})
    if (!resuming && arguments.given.contains(name) && request.options.adapter.empty())
      throw Usage(option_name(name) + " is one of adapters: add --recipe lora or --recipe dora");
  const bool any_mask_option = mask_options_given(arguments);
  if (arguments.violin == false && any_mask_option) throw Usage("--no-violin contradicts the options of the mask");
  const bool fine = !request.weights.empty();
  if (arguments.violin.value_or(fine || any_mask_option)) {
    nn::MaskConfig mask;
    mask.init = fine ? "identity" : "pretrain";
    request.mask = mask = with_options(mask, arguments);
    // Whether that goes with the initial values of a fresh mask shows when there is need of one.
    if (fine && !arguments.init) mask.parameterisation = "auto";
    argument("", [&] { return nn::check(mask), 0; });
  }
  if (any_mask_option) request.change_mask = [&](const auto& own) { return changed_mask(own, arguments, fine); };
  request.unplug = arguments.violin == false;
  if (like && !any_mask_option && !arguments.violin) {
    request.mask = like->violin;
    request.unplug = !like->violin;
    request.change_mask = [&](const nn::MaskConfig& own) { return own == *like->violin ? std::nullopt : like->violin; };
  }
  if (like && !fine && request.model.empty() && !request.config) {
    request.config = like;
    request.config->adapters.reset();  // options say which there will be
  }
  if (!resuming && !fine && request.model.empty() && !request.config)
    throw Usage("--model is missing: a name of violin models, or --config with a file that describes one");
  argument("", [&] { return train::check(request), 0; });

  const Compute compute = start_compute(share_of_machine(arguments.compute, launch));
  processes = train::join_processes(launch, compute.device, train::answer_timeout());
  const bool first = processes->first();
  const auto mode = resuming          ? train::RunFolder::Mode::kResume
                    : arguments.force ? train::RunFolder::Mode::kReplace
                                      : train::RunFolder::Mode::kNew;
  train::Prepared prepared;
  std::unique_ptr<train::RunFolder> run;
  bool begun = resuming;  // the folder holds work
  // What fails before there is anything to go on from brings back the run that would have been replaced, or leaves the
  // folder to another try: with a smaller batch or rate, as the message may say, or other images.
  const auto or_as_before = [&](const auto& work) {
    try {
      return work();
    } catch (const Stopped&) {
      throw;
    } catch (const std::exception&) {
      if (begun && run && run->replaces()) {
        note("the run that was in '" + folder.string() + "' before is in '" + (folder / ".replaced").string() +
             "' until this one has a checkpoint after a step");
      } else if (run && run->replaces()) {
        try {
          run->discard();
          note("the run that was in '" + folder.string() + "' before is still there");
        } catch (const Error& problem) {
          note(message_of(problem));  // and what failed first is what counts
        }
      } else if (run && !begun && !run->has_steps() && !std::filesystem::exists(folder / "lr_search.json")) {
        run->discard();
        note("what this run wrote to '" + folder.string() + "' was removed; another may begin there");
      }
      throw;
    }
  };
  if (resuming) {
    if (!arguments.given.is_null() || arguments.search_lr || !arguments.recipe.empty() || any_mask_option ||
        !arguments.model.empty() || !arguments.weights.empty() || !arguments.branch.empty() || arguments.violin ||
        was_given("--seed") || was_given("--precision") || was_given("--options") || was_given("--config")) {
      throw Usage(
          "--resume: a run keeps its options; only --device, --threads, --workers and, where the images were moved, "
          "--data may be given");
    }
    std::string config;
    if (first) {
      run = std::make_unique<train::RunFolder>(folder, mode);
      const Bytes bytes = read_file(folder / "config.json", std::int64_t{256} << 20);
      config.assign(bytes.begin(), bytes.end());
    }
    train::broadcast_text(*processes, config);
    prepared.task = train::task_from_json(json::parse(config));
    // Sums over other shares round differently, and the run is to go on as it would have. Among another number of
    // processes they do so anyway, and each may have another part of the machine.
    const bool as_begun = prepared.task.threads > 0 && prepared.task.processes == launch.world;
    if (arguments.compute.threads == 0 && as_begun) {
      at::set_num_threads(prepared.task.threads);
      if (first) note("--threads " + std::to_string(at::get_num_threads()) + ", as the run began");
    }
    if (!arguments.data.empty()) prepared.task.data = arguments.data;
    prepared.dataset = train::open_task_data(prepared.task);
    if (first && !arguments.data.empty()) {  // they are the same images: the run remembers where
      ordered_json moved = ordered_json::parse(config);
      moved["data"] = train::to_json(prepared.task).at("data");
      run->write("config.json", moved);
    }
    prepared.model = std::make_shared<nn::VisionTransformer>(prepared.task.model, prepared.task.options.seed);
    if (first && !run->has_checkpoint()) {
      note("'" + folder.string() + "' has no checkpoint yet: starting again");
      if (!prepared.task.weights.empty()) prepared.model = load_initial(*run, prepared.task);
    }
  } else {
    // The folder is checked before anything takes time, and nothing is written before everything fits.
    if (first) train::check_run_folder(folder, mode);
    if (first && request.options.statistics == "data") note("measuring the statistics of the training images");
    prepared = train::prepare(request);
    prepared.task.processes = launch.world;
    if (search_lr) train::search_data(prepared.task, prepared.dataset);  // throws where there are too few images
    ordered_json config = train::to_json(prepared.task);
    config["lr_search"] = search_lr;
    train::expect_same(*processes, nn::json_text(config), "data, model or options are others");
    prepared.task.threads = common_threads(*processes, arguments.compute.threads, compute.device);
    config["threads"] = prepared.task.threads;
    if (first) {
      run = std::make_unique<train::RunFolder>(folder, mode);
      or_as_before([&] {
        // Weights that came from elsewhere are kept until the first checkpoint; config.json makes the folder a run.
        if (!request.weights.empty()) {
          checkpoint::save_model(run->initial_weights(), *prepared.model, prepared.task.preprocessing,
                                 prepared.task.classes);
        }
        run->write("config.json", config);
      });
    }
  }
  if (first) {
    if (launch.several()) note("training with " + processes->describe());
    for (const std::string& line : prepared.task.notes) note(line);
  }

  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  std::signal(SIGUSR1, request_stop);  // what mpirun forwards and Slurm sends before the time is up
  if (std::signal(SIGHUP, request_stop) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // nohup asked to stay
  Report report;
  train::TrainerOptions trainer_options;
  trainer_options.device = compute.device;
  trainer_options.workers = compute.workers;
  Aside aside(process_name(launch));
  trainer_options.listener = first ? static_cast<train::Listener*>(&report) : &aside;
  trainer_options.processes = processes.get();
  trainer_options.stop = &stop_requested;
  // What is said of a failure comes below the bar.
  const auto reported = [&](const auto& work) {
    return or_as_before([&] {
      try {
        return work();
      } catch (...) {
        report.finish();
        throw;
      }
    });
  };
  const auto stopped = [&](const std::string& what) {
    report.finish();
    processes->leave();
    if (!first) return;
    throw Stopped("stopped on request; " + what + " kept: violin " + command + " --resume " +
                  shell_word(folder.string()) + " continues");
  };

  if (train::first_says(*processes,
                        first && !run->has_checkpoint() &&
                            train::read_json_file(folder / "config.json").value("lr_search", json()) == true)) {
    // Every candidate, and a search that was interrupted, begins with the same weights.
    const auto fresh = [&]() -> nn::Model {
      // The others get the first one's weights from their trainer.
      if (!first || prepared.task.weights.empty())
        return std::make_shared<nn::VisionTransformer>(prepared.task.model, prepared.task.options.seed);
      return load_initial(*run, prepared.task);
    };
    const train::RateSearch search = reported(
        [&] { return train::search_rate(prepared.task, prepared.dataset, fresh, run.get(), trainer_options); });
    if (!search.finished) return stopped("learning rates that were tried to the end are");
    begun = true;
    prepared.model = fresh();
    prepared.task.options.lr = search.best;
    if (first) {
      ordered_json chosen = train::to_json(prepared.task);
      chosen["lr_search"] = true;
      run->write("config.json", chosen);
    }
    std::string tied;
    for (const double lr : search.tied) tied += (tied.empty() ? " together with " : ", ") + number_text(lr, "%g");
    if (!tied.empty()) tied += " (the same accuracy, no smaller loss)";
    trainer_options.listener->on_start("learning rate " + number_text(search.best, "%g") + " did best" + tied +
                                       "; training on all images");
  }
  const auto trainer = or_as_before([&] {
    return std::make_unique<train::Trainer>(prepared.task, prepared.dataset, prepared.model, run.get(),
                                            trainer_options);
  });
  if (resuming) trainer->resume();
  const train::Outcome outcome = reported([&] {
    try {
      return trainer->train();
    } catch (const train::NotFinite&) {
      throw;  // it would come to that again
    } catch (const std::exception&) {
      begun = begun || trainer->steps() > 0;  // a full disk, say: the log and the weights to begin with are worth it
      throw;
    }
  });
  if (!outcome.finished) return stopped("everything so far is");
  report.finish();
  processes->leave();
  if (first) print_outcome(outcome, folder, arguments.json);
}

}  // namespace

void run_training(const CLI::App& verb, const std::string& command, const TrainingArguments& arguments,
                  const std::string& default_recipe) {
  // Who reads along may go first, as tee does that Ctrl-C ends too: messages get lost then, the run does not.
  std::signal(SIGPIPE, SIG_IGN);
  const train::Launch launch = train::find_launch();
  std::unique_ptr<train::Processes> processes;
  try {
    train_together(verb, command, arguments, default_recipe, launch, processes);
  } catch (const Stopped&) {
    throw;
  } catch (const std::exception& error) {
    if (!launch.several()) throw;
    // As a rule all fail alike, and the first one, which ends the others, speaks for them.
    const int code = dynamic_cast<const Usage*>(&error) != nullptr ? kWrongUsage : kFailed;
    if (launch.rank > 0) std::this_thread::sleep_for(std::chrono::seconds(2));
    note("violin " + command + ": " + process_name(launch) + ": " + message_of(error));
    if (processes) processes->abort(code);
    std::_Exit(code);
  }
}

}  // namespace violin::cli
