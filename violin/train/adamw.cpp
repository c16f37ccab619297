#include "violin/train/adamw.h"

#include <map>

#include "violin/error.h"

namespace violin::train {

AdamW::AdamW(std::vector<Group> groups, const Options& options)
    : groups_(std::move(groups)), beta1_(options.beta1), beta2_(options.beta2), eps_(options.eps) {
  const torch::NoGradGuard no_grad;
  for (const Group& group : groups_) {
    Moments moments;
    for (const at::Tensor& parameter : group.parameters) {
      moments.mean.push_back(at::zeros_like(parameter));
      moments.square.push_back(at::zeros_like(parameter));
      moments.steps.push_back(at::zeros({}, parameter.options().dtype(at::kFloat).requires_grad(false)));
    }
    moments_.push_back(std::move(moments));
  }
}

std::vector<at::Tensor> AdamW::gradients() const {
  std::vector<at::Tensor> result;
  for (const Group& group : groups_)
    for (const at::Tensor& parameter : group.parameters)
      if (parameter.grad().defined()) result.push_back(parameter.grad());
  return result;
}

at::Tensor AdamW::clip_gradients(double clip) {
  const torch::NoGradGuard no_grad;
  const std::vector<at::Tensor> all = gradients();
  if (all.empty()) return at::zeros({});
  const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(all, 2)), 2);
  if (clip > 0) at::_foreach_mul_(all, (clip / (norm + 1e-6)).clamp_max(1.0));
  return norm;
}

void AdamW::step(double lr, const at::Tensor& skip) {
  const torch::NoGradGuard no_grad;
  const std::optional<at::Tensor> found = skip.defined() ? std::optional(skip) : std::nullopt;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::vector<at::Tensor> parameters, gradients, mean, square, steps;
    for (std::size_t i = 0; i < groups_[g].parameters.size(); ++i) {
      const at::Tensor& parameter = groups_[g].parameters[i];
      if (!parameter.grad().defined()) continue;
      parameters.push_back(parameter);
      gradients.push_back(parameter.grad());
      mean.push_back(moments_[g].mean[i]);
      square.push_back(moments_[g].square[i]);
      steps.push_back(moments_[g].steps[i]);
    }
    if (parameters.empty()) continue;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients, mean, square, {}, steps, lr * groups_[g].lr_scale, beta1_, beta2_,
                      groups_[g].weight_decay, eps_, false, false, std::nullopt, found);
    if (found) at::_foreach_sub_(steps, std::vector<at::Tensor>(steps.size(), *found));
  }
}

void AdamW::clear_gradients() {
  for (Group& group : groups_)
    for (at::Tensor& parameter : group.parameters) parameter.mutable_grad() = at::Tensor();
}

std::vector<std::pair<std::string, at::Tensor>> AdamW::state() const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < groups_[g].names.size(); ++i) {
      result.emplace_back("mean." + groups_[g].names[i], moments_[g].mean[i]);
      result.emplace_back("square." + groups_[g].names[i], moments_[g].square[i]);
      result.emplace_back("steps." + groups_[g].names[i], moments_[g].steps[i]);
    }
  }
  return result;
}

void AdamW::load(const std::vector<std::pair<std::string, at::Tensor>>& saved) {
  const torch::NoGradGuard no_grad;
  const std::map<std::string, at::Tensor> by_name(saved.begin(), saved.end());
  for (auto& [name, tensor] : state()) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) throw Error("the optimiser's state lacks '" + name + "'; the run was changed by hand?");
    if (found->second.sizes() != tensor.sizes())
      throw Error("the optimiser's state '" + name + "' has another shape than the parameter");
    at::Tensor(tensor).copy_(found->second);
  }
}

}  // namespace violin::train
