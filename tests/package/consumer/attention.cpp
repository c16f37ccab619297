// Masked attention from another project: ranks, mask, attention, gradient.
#include <torch/torch.h>

#include <iostream>

#include "violin/violin.h"

int main() {
  torch::manual_seed(0);
  const auto qkv = torch::randn({2, 20, 3, 3, 8}, torch::requires_grad());  // [B,N,3,h,d]
  const auto log_decay = torch::full({8, 3}, -0.05F, torch::requires_grad());
  const auto ranks = violin::ops::curve_ranks("violin", {4, 5});
  const auto mask = violin::ops::decay_mask(ranks, log_decay);
  const auto parts = qkv.permute({2, 0, 3, 1, 4});  // [3,B,h,N,d]
  const auto out = violin::ops::attention(parts[0], parts[1], parts[2], mask);
  out.square().sum().backward();
  std::cout << "attention: " << out.sizes() << ", |d log_decay| " << log_decay.grad().norm().item<double>() << "\n";
  return log_decay.grad().norm().item<double>() > 0 ? 0 : 1;
}
