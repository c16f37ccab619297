// Learning rates over time, and which parameters get which.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "violin/nn/vit.h"
#include "violin/train/options.h"

namespace violin::train {

// timm's cosine schedule with a linear warm-up; t counts steps or epochs, also fractions of them.
struct Cosine {
  double base = 1e-3;
  double t_initial = 1;
  double lr_min = 0;
  double warmup_t = 0;
  double warmup_lr_init = 0;
  bool warmup_prefix = false;  // the cosine begins after the warm-up instead of at 0
  double cycle_decay = 1;
  std::int64_t cycle_limit = 1;

  double at(double t) const;
};

// Parameters that share a factor of the learning rate and a weight decay.
struct Group {
  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
  double lr_scale = 1;
  double weight_decay = 0;
};

// Of parameters that need a gradient. Layers as timm counts them: tokens, positions and patch embedding are layer 0,
// block i is layer i + 1, the last norm belongs to the last block, and the head (with fc_norm) comes last.
std::vector<Group> parameter_groups(const nn::VisionTransformer& model, const Options& options);

// Marks what `train_what` names as trainable and everything else as not.
void choose_trainable(nn::VisionTransformer& model, const std::string& what);

}  // namespace violin::train
