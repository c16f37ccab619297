// AdamW over groups of parameters, by torch's fused kernels: one call per group.
#pragma once

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "violin/train/schedule.h"

namespace violin::train {

class AdamW {
 public:
  AdamW(std::vector<Group> groups, const Options& options);

  // Norm of all gradients, a tensor on their device; scales them down to `clip` where that is above 0.
  at::Tensor clip_gradients(double clip);
  // One step at this learning rate times each group's factor. Where `skip`, a number on the parameters' device, is not
  // 0, nothing changes: so that a step that went wrong can be found out later without waiting for the device now.
  void step(double lr, const at::Tensor& skip = {});
  void clear_gradients();

  const std::vector<Group>& groups() const { return groups_; }
  std::vector<at::Tensor> gradients() const;

  // Moments and counts by name; load throws violin::Error where one is missing or does not fit.
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  void load(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  struct Moments {
    std::vector<at::Tensor> mean, square, steps;
  };
  std::vector<Group> groups_;
  std::vector<Moments> moments_;
  double beta1_, beta2_, eps_;
};

}  // namespace violin::train
