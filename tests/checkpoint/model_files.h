// Small models in files, for the tests of loading them.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tests/nn/helpers.h"
#include "tests/temporary_folder.h"
#include "violin/checkpoint/model_file.h"
#include "violin/checkpoint/safetensors.h"
#include "violin/error.h"

namespace violin::checkpoint {

inline NamedTensors state_of(const nn::VisionTransformer& model, const std::string& prefix = "") {
  NamedTensors tensors;
  for (const auto& [name, tensor] : nn::state(model)) tensors.emplace_back(prefix + name, tensor.detach());
  return tensors;
}

inline std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline bool any_contains(const std::vector<std::string>& lines, const std::string& part) {
  return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) { return contains(line, part); });
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.is_contiguous() && b.is_contiguous() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

inline void expect_same_state(const nn::VisionTransformer& a, const nn::VisionTransformer& b) {
  const auto left = nn::state(a), right = nn::state(b);
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].first, right[i].first);
    EXPECT_TRUE(same_bits(left[i].second, right[i].second)) << left[i].first;
  }
}

// A small model in a file without metadata, as other programs write it.
struct Fixture {
  explicit Fixture(const nn::ModelConfig& config = tests::small_model(), const std::string& prefix = "")
      : model(std::make_shared<nn::VisionTransformer>(config, 3)), path(folder.file("weights.safetensors")) {
    model->eval();
    save_safetensors(path, state_of(*model, prefix));
  }
  TemporaryFolder folder;
  nn::Model model;
  std::string path;
};

}  // namespace violin::checkpoint
