// Classes for images: weights with the preprocessing and the class names that travel with them.
//
//   const violin::Predictor predictor("run/");
//   for (const violin::Guess& guess : predictor.classify_file("photo.jpg")) …
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "violin/checkpoint/model_file.h"
#include "violin/data/image.h"
#include "violin/nn/precision.h"

namespace violin {

struct Guess {
  std::int64_t index = 0;  // of the class
  std::string name;        // "class 17" where the weights have no names
  double probability = 0;
};

struct PredictorOptions {
  checkpoint::LoadOptions load;  // and with it the device
  nn::Precision precision = nn::Precision::kFp32;
  std::int64_t batch = 32;   // images per forward pass
  std::string batch_option;  // named where a batch does not fit into memory; may be empty
  DecodeLimits limits;
};

// Methods may be called from many threads at once; an image gets the same answer in each.
class Predictor {
 public:
  // A weights file or the folder of a run. Throws violin::Error, also for weights without classes.
  explicit Predictor(const std::filesystem::path& weights, const PredictorOptions& options = {});
  // The model stays on the device where it is.
  explicit Predictor(checkpoint::LoadedModel model, const PredictorOptions& options = {});

  // The `top` most likely classes, likeliest first. Throws violin::Error that names a file that cannot be decoded.
  std::vector<Guess> classify_file(const std::filesystem::path& image, std::int64_t top = 5) const;
  std::vector<Guess> classify_encoded(std::span<const std::uint8_t> jpeg_png_or_webp, std::int64_t top = 5) const;
  std::vector<Guess> classify(const Image& image, std::int64_t top = 5) const;
  std::vector<std::vector<Guess>> classify(std::span<const Image> images, std::int64_t top = 5) const;

  // images [B,3,H,W], already normalised -> [B,K] on the CPU
  at::Tensor probabilities(const at::Tensor& images) const;
  // [3,H,W] of preprocessing().size, normalised
  at::Tensor prepare(const Image& image) const;
  // probabilities [K]
  std::vector<Guess> best(const at::Tensor& probabilities, std::int64_t top) const;

  std::int64_t classes() const { return model_.model->config().num_classes; }
  const std::string& class_name(std::int64_t index) const { return names_.at(static_cast<std::size_t>(index)); }
  const data::EvalOptions& preprocessing() const { return model_.preprocessing; }
  const checkpoint::LoadReport& report() const { return model_.report; }

 private:
  checkpoint::LoadedModel model_;
  PredictorOptions options_;
  data::EvalTransform transform_;
  std::vector<std::string> names_;
};

}  // namespace violin
