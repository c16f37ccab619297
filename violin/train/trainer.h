// The training loop.
//
// A run is a function of its configuration: order, augmentation, mixing and stochastic depth follow from (seed, epoch,
// position), so that an interrupted and resumed run goes through the same steps as one that was never interrupted, on
// the CPU bit for bit.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "violin/data/loader.h"
#include "violin/data/mixup.h"
#include "violin/error.h"
#include "violin/nn/precision.h"
#include "violin/train/adamw.h"
#include "violin/train/device_feed.h"
#include "violin/train/evaluate.h"
#include "violin/train/processes.h"
#include "violin/train/run_folder.h"
#include "violin/train/task.h"

namespace violin::train {

// What the loop tells while it works; everything is optional.
class Listener {
 public:
  struct Step {
    std::int64_t epoch = 0, epochs = 0;
    std::int64_t batch = 0, batches = 0;  // within the epoch
    std::int64_t images = 0;              // of this step, of all processes
    double loss = 0;                      // mean of the epoch so far, as far as known
    double lr = 0;
  };
  struct Epoch {
    std::int64_t epoch = 0, epochs = 0;
    double train_loss = 0;
    double lr = 0;
    double images_per_second = 0;
    std::optional<Metrics> val;
    bool best = false;
    double seconds = 0;  // of the run so far
  };
  virtual ~Listener() = default;
  virtual void on_start(const std::string& /*what*/) {}
  virtual void on_step(const Step& /*step*/) {}
  virtual void on_evaluation(std::int64_t /*images*/) {}  // so many are about to be evaluated
  virtual void on_epoch(const Epoch& /*epoch*/) {}
  virtual void on_message(const std::string& /*line*/) {}
};

struct TrainerOptions {
  c10::Device device = c10::kCPU;
  int workers = 2;
  Processes* processes = nullptr;  // null: alone
  Listener* listener = nullptr;
  const std::atomic<bool>* stop = nullptr;  // set by a signal: finish the step, save, return
  std::int64_t stop_after_steps = 0;        // for tests: the same after so many steps of this call; 0: never
};

struct Outcome {
  bool finished = false;  // false: stopped on request, resumable
  std::int64_t epochs = 0;
  std::int64_t steps = 0;
  double train_loss = 0;       // of the last epoch
  std::optional<Metrics> val;  // of the last evaluation
  double best_top1 = 0;
  std::int64_t best_epoch = -1;  // counted from 0; -1: val was never evaluated
  std::optional<Metrics> test;   // of the best weights, where the data have a test split
  std::int64_t skipped = 0;      // training images that could not be read
  double images_per_second = 0;  // of training, evaluation aside
  double seconds = 0;
};

// Loss, gradient or weights are no longer finite; what was saved before is good.
class NotFinite : public Error {
 public:
  using Error::Error;
};

class Trainer {
 public:
  // `run` may be null: nothing is written then. Of several processes the first alone has one; the others get from it
  // what it reads there.
  Trainer(Task task, data::Dataset dataset, nn::Model model, RunFolder* run, const TrainerOptions& options);
  ~Trainer();

  // Goes on from the run's last checkpoint: weights, optimiser, average, position, generators.
  void resume();
  Outcome train();

  const nn::Model& model() const { return model_; }
  std::int64_t steps() const { return state_.step; }  // of all calls

 private:
  struct State {
    std::int64_t epoch = 0;
    std::int64_t batch = 0;  // of the epoch, the next one
    std::int64_t step = 0;   // of all epochs
    double loss_sum = 0;     // of this epoch
    std::int64_t seen = 0;   // of this epoch, images of all processes whose losses are in the sum
    double norm_sum = 0;
    double best_top1 = -1;
    std::int64_t best_epoch = -1;
    double seconds = 0;  // of earlier calls
    double train_seconds = 0;
    std::int64_t trained_images = 0;
  };
  bool train_epoch();  // false: stopped
  void step(const data::Batch& batch);
  at::Tensor forward_backward(const at::Tensor& images, const at::Tensor& labels, const at::Tensor& targets,
                              const at::Tensor& draws);
  at::Tensor drop_draws(std::int64_t own) const;
  void collect_skipped();                                           // of all processes, which all call it
  bool end_epoch(double epoch_seconds, std::int64_t epoch_images);  // false: stopped while it was evaluated
  // What a process wants done after a step; with several, what any of them wants.
  struct Wishes {
    bool stop = false;
    bool save = false;
  };
  Wishes own_wishes() const;
  // Device-side sums of all processes into state_, and their wishes into one; throws where a step was not finite.
  Wishes collect(Wishes wishes);
  [[noreturn]] void not_finite(const std::string& what) const;
  void require_finite_weights() const;
  // Names broken images of an evaluation, once; throws where no image could be read.
  void check_readable(const Evaluation& evaluation, const char* split, std::int64_t images);
  void seed_generators();
  void share_weights(nn::VisionTransformer& model) const;
  std::string read_checkpoint();  // returns its state.json
  void save();
  void save_weights(const std::filesystem::path& path, nn::VisionTransformer& model) const;
  [[noreturn]] void explain_memory(const c10::Error& reason, std::int64_t batch);
  EvaluateOptions evaluate_options() const;
  double seconds_now() const;
  double rate_at(std::int64_t step) const;
  Processes& processes() const;

  Task task_;
  data::Dataset dataset_;
  nn::Model model_;
  RunFolder* run_;
  TrainerOptions options_;
  Processes alone_;
  std::int64_t own_batch_, batches_;
  nn::Precision precision_;
  std::unique_ptr<data::Sampler> sampler_;
  std::unique_ptr<data::Loader> loader_;
  std::unique_ptr<DeviceFeed> feed_;
  std::unique_ptr<Evaluator> evaluator_;
  std::unique_ptr<data::Mixup> mixup_;
  std::unique_ptr<AdamW> optimizer_;
  std::vector<std::string> average_names_;
  nn::Model average_model_;                     // where an average is kept
  std::vector<at::Tensor> average_, averaged_;  // its weights and what they follow
  at::Tensor class_weights_;
  at::Tensor loss_sum_, norm_sum_, bad_;   // on the device since the last collect()
  std::int64_t seen_ = 0;                  // since then, images of all processes
  bool stop_wished_ = false;               // by any process, in the last step
  std::int64_t steps_now_ = 0;             // of this call
  std::set<std::int64_t> skipped_;         // broken images of train by position, of all processes and calls
  std::set<std::string> reported_splits_;  // whose images were named
  State state_;
  std::optional<Metrics> val_;
  double train_loss_ = 0;
  std::chrono::steady_clock::time_point start_, saved_;
  double save_seconds_ = 0;       // that the last checkpoint took
  std::int64_t saved_step_ = -1;  // that it was written after
};

}  // namespace violin::train
