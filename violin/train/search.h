// Choosing a learning rate: every candidate trains on 80% of the training images and is measured on the other 20%.
#pragma once

#include <functional>
#include <vector>

#include "violin/train/trainer.h"

namespace violin::train {

// The five rates of the VTAB-1K protocol.
const std::vector<double>& candidate_rates();

struct RateTrial {
  double lr = 0;
  double top1 = 0;  // percent, of the last epoch
  double loss = 0;
  bool diverged = false;  // the loss was no longer finite
};

struct RateSearch {
  std::vector<RateTrial> trials;
  double best = 0;
  std::vector<double> tied;  // others that are as accurate and have no smaller loss
  bool finished = false;     // false: stopped on request
};

// The images that candidates are trained on, and those that they are compared by. Throws violin::Error where there are
// too few.
data::Dataset search_data(const Task& task, const data::Dataset& dataset);
// `fresh` gives the model with its initial weights, once per candidate. Finished trials are kept in the run's
// lr_search.json, so that an interrupted search goes on where it was; of several
// processes the first has the run, the others null. The highest accuracy wins; of equal ones the
// smaller loss. Throws NotFinite where every candidate diverged; nothing is kept then.
RateSearch search_rate(const Task& task, const data::Dataset& dataset, const std::function<nn::Model()>& fresh,
                       RunFolder* run, const TrainerOptions& options);

}  // namespace violin::train
