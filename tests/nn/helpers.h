// What the tests of models share.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "violin/checkpoint/tensor_file.h"
#include "violin/error.h"
#include "violin/nn/nn.h"

namespace violin::tests {

using Json = nlohmann::json;
using Tensors = std::map<std::string, at::Tensor>;

inline Json golden_json(const std::string& name) {
  std::ifstream file(std::string(VIOLIN_GOLDEN_DIR) + "/" + name);
  if (!file) throw Error("cannot read " + name);
  return Json::parse(file);
}

inline Tensors golden_tensors(const std::string& name) {
  Tensors result;
  for (const auto& [key, tensor] :
       checkpoint::TensorFile::open(std::string(VIOLIN_GOLDEN_DIR) + "/" + name, {.copy = true}).tensors())
    result[key] = tensor;
  return result;
}

// Largest difference over the largest expected magnitude.
inline double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  if (got.sizes() != expected.sizes()) return 1e30;
  if (expected.numel() == 0) return 0;
  const at::Tensor want = expected.to(at::kDouble);
  return (got.to(at::kDouble) - want).abs().max().item<double>() / std::max(want.abs().max().item<double>(), 1e-30);
}

// Every parameter and buffer must be in `weights`, and nothing else.
inline void load_exactly(nn::VisionTransformer& model, const Tensors& weights) {
  const torch::NoGradGuard no_grad;
  std::size_t used = 0;
  for (auto& [name, tensor] : nn::state(model)) {
    const auto found = weights.find(name);
    ASSERT_NE(found, weights.end()) << "the golden weights lack " << name;
    ASSERT_EQ(tensor.sizes(), found->second.sizes()) << name;
    at::Tensor(tensor).copy_(found->second);
    ++used;
  }
  EXPECT_EQ(used, weights.size());
}

// A model that fits a test.
inline nn::ModelConfig small_model() {
  nn::ModelConfig config;
  config.img_size = {32, 32};
  config.patch_size = {8, 8};
  config.embed_dim = 24;
  config.depth = 2;
  config.num_heads = 2;
  config.num_classes = 5;
  return config;
}

inline at::Tensor images(std::int64_t batch, std::int64_t height, std::int64_t width) {
  return at::randn({batch, 3, height, width}, at::make_generator<at::CPUGeneratorImpl>(1));
}

}  // namespace violin::tests
