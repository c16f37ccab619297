#include "cli/training.h"

#include <torch/cuda.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <type_traits>

#include "cli/common.h"
#include "cli/progress.h"
#include "cli/training_request.h"
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
  // The work whose time is told begins now.
  void begin() { start_ = std::chrono::steady_clock::now(); }
  void on_start(const std::string& what) override {
    progress_.reset();
    note(what);
    val_.clear();
    begin();
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
  std::chrono::steady_clock::time_point start_;  // before the first step
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

// A run of one or several processes, from its folder to its end.
class Session {
 public:
  // `processes` is set once they have met, and outlives this.
  Session(const TrainingPlan& plan, const TrainingArguments& arguments, const train::Launch& launch,
          std::unique_ptr<train::Processes>& processes)
      : plan_(plan),
        arguments_(arguments),
        launch_(launch),
        compute_(start_compute(share_of_machine(arguments.compute, launch))),
        processes_(*(processes = train::join_processes(launch, compute_.device, train::answer_timeout()))),
        first_(processes_.first()),
        begun_(plan.resuming),
        aside_(process_name(launch)) {
    trainer_options_.device = compute_.device;
    trainer_options_.workers = compute_.workers;
    trainer_options_.listener = first_ ? static_cast<train::Listener*>(&report_) : &aside_;
    trainer_options_.processes = &processes_;
    trainer_options_.stop = &stop_requested;
  }

  void run() {
    plan_.resuming ? reopen() : begin();
    if (first_) {
      if (launch_.several()) note("training with " + processes_.describe());
      for (const std::string& line : prepared_.task.notes) note(line);
    }
    std::signal(SIGINT, request_stop);
    std::signal(SIGTERM, request_stop);
    std::signal(SIGUSR1, request_stop);  // what mpirun forwards and Slurm sends before the time is up
    if (std::signal(SIGHUP, request_stop) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // nohup asked to stay
    report_.begin();
    if (!find_rate()) return leave("learning rates that were tried to the end are");
    const train::Outcome outcome = train();
    if (!outcome.finished) return leave("everything so far is");
    report_.finish();
    processes_.leave();
    if (first_) print_outcome(outcome, plan_.folder, arguments_.json);
  }

 private:
  const std::filesystem::path& folder() const { return plan_.folder; }

  // The folder is checked before anything takes time, and nothing is written before everything fits.
  void begin() {
    const auto mode = arguments_.force ? train::RunFolder::Mode::kReplace : train::RunFolder::Mode::kNew;
    if (first_) train::check_run_folder(folder(), mode);
    if (first_ && plan_.request.options.statistics == "data") note("measuring the statistics of the training images");
    if (first_ && compute_.device.is_cuda() && !plan_.precision_given)
      note("computing in " + plan_.request.options.precision + "; --precision bf16 is several times as fast on GPUs");
    prepared_ = train::prepare(plan_.request);
    train::Task& task = prepared_.task;
    if (plan_.search_lr) train::search_data(task, prepared_.dataset);  // throws where there are too few images
    ordered_json config = train::to_json(task);
    config["lr_search"] = plan_.search_lr;
    train::expect_same(processes_, nn::json_text(config), "data, model or options are others");
    task.threads = common_threads(processes_, arguments_.compute.threads, compute_.device);
    config["threads"] = task.threads;
    if (!first_) return;
    run_ = std::make_unique<train::RunFolder>(folder(), mode);
    or_as_before([&] {
      // Weights that came from elsewhere are kept until the first checkpoint; config.json makes the folder a run.
      if (!task.weights.empty())
        checkpoint::save_model(run_->initial_weights(), *prepared_.model, task.preprocessing, task.classes);
      run_->write("config.json", config);
    });
  }

  void reopen() {
    std::string config;
    if (first_) {
      run_ = std::make_unique<train::RunFolder>(folder(), train::RunFolder::Mode::kResume);
      const Bytes bytes = read_file(folder() / "config.json", std::int64_t{256} << 20);
      config.assign(bytes.begin(), bytes.end());
    }
    train::broadcast_text(processes_, config);
    prepared_.task = train::task_from_json(json::parse(config));
    train::Task& task = prepared_.task;
    // Sums over other shares round differently, and the run is to go on as it would have. Among another number of
    // processes they do so anyway, and each may have another part of the machine.
    if (arguments_.compute.threads == 0 && task.threads > 0 && task.processes == launch_.world) {
      at::set_num_threads(task.threads);
      if (first_) note("--threads " + std::to_string(at::get_num_threads()) + ", as the run began");
    }
    if (!arguments_.data.empty()) task.data = arguments_.data;
    prepared_.dataset = train::open_task_data(task);
    if (first_ && !arguments_.data.empty()) {  // they are the same images: the run remembers where
      ordered_json moved = ordered_json::parse(config);
      moved["data"] = train::to_json(task).at("data");
      run_->write("config.json", moved);
    }
    prepared_.model = std::make_shared<nn::VisionTransformer>(task.model, task.options.seed);
    if (first_ && !run_->has_checkpoint()) {
      if (!searches()) note("'" + folder().string() + "' has no checkpoint yet: starting again");
      if (!task.weights.empty()) prepared_.model = load_initial(*run_, task);
    }
  }

  // Of the first process.
  bool searches() const {
    return !run_->has_checkpoint() &&
           train::read_json_file(folder() / "config.json").value("lr_search", json()) == true;
  }

  // Every candidate, and a search that was interrupted, begins with the same weights.
  nn::Model fresh() const {
    // The others get the first one's weights from their trainer.
    if (!first_ || prepared_.task.weights.empty())
      return std::make_shared<nn::VisionTransformer>(prepared_.task.model, prepared_.task.options.seed);
    return load_initial(*run_, prepared_.task);
  }

  // The learning rate, where it is to be found. False: stopped on request.
  bool find_rate() {
    if (!train::first_says(processes_, first_ && searches())) return true;
    const train::RateSearch search = reported([&] {
      try {
        return train::search_rate(
            prepared_.task, prepared_.dataset, [&] { return fresh(); }, run_.get(), trainer_options_);
      } catch (const train::NotFinite&) {
        begun_ = false;  // no rate did: nothing to go on from
        throw;
      }
    });
    if (!search.finished) return false;
    begun_ = true;
    prepared_.model = fresh();
    prepared_.task.options.lr = search.best;
    if (first_) {
      ordered_json chosen = train::to_json(prepared_.task);
      chosen["lr_search"] = true;
      run_->write("config.json", chosen);
    }
    std::string tied;
    for (const double lr : search.tied) tied += (tied.empty() ? " together with " : ", ") + number_text(lr, "%g");
    if (!tied.empty()) tied += " (the same accuracy, no smaller loss)";
    trainer_options_.listener->on_start("learning rate " + number_text(search.best, "%g") + " did best" + tied +
                                        "; training on all images");
    return true;
  }

  train::Outcome train() {
    const auto trainer = or_as_before([&] {
      return std::make_unique<train::Trainer>(prepared_.task, prepared_.dataset, prepared_.model, run_.get(),
                                              trainer_options_);
    });
    if (plan_.resuming) trainer->resume();
    return reported([&] {
      try {
        return trainer->train();
      } catch (const train::NotFinite&) {
        throw;  // it would come to that again
      } catch (const std::exception&) {
        begun_ =
            begun_ || trainer->steps() > 0;  // a full disk, say: the log and the weights to begin with are worth it
        throw;
      }
    });
  }

  void leave(const std::string& what) {
    report_.finish();
    processes_.leave();
    if (!first_) return;
    throw Stopped("stopped on request; " + what + " kept: violin " + plan_.command + " --resume " +
                  shell_word(folder().string()) + " continues");
  }

  // What is said of a failure comes below the bar.
  template <typename Work>
  std::invoke_result_t<const Work&> reported(const Work& work) {
    return or_as_before([&] {
      try {
        return work();
      } catch (...) {
        report_.finish();
        throw;
      }
    });
  }

  // What fails before there is anything to go on from brings back the run that would have been replaced, or leaves the
  // folder to another try: with a smaller batch or rate, as the message may say, or other images.
  template <typename Work>
  std::invoke_result_t<const Work&> or_as_before(const Work& work) {
    try {
      return work();
    } catch (const Stopped&) {
      throw;
    } catch (const std::exception&) {
      if (run_) put_back();
      throw;
    }
  }

  void put_back() const {
    const std::string name = "'" + folder().string() + "'";
    if (run_->replaces() && begun_) {
      note("the run that was in " + name + " before is in '" + (folder() / ".replaced").string() +
           "' until this one has a checkpoint after a step");
    } else if (run_->replaces()) {
      try {
        run_->discard();
        note("the run that was in " + name + " before is still there");
      } catch (const Error& problem) {
        note(message_of(problem));  // and what failed first is what counts
      }
    } else if (!begun_ && !run_->has_steps() && !std::filesystem::exists(folder() / "lr_search.json")) {
      run_->discard();
      note("what this run wrote to " + name + " was removed; another may begin there");
    }
  }

  const TrainingPlan& plan_;
  const TrainingArguments& arguments_;
  const train::Launch& launch_;
  Compute compute_;
  train::Processes& processes_;
  bool first_;
  bool begun_;                             // the folder holds work
  std::unique_ptr<train::RunFolder> run_;  // of the first process
  train::Prepared prepared_;
  Report report_;
  Aside aside_;
  train::TrainerOptions trainer_options_;
};

}  // namespace

void run_training(const CLI::App& verb, const std::string& command, const TrainingArguments& arguments,
                  const std::string& default_recipe) {
  // Who reads along may go first, as tee does that Ctrl-C ends too: messages get lost then, the run does not.
  std::signal(SIGPIPE, SIG_IGN);
  const train::Launch launch = train::find_launch();
  std::unique_ptr<train::Processes> processes;
  try {
    TrainingPlan plan = plan_training(verb, command, arguments, default_recipe);
    plan.request.processes = launch.world;
    Session(plan, arguments, launch, processes).run();
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
