#include "violin/train/trainer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "violin/checkpoint/model_file.h"
#include "violin/nn/memory.h"
#include "violin/train/distributed.h"
#include "violin/train/model_card.h"

namespace violin::train {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

constexpr std::int64_t kLogSteps = 50;      // between lines of the log within an epoch
constexpr std::int64_t kCollectSteps = 20;  // between looks at what a GPU has summed up
constexpr double kPauseFactor = 20;  // a checkpoint at the end of an epoch waits for so many times what the last took

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// An image of the set; broken ones are passed over where that is allowed.
Image first_readable(const data::SampleSet& set, data::OnBadImage policy) {
  for (std::int64_t i = 0;; ++i) {
    try {
      return set.decode(i);
    } catch (const Error& error) {
      if (policy == data::OnBadImage::kFatal) throw;
      if (i + 1 >= set.size())
        throw Error("none of the " + std::to_string(set.size()) + " images of train can be read: " + error.what());
    }
  }
}

}  // namespace

Trainer::Trainer(Task task, data::Dataset dataset, nn::Model model, RunFolder* run, const TrainerOptions& options)
    : task_(std::move(task)),
      dataset_(std::move(dataset)),
      model_(std::move(model)),
      run_(run),
      options_(options),
      precision_(nn::parse_precision(task_.options.precision)) {
  const Options& o = task_.options;
  const std::int64_t world = processes().world();
  if (o.batch_size % world != 0) {
    throw Error("option batch_size is " + std::to_string(o.batch_size) + "; expected a multiple of the " +
                std::to_string(world) + " processes");
  }
  own_batch_ = o.batch_size / world;
  choose_trainable(*model_, o.train_what);
  model_->to(options_.device);
  model_->train();
  share_weights(*model_);

  data::SamplerOptions sampling;
  sampling.seed = o.seed;
  sampling.balanced = o.balanced;
  sampling.repeats = o.repeats;
  sampling.batch = own_batch_;
  sampling.rank = processes().rank();
  sampling.world = world;
  // Fewer images than a batch: one smaller batch per epoch. Several processes must have equal shares of it.
  sampling.drop_last = dataset_.train.size() >= o.batch_size || world > 1;
  sampler_ = std::make_unique<data::Sampler>(dataset_.train.size(), sampling, dataset_.train.labels());
  batches_ = sampler_->batches();

  data::LoaderOptions loading;
  loading.workers = options_.workers;
  loading.on_bad_image = data::parse_on_bad_image(o.on_bad_image);
  loading.replace_bad = true;
  loading.cache_bytes = o.cache_mb << 20;
  loading.pin = options_.device.is_cuda();
  loading.seed = o.seed;
  const Image first = first_readable(dataset_.train, loading.on_bad_image);
  const data::TrainOptions augmentation = train_transform(o, task_.preprocessing, first);
  loader_ =
      std::make_unique<data::Loader>(dataset_.train, std::make_shared<data::TrainTransform>(augmentation), loading);
  feed_ = std::make_unique<DeviceFeed>(*loader_, options_.device);

  data::MixupOptions mixing;
  mixing.mixup = o.mixup;
  mixing.cutmix = o.cutmix;
  mixing.probability = o.mix_probability;
  mixing.smoothing = o.smoothing;
  mixing.classes = task_.model.num_classes;
  mixing.seed = o.seed;
  mixup_ = std::make_unique<data::Mixup>(mixing);

  if (!dataset_.val.empty()) {
    EvaluateOptions evaluating = evaluate_options();
    evaluating.cache_bytes = (o.cache_mb << 20) / 4;
    evaluator_ = std::make_unique<Evaluator>(dataset_.val, task_.preprocessing, evaluating, &processes());
  }
  if (o.class_weights == "inverse") {
    class_weights_ =
        at::tensor(data::class_weights(dataset_.train.class_counts()), at::kDouble).to(options_.device, at::kFloat);
  }
  optimizer_ = std::make_unique<AdamW>(parameter_groups(*model_, o), o);
  // Gradients come from the last parameter to the first, but for those of masks, which all layers get in the end.
  std::vector<at::Tensor> watched, others;
  for (const auto& parameter : model_->named_parameters()) {
    if (!parameter.value().requires_grad()) continue;
    (nn::is_mask_parameter(parameter.key()) ? watched : others).push_back(parameter.value());
  }
  watched.insert(watched.end(), others.begin(), others.end());
  processes().watch(watched);
  if (o.ema > 0) {
    const torch::NoGradGuard no_grad;
    average_model_ = std::make_shared<nn::VisionTransformer>(task_.model, nn::Uninitialised{});
    average_model_->to(options_.device);
    for (const auto& [name, tensor] : nn::state(*average_model_)) average_.push_back(tensor.detach());
    for (const auto& [name, tensor] : nn::state(*model_)) {
      average_names_.push_back(name);
      averaged_.push_back(tensor.detach());
      average_[averaged_.size() - 1].copy_(tensor);
    }
  }
  const at::TensorOptions sums = at::TensorOptions(options_.device).dtype(at::kDouble);
  loss_sum_ = at::zeros({}, sums);
  norm_sum_ = at::zeros({}, sums);
  bad_ = at::zeros({}, sums.dtype(at::kFloat));
}

Trainer::~Trainer() = default;

EvaluateOptions Trainer::evaluate_options() const {
  EvaluateOptions evaluating;
  evaluating.batch_size = std::max<std::int64_t>(1, own_batch_ / task_.options.accumulate);
  evaluating.workers = options_.workers;
  evaluating.device = options_.device;
  evaluating.precision = precision_;
  evaluating.on_bad_image = data::parse_on_bad_image(task_.options.on_bad_image);
  evaluating.stop = options_.stop;
  return evaluating;
}

Processes& Trainer::processes() const {
  return options_.processes != nullptr ? *options_.processes : const_cast<Processes&>(alone_);
}

// Everybody gets the first one's.
void Trainer::share_weights(nn::VisionTransformer& model) const {
  if (processes().world() == 1) return;
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : nn::state(model)) {
    at::Tensor values = tensor.detach();
    processes().broadcast(values);
  }
}

double Trainer::seconds_now() const {
  return state_.seconds + since(start_);
}

double Trainer::rate_at(std::int64_t step) const {
  const Options& o = task_.options;
  Cosine cosine;
  cosine.base = o.peak_lr();
  cosine.t_initial = static_cast<double>(o.epochs);
  cosine.lr_min = std::min(o.min_lr, cosine.base);
  // A run that is shorter than its warm-up would never leave it.
  cosine.warmup_t = std::min(o.warmup_epochs, static_cast<double>(o.epochs) / 2);
  cosine.warmup_lr_init = std::min(o.warmup_lr, cosine.base);
  return cosine.at(static_cast<double>(step) / static_cast<double>(batches_));
}

// Uniform numbers [2*depth, own], each drawn for a sample's place in the whole batch.
at::Tensor Trainer::drop_draws(std::int64_t own) const {
  const std::int64_t rows = 2 * task_.model.depth, world = processes().world(), rank = processes().rank();
  // From page-locked memory a GPU copies without stopping this thread.
  const at::Tensor draws =
      at::empty({rows, own}, at::TensorOptions(at::kFloat).pinned_memory(options_.device.is_cuda()));
  auto* values = draws.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < own; ++i) {
    data::Random random(task_.options.seed, data::Purpose::kDepth, {state_.step, i * world + rank});
    for (std::int64_t row = 0; row < rows; ++row) values[row * own + i] = static_cast<float>(random.uniform());
  }
  return draws;
}

// Sums the gradients of the whole batch, pass by pass; returns the mean loss.
at::Tensor Trainer::forward_backward(const at::Tensor& images, const at::Tensor& labels, const at::Tensor& targets,
                                     const at::Tensor& draws) {
  const std::int64_t batch = images.size(0);
  const std::int64_t passes = std::min(task_.options.accumulate, batch);
  const at::Tensor weight_of_image =
      class_weights_.defined() && !targets.defined() ? class_weights_.index_select(0, labels) : at::Tensor();
  at::Tensor whole;  // mean over the processes of their images' weights
  if (weight_of_image.defined()) {
    whole = weight_of_image.sum().to(at::kDouble);
    if (processes().world() > 1) {
      processes().sum(whole);
      whole /= static_cast<double>(processes().world());
    }
  }
  at::Tensor total = at::zeros({}, images.options().dtype(at::kFloat));
  for (std::int64_t pass = 0; pass < passes; ++pass) {
    const std::int64_t begin = pass * batch / passes, count = (pass + 1) * batch / passes - begin;
    if (pass + 1 == passes) processes().before_backward();
    if (draws.defined()) model_->set_drop_draws(draws.narrow(1, begin, count));
    at::Tensor loss;
    {
      const nn::PrecisionScope precision(options_.device.type(), precision_);
      const at::Tensor logits = model_->forward(images.narrow(0, begin, count));
      loss = targets.defined()
                 ? soft_target_loss(logits, targets.narrow(0, begin, count), class_weights_)
                 : label_loss(logits, labels.narrow(0, begin, count), task_.options.smoothing, class_weights_);
    }
    // The loss of labels is a mean over the weights of its images.
    if (whole.defined()) {
      loss = loss * (weight_of_image.narrow(0, begin, count).sum() / whole).to(loss.scalar_type());
    } else {
      loss = loss * (static_cast<double>(count) / static_cast<double>(batch));
    }
    loss.backward();
    total += loss.detach();
  }
  return total;
}

void Trainer::step(const data::Batch& batch) {
  const Options& o = task_.options;
  const at::Tensor& images = batch.images;  // on the device
  const at::Tensor& labels = batch.labels;
  at::Tensor targets;
  if (mixup_->active()) {
    const std::int64_t number = state_.batch * processes().world() + processes().rank();
    targets = mixup_->apply(images, labels, state_.epoch, number);
  }
  const bool drops = o.drop_path > 0;
  const at::Tensor draws = drops ? drop_draws(batch.size()).to(options_.device, /*non_blocking=*/true) : at::Tensor();
  optimizer_->clear_gradients();
  at::Tensor loss;
  try {
    loss = forward_backward(images, labels, targets, draws);
  } catch (const c10::Error& error) {
    if (!nn::out_of_memory(error)) throw;
    processes().cancel();
    explain_memory(error, batch.size());
  }
  processes().gradients_done();
  const at::Tensor norm = optimizer_->clip_gradients(o.clip_grad);
  const at::Tensor wrong = at::logical_not(at::isfinite(loss + norm)).to(at::kFloat);
  const double lr = rate_at(state_.step);
  if (options_.device.is_cpu()) {
    // Waiting costs nothing here: nothing changes when the step is no good.
    bad_ += wrong;
    if (wrong.item<float>() == 0) optimizer_->step(lr);
  } else {
    bad_ += wrong;
    optimizer_->step(lr, wrong);
  }
  loss_sum_ += loss.to(at::kDouble) * static_cast<double>(batch.size());
  norm_sum_ += norm.to(at::kDouble);
  seen_ += batch.size() * processes().world();
  if (o.ema > 0) update_average(average_, averaged_, o.ema);
  ++state_.step;
  ++state_.batch;
  ++steps_now_;
}

Trainer::Wishes Trainer::own_wishes() const {
  Wishes wishes;
  wishes.stop = options_.stop != nullptr && options_.stop->load();
  wishes.save = run_ != nullptr && task_.options.save_minutes > 0 && since(saved_) > 60 * task_.options.save_minutes;
  return wishes;
}

Trainer::Wishes Trainer::collect(Wishes wishes) {
  at::Tensor sums = at::stack({loss_sum_, norm_sum_, bad_.to(at::kDouble)});
  if (processes().world() > 1) {
    sums = at::cat({sums, at::tensor({wishes.stop ? 1.0 : 0.0, wishes.save ? 1.0 : 0.0}, sums.options())});
    processes().sum(sums);
  }
  sums = sums.to(at::kCPU);
  const double bad = sums[2].item<double>();
  if (bad > 0) not_finite("the loss or its gradient");
  state_.loss_sum += sums[0].item<double>();
  state_.norm_sum += sums[1].item<double>() / static_cast<double>(processes().world());
  state_.seen += std::exchange(seen_, 0);
  loss_sum_.zero_();
  norm_sum_.zero_();
  if (sums.numel() == 3) return wishes;
  return {.stop = sums[3].item<double>() > 0, .save = sums[4].item<double>() > 0};
}

void Trainer::not_finite(const std::string& what) const {
  throw NotFinite(what + " is no longer finite in epoch " + std::to_string(state_.epoch + 1) + " before step " +
                  std::to_string(state_.step) + "; " +
                  (run_ != nullptr && run_->has_steps() ? "the last checkpoint is good; " : "") +
                  "lower the learning rate (--lr " + ordered_json(task_.options.peak_lr() / 4).dump() +
                  "), clip gradients (--clip-grad 1) or take --precision fp32");
}

// A step with a finite gradient can still end in weights that are not.
void Trainer::require_finite_weights() const {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> weights;
  for (const auto& [name, tensor] : nn::state(*model_)) weights.push_back(tensor.detach());
  const std::vector<at::Tensor> largest = at::_foreach_norm(weights, std::numeric_limits<double>::infinity());
  if (at::isfinite(at::stack(largest)).all().item<bool>()) return;
  if (state_.step == 0) throw Error("the initial weights hold numbers that are not finite; start from others");
  not_finite("a weight of the model");
}

void Trainer::check_readable(const Evaluation& evaluation, const char* split, std::int64_t images) {
  const std::vector<data::BadImage>& bad = evaluation.bad_images;
  if (evaluation.metrics.images == 0 && images > 0) {
    throw Error(std::string("none of the ") + std::to_string(images) + " images of " + split + " can be read" +
                (bad.empty() ? "" : ": " + bad.front().message));
  }
  if (options_.listener == nullptr || !reported_splits_.insert(split).second) return;
  for (const data::BadImage& image : bad)
    options_.listener->on_message(std::string("skipped a bad image of ") + split + ": " + image.message);
}

void Trainer::explain_memory(const c10::Error& reason, std::int64_t batch) {
  const Options& o = task_.options;
  const std::int64_t tried = (batch + o.accumulate - 1) / o.accumulate;
  const auto [height, width] = task_.preprocessing.size;
  model_->set_drop_draws({});  // those of the pass that failed
  const std::int64_t fits = nn::images_that_fit(tried, [&](std::int64_t images) {
    optimizer_->clear_gradients();
    const at::Tensor values =
        at::zeros({images, task_.model.in_chans, height, width}, at::TensorOptions(options_.device).dtype(at::kFloat));
    for (int pass = 0; pass < 2; ++pass) {  // the second has gradients beside it
      const nn::PrecisionScope precision(options_.device.type(), precision_);
      model_->forward(values).sum().backward();
    }
  });
  optimizer_->clear_gradients();
  const std::int64_t passes = fits < 1 ? 0 : (batch + fits - 1) / fits;
  nn::explain_memory(reason, tried, fits,
                     "take --batch-size " + std::to_string(fits * o.accumulate * processes().world()) +
                         ", or --accumulate " + std::to_string(passes) + " for the same batch in " +
                         (o.accumulate > 1 ? "more" : "several") + " passes");
}

bool Trainer::train_epoch() {
  const std::int64_t epoch = state_.epoch;
  loader_->start(sampler_->epoch(epoch), own_batch_, epoch, state_.batch);
  feed_->restart();
  const auto begin = Clock::now();
  std::int64_t images = 0;
  const auto record = [&] {
    state_.train_seconds += since(begin);
    state_.trained_images += images * processes().world();
  };
  while (std::optional<data::Batch> batch = feed_->next()) {
    step(*batch);
    images += batch->size();
    const bool last = state_.batch >= batches_;
    // Several processes act on wishes in the same step: where they collect anyway.
    Wishes wishes = own_wishes();
    const bool logs = state_.step % kLogSteps == 0;
    if (options_.device.is_cpu() || state_.step % kCollectSteps == 0 || logs || last) {
      wishes = collect(wishes);
    } else if (processes().world() > 1) {
      wishes = {};
    }
    stop_wished_ = wishes.stop;
    if (options_.listener != nullptr) {
      const double loss = state_.seen > 0 ? state_.loss_sum / static_cast<double>(state_.seen) : std::nan("");
      options_.listener->on_step({epoch, task_.options.epochs, state_.batch, batches_,
                                  batch->size() * processes().world(), loss, rate_at(state_.step - 1)});
    }
    if (run_ != nullptr && logs) {
      run_->log({{"type", "step"},
                 {"step", state_.step},
                 {"epoch", epoch},
                 {"lr", rate_at(state_.step - 1)},
                 {"train_loss", state_.loss_sum / static_cast<double>(state_.seen)}});
    }
    const bool enough = options_.stop_after_steps > 0 && steps_now_ >= options_.stop_after_steps;
    if ((wishes.stop || enough) && !last) {
      record();
      collect({});
      collect_skipped();
      save();
      return false;
    }
    if (wishes.save && !last) {
      collect({});
      collect_skipped();
      save();
    }
  }
  record();
  return end_epoch(since(begin), images * processes().world());
}

void Trainer::collect_skipped() {
  for (const data::BadImage& bad : loader_->bad_images())
    if (skipped_.insert(bad.index).second && options_.listener != nullptr)
      options_.listener->on_message("skipped a bad image: " + bad.message);
  if (processes().world() == 1) return;
  const std::vector<std::int64_t> own(skipped_.begin(), skipped_.end());
  at::Tensor all = at::zeros({dataset_.train.size()}, at::kFloat);
  all.index_fill_(0, at::tensor(own, at::kLong), 1);
  all = all.to(options_.device);
  processes().sum(all);
  const at::Tensor found = all.to(at::kCPU).nonzero().contiguous();
  skipped_.insert(found.const_data_ptr<std::int64_t>(), found.const_data_ptr<std::int64_t>() + found.numel());
}

bool Trainer::end_epoch(double epoch_seconds, std::int64_t epoch_images) {
  const Options& o = task_.options;
  const std::int64_t epoch = state_.epoch;
  train_loss_ = state_.loss_sum / static_cast<double>(std::max<std::int64_t>(state_.seen, 1));
  const bool due = (epoch + 1) % o.eval_every == 0 || epoch + 1 == o.epochs;
  bool best = false;
  std::optional<Metrics> val;
  require_finite_weights();  // before they take the place of good ones
  collect_skipped();
  if (evaluator_ && due) {
    if (options_.listener != nullptr) options_.listener->on_evaluation(evaluator_->images());
    const Evaluation evaluation = evaluator_->run(*model_);
    if (evaluation.stopped) {
      save();  // after the last batch of the epoch: what comes next is to evaluate it
      return false;
    }
    check_readable(evaluation, "val", dataset_.val.size());
    val = evaluation.metrics;
    if (!std::isfinite(val->loss)) not_finite("the loss on val");
    val_ = val;
    best = val->top1 > state_.best_top1;
    if (best) {
      state_.best_top1 = val->top1;
      state_.best_epoch = epoch;
    }
  }
  // Of all epochs where this one was trained by a call that was stopped.
  const double speed = epoch_images > 0 && epoch_seconds > 0 ? static_cast<double>(epoch_images) / epoch_seconds
                       : state_.train_seconds > 0 ? static_cast<double>(state_.trained_images) / state_.train_seconds
                                                  : 0;
  if (run_ != nullptr) {
    ordered_json line = {
        {"type", "epoch"},
        {"epoch", epoch},
        {"step", state_.step},
        {"lr", rate_at(state_.step - 1)},
        {"train_loss", train_loss_},
        {"gradient_norm", state_.norm_sum / static_cast<double>(std::max<std::int64_t>(state_.batch, 1))}};
    if (val) {
      line["val_loss"] = val->loss;
      line["val_top1"] = val->top1;
      line["val_top5"] = val->top5;
    }
    line["images_per_second"] = speed;
    line["seconds"] = seconds_now();
    run_->log(line);
    if (best) {
      save_weights(run_->best_weights(), *model_);
      if (average_model_) save_weights(run_->best_weights().parent_path() / "ema.safetensors", *average_model_);
    }
  }
  if (options_.listener != nullptr) {
    options_.listener->on_epoch(
        {epoch, o.epochs, train_loss_, rate_at(state_.step - 1), speed, val, best, seconds_now()});
  }
  ++state_.epoch;
  state_.batch = 0;
  state_.loss_sum = 0;
  state_.norm_sum = 0;
  state_.seen = 0;
  // Epochs over a few images are shorter than it takes to write them down.
  if (best || state_.epoch >= o.epochs || since(saved_) >= kPauseFactor * save_seconds_) save();
  return true;
}

Outcome Trainer::train() {
  start_ = saved_ = Clock::now();
  const Options& o = task_.options;
  if (state_.step == 0) {
    // Fresh draws for dropout, whatever happened in this process before.
    seed_generators();
    save();
  }
  // A run that was finished before is measured again and stays as it is.
  const std::optional<nlohmann::json> earlier =
      state_.epoch >= o.epochs && run_ != nullptr ? readable_object(run_->path() / "result.json") : std::nullopt;
  const bool was_finished = earlier.has_value();
  if (was_finished && options_.listener != nullptr)
    options_.listener->on_message("'" + run_->path().string() + "' is finished: nothing is left to train");
  Outcome outcome;
  outcome.finished = true;
  while (state_.epoch < o.epochs) {
    if (!train_epoch()) {
      outcome.finished = false;
      break;
    }
    // A signal that came with the last step of an epoch.
    const bool alone = processes().world() == 1;
    if ((alone ? own_wishes().stop : stop_wished_) && state_.epoch < o.epochs) {
      if (saved_step_ != state_.step) save();
      outcome.finished = false;
      break;
    }
  }
  outcome.epochs = state_.epoch;
  outcome.steps = state_.step;
  outcome.train_loss = train_loss_;
  outcome.val = val_;
  outcome.best_top1 = std::max(state_.best_top1, 0.0);
  outcome.best_epoch = state_.best_epoch;
  outcome.skipped = std::ssize(skipped_);
  outcome.images_per_second =
      state_.train_seconds > 0 ? static_cast<double>(state_.trained_images) / state_.train_seconds : 0;
  if (outcome.finished && !dataset_.test.empty()) {
    if (options_.listener != nullptr) options_.listener->on_evaluation(dataset_.test.size());
    nn::Model tested = model_;
    if (first_says(processes(), run_ != nullptr && state_.best_epoch >= 0)) {
      if (run_ != nullptr) {
        checkpoint::LoadOptions load;
        load.device = options_.device;
        tested = checkpoint::load_model(run_->best_weights(), load).model;
      } else {
        tested = std::make_shared<nn::VisionTransformer>(task_.model, o.seed);
        tested->to(options_.device);
      }
      share_weights(*tested);
    }
    const Evaluation evaluation =
        evaluate(*tested, dataset_.test, task_.preprocessing, evaluate_options(), false, &processes());
    outcome.finished = !evaluation.stopped;
    if (outcome.finished) {
      check_readable(evaluation, "test", dataset_.test.size());
      outcome.test = evaluation.metrics;
    }
  }
  outcome.seconds = was_finished ? number_in(*earlier, "seconds").value_or(state_.seconds) : seconds_now();
  if (run_ != nullptr && processes().first() && outcome.finished && !was_finished) {
    ordered_json result = {{"epochs", outcome.epochs},
                           {"steps", outcome.steps},
                           {"train_loss", outcome.train_loss},
                           {"skipped", outcome.skipped},
                           {"images_per_second", outcome.images_per_second},
                           {"seconds", outcome.seconds}};
    if (outcome.best_epoch >= 0) {
      result["best_epoch"] = outcome.best_epoch;
      result["best_val_top1"] = outcome.best_top1;
    }
    if (outcome.val) result["val"] = to_json(*outcome.val);
    if (outcome.test) result["test"] = to_json(*outcome.test);
    run_->write("result.json", result);
    run_->write_text("README.md", model_card(task_, dataset_, outcome));
  }
  return outcome;
}

}  // namespace violin::train
