// A short page about a trained model, for its run folder.
#pragma once

#include <string>

#include "violin/train/trainer.h"

namespace violin::train {

std::string model_card(const Task& task, const data::Dataset& dataset, const Outcome& outcome);

}  // namespace violin::train
