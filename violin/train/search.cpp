#include "violin/train/search.h"

#include <nlohmann/json.hpp>

#include "violin/train/distributed.h"

namespace violin::train {

const std::vector<double>& candidate_rates() {
  static const std::vector<double> rates = {1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-4};
  return rates;
}

RateSearch search_rate(const Task& task, const data::Dataset& dataset, const std::function<nn::Model()>& fresh,
                       RunFolder* run, const TrainerOptions& options) {
  constexpr double kShare = 0.2;
  RateSearch search;
  std::string known_trials;
  if (run != nullptr && std::filesystem::exists(run->path() / "lr_search.json"))
    known_trials = read_json_file(run->path() / "lr_search.json").dump();
  if (options.processes != nullptr) broadcast_text(*options.processes, known_trials);
  if (!known_trials.empty()) {
    for (const nlohmann::json& trial : nlohmann::json::parse(known_trials).at("trials"))
      search.trials.push_back({trial.at("lr"), trial.at("top1"), trial.at("loss")});
  }
  data::Dataset part = dataset;
  std::tie(part.train, part.val) = dataset.train.split(kShare, task.options.seed);
  part.test = data::SampleSet();
  for (const double lr : candidate_rates()) {
    const bool known =
        std::any_of(search.trials.begin(), search.trials.end(), [&](const RateTrial& trial) { return trial.lr == lr; });
    if (known) continue;
    Task trial = task;
    trial.options.lr = lr;
    trial.options.eval_every = task.options.epochs;  // only the end counts
    if (options.listener != nullptr)
      options.listener->on_start("trying learning rate " + nlohmann::json(lr).dump() + " on " +
                                 std::to_string(part.train.size()) + " images");
    Trainer trainer(trial, part, fresh(), nullptr, options);
    const Outcome outcome = trainer.train();
    if (!outcome.finished) return search;
    search.trials.push_back({lr, outcome.val ? outcome.val->top1 : 0, outcome.val ? outcome.val->loss : 0});
    nlohmann::ordered_json json = {{"trials", nlohmann::ordered_json::array()}};
    for (const RateTrial& done : search.trials)
      json["trials"].push_back({{"lr", done.lr}, {"top1", done.top1}, {"loss", done.loss}});
    if (run != nullptr) run->write("lr_search.json", json);
  }
  const RateTrial* best = &search.trials.front();
  for (const RateTrial& trial : search.trials)
    if (trial.top1 > best->top1 || (trial.top1 == best->top1 && trial.loss < best->loss)) best = &trial;
  search.best = best->lr;
  search.finished = true;
  return search;
}

}  // namespace violin::train
