// What a trainer writes into last/ and reads from it: weights, optimiser, average, position, generators.
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "violin/checkpoint/model_file.h"
#include "violin/checkpoint/safetensors.h"
#include "violin/data/file.h"
#include "violin/error.h"
#include "violin/train/distributed.h"
#include "violin/train/trainer.h"

namespace violin::train {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

bool is_readable(const std::filesystem::path& weights) {
  try {
    checkpoint::TensorFile::open(weights);
    return true;
  } catch (const Error&) {
    return false;
  }
}

at::Generator generator(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

// Dropout draws from torch's generators: other numbers in every process, the first one's as if it were alone.
void Trainer::seed_generators() {
  constexpr std::uint64_t kApart = 0x9E3779B97F4A7C15;
  const auto rank = static_cast<std::uint64_t>(processes().rank()), step = static_cast<std::uint64_t>(state_.step);
  const std::uint64_t seed = task_.options.seed + kApart * (rank == 0 ? 0 : rank + (step << 20U));
  generator(at::kCPU).set_current_seed(seed);
  if (options_.device.is_cuda()) generator(options_.device).set_current_seed(seed);
}

void Trainer::save_weights(const std::filesystem::path& path, nn::VisionTransformer& model) const {
  std::error_code ignored;
  std::filesystem::create_directories(path.parent_path(), ignored);
  checkpoint::save_model(path, model, task_.preprocessing, task_.classes);
}

void Trainer::save() {
  require_finite_weights();
  saved_ = Clock::now();
  saved_step_ = state_.step;
  if (run_ == nullptr || !processes().first()) return;
  run_->replace_last([&](const std::filesystem::path& folder) {
    save_weights(folder / "model.safetensors", *model_);
    if (average_model_) save_weights(folder / "ema.safetensors", *average_model_);
    checkpoint::NamedTensors tensors = optimizer_->state();
    for (std::size_t i = 0; i < average_.size(); ++i) tensors.emplace_back("ema." + average_names_[i], average_[i]);
    tensors.emplace_back("generator.cpu", generator(at::kCPU).get_state());
    if (options_.device.is_cuda()) tensors.emplace_back("generator.cuda", generator(options_.device).get_state());
    checkpoint::save_safetensors(folder / "optimizer.safetensors", tensors);
    ordered_json state = {{"epoch", state_.epoch},
                          {"batch", state_.batch},
                          {"step", state_.step},
                          {"loss_sum", state_.loss_sum},
                          {"seen", state_.seen},
                          {"norm_sum", state_.norm_sum},
                          {"best_top1", state_.best_top1},
                          {"best_epoch", state_.best_epoch},
                          {"seconds", seconds_now()},
                          {"train_seconds", state_.train_seconds},
                          {"trained_images", state_.trained_images},
                          {"train_loss", train_loss_},
                          {"skipped", skipped_},
                          {"log_bytes", run_->log_bytes()}};
    if (val_) state["val"] = to_json(*val_);
    write_file_atomically(folder / "state.json", state.dump(2) + "\n");
  });
  save_seconds_ = std::chrono::duration<double>(Clock::now() - saved_).count();
}

std::string Trainer::read_checkpoint() {
  const std::filesystem::path folder = run_->last();
  checkpoint::LoadOptions load;
  load.config = task_.model;
  const checkpoint::LoadedModel loaded = checkpoint::load_model(folder / "model.safetensors", load);
  const torch::NoGradGuard no_grad;
  const auto own = nn::state(*model_);
  const auto saved = nn::state(*loaded.model);
  if (own.size() != saved.size()) throw Error("'" + folder.string() + "' holds the weights of another model");
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i].first != saved[i].first || own[i].second.sizes() != saved[i].second.sizes())
      throw Error("'" + folder.string() + "' holds the weights of another model: " + own[i].first);
    at::Tensor(own[i].second).copy_(saved[i].second);
  }
  const checkpoint::TensorFile file = checkpoint::TensorFile::open(folder / "optimizer.safetensors");
  optimizer_->load(file.tensors());
  for (std::size_t i = 0; i < average_.size(); ++i) average_[i].copy_(file.tensor("ema." + average_names_[i]));
  generator(at::kCPU).set_state(file.tensor("generator.cpu").clone());
  if (options_.device.is_cuda()) {
    for (const checkpoint::NamedRef& entry : file.list())
      if (entry.name == "generator.cuda") generator(options_.device).set_state(file.tensor(entry.name).clone());
  }
  return read_json_file(folder / "state.json").dump();
}

void Trainer::resume() {
  // Stopped before the first checkpoint: from the start.
  if (!first_says(processes(), run_ != nullptr && run_->has_checkpoint())) return;
  std::string text = processes().first() ? read_checkpoint() : "";
  const nlohmann::json state = [&] {
    broadcast_text(processes(), text);
    return nlohmann::json::parse(text);
  }();
  if (processes().world() > 1) {
    const torch::NoGradGuard no_grad;
    share_weights(*model_);
    for (auto& [name, tensor] : optimizer_->state()) processes().broadcast(tensor);
    for (at::Tensor& tensor : average_) processes().broadcast(tensor);
  }
  std::int64_t log_bytes = 0;
  try {
    state_.epoch = state.at("epoch");
    state_.batch = state.at("batch");
    state_.step = state.at("step");
    state_.loss_sum = state.at("loss_sum");
    state_.seen = state.at("seen");
    state_.norm_sum = state.at("norm_sum");
    state_.best_top1 = state.at("best_top1");
    state_.best_epoch = state.at("best_epoch");
    state_.seconds = state.at("seconds");
    state_.train_seconds = state.at("train_seconds");
    state_.trained_images = state.at("trained_images");
    train_loss_ = state.at("train_loss");
    if (state.contains("skipped")) skipped_ = state.at("skipped").get<std::set<std::int64_t>>();
    if (state.contains("val")) val_ = metrics_from_json(state.at("val"));
    log_bytes = state.at("log_bytes");
  } catch (const nlohmann::json::exception&) {
    throw Error("state.json of the checkpoint is not the state of a run");
  }
  const auto within = [](std::int64_t value, std::int64_t least, std::int64_t most) {
    return least <= value && value <= most;
  };
  const std::int64_t epochs = task_.options.epochs;
  if (!within(state_.epoch, 0, epochs) || !within(state_.batch, 0, batches_) ||
      !within(state_.step, 0, epochs * batches_) || !within(state_.best_epoch, -1, state_.epoch) || state_.seen < 0 ||
      !std::all_of(
          skipped_.begin(), skipped_.end(),
          [&](std::int64_t image) { return within(image, 0, dataset_.train.size() - 1); }) ||
      log_bytes < 0)
    throw Error("state.json of the checkpoint is not the state of this run; was it changed by hand?");
  if (run_ != nullptr) run_->truncate_log(log_bytes);
  if (state_.best_epoch >= 0 && first_says(processes(), processes().first() && !is_readable(run_->best_weights()))) {
    if (run_ != nullptr && options_.listener != nullptr)  // of several processes the first speaks
      options_.listener->on_message("'" + run_->best_weights().string() + "', of epoch " +
                                    std::to_string(state_.best_epoch + 1) +
                                    ", cannot be read: which epoch is best is decided anew");
    state_.best_top1 = -1;
    state_.best_epoch = -1;
  }
  if (!processes().first()) seed_generators();  // the first one's were in the checkpoint
}

}  // namespace violin::train
