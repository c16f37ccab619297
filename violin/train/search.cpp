#include "violin/train/search.h"

#include <nlohmann/json.hpp>

#include "violin/train/distributed.h"

namespace violin::train {
namespace {

RateTrial trial_from_json(const nlohmann::json& trial) {
  if (trial.value("diverged", false)) return {.lr = trial.at("lr"), .diverged = true};
  return {.lr = trial.at("lr"), .top1 = trial.at("top1"), .loss = trial.at("loss")};
}

nlohmann::ordered_json to_json(const RateTrial& trial) {
  if (trial.diverged) return {{"lr", trial.lr}, {"diverged", true}};
  return {{"lr", trial.lr}, {"top1", trial.top1}, {"loss", trial.loss}};
}

}  // namespace

const std::vector<double>& candidate_rates() {
  static const std::vector<double> rates = {1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-4};
  return rates;
}

data::Dataset search_data(const Task& task, const data::Dataset& dataset) {
  constexpr double kShare = 0.2;
  data::Dataset part = dataset;
  std::tie(part.train, part.val) = dataset.train.split(kShare, task.options.seed);
  part.test = data::SampleSet();
  if (part.val.empty())
    throw Error(
        "too few images to hold some out, by which learning rates would be compared; give one, such as --lr 5e-4");
  return part;
}

RateSearch search_rate(const Task& task, const data::Dataset& dataset, const std::function<nn::Model()>& fresh,
                       RunFolder* run, const TrainerOptions& options) {
  RateSearch search;
  std::string known_trials;
  if (run != nullptr && std::filesystem::exists(run->path() / "lr_search.json"))
    known_trials = read_json_file(run->path() / "lr_search.json").dump();
  if (options.processes != nullptr) broadcast_text(*options.processes, known_trials);
  if (!known_trials.empty()) {
    try {
      const nlohmann::json known = nlohmann::json::parse(known_trials);
      for (const nlohmann::json& trial : known.at("trials")) search.trials.push_back(trial_from_json(trial));
    } catch (const nlohmann::json::exception&) {
      throw Error(
          "lr_search.json of the run does not hold learning rates that were tried; without it, --resume tries them "
          "anew");
    }
  }
  const data::Dataset part = search_data(task, dataset);
  for (const double lr : candidate_rates()) {
    const bool done =
        std::any_of(search.trials.begin(), search.trials.end(), [&](const RateTrial& trial) { return trial.lr == lr; });
    if (done) continue;
    Task trial = task;
    trial.options.lr = lr;
    trial.options.eval_every = task.options.epochs;  // only the end counts
    if (options.listener != nullptr)
      options.listener->on_start("trying learning rate " + nlohmann::json(lr).dump() + " on " +
                                 std::to_string(part.train.size()) + " images");
    RateTrial result{.lr = lr};
    try {
      Trainer trainer(trial, part, fresh(), nullptr, options);
      const Outcome outcome = trainer.train();
      if (!outcome.finished) return search;
      if (outcome.val) result = {.lr = lr, .top1 = outcome.val->top1, .loss = outcome.val->loss};
    } catch (const NotFinite&) {
      result.diverged = true;
      if (options.listener != nullptr)
        options.listener->on_message("learning rate " + nlohmann::json(lr).dump() +
                                     " is too high: the loss grew without bound");
    }
    search.trials.push_back(result);
    nlohmann::ordered_json json = {{"trials", nlohmann::ordered_json::array()}};
    for (const RateTrial& done : search.trials) json["trials"].push_back(to_json(done));
    if (run != nullptr) run->write("lr_search.json", json);
  }
  const RateTrial* best = nullptr;
  for (const RateTrial& trial : search.trials) {
    if (trial.diverged) continue;
    if (best == nullptr || trial.top1 > best->top1 || (trial.top1 == best->top1 && trial.loss < best->loss))
      best = &trial;
  }
  if (best == nullptr) {
    // Nothing to go on from: the next try is to be with another rate.
    if (run != nullptr) std::filesystem::remove(run->path() / "lr_search.json");
    throw NotFinite(
        "with every learning rate that was tried the loss grew without bound; give a smaller one (--lr 1e-5)");
  }
  search.best = best->lr;
  for (const RateTrial& trial : search.trials)
    if (&trial != best && !trial.diverged && trial.top1 == best->top1) search.tied.push_back(trial.lr);
  search.finished = true;
  return search;
}

}  // namespace violin::train
