// What a model says about each image of a set, as a file, and two models compared image by image.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "violin/train/evaluate.h"

namespace violin::train {

struct Prediction {
  std::string image, label, predicted;
  double probability = 0;  // of what is predicted
  bool right() const { return label == predicted; }
};

// `evaluation` must have kept its logits; `names` are the model's classes, `columns` as in EvaluateOptions.
std::vector<Prediction> predictions(const Evaluation& evaluation, const data::SampleSet& set,
                                    const std::vector<std::string>& names, const std::vector<std::int64_t>& columns);

// CSV: image,label,predicted,probability
std::string to_csv(const std::vector<Prediction>& predictions);
std::vector<Prediction> read_predictions(const std::filesystem::path& file);

// Two models on the same images. Under McNemar's test, models that are equally good disagree in either direction
// equally often: `p` is the exact two-sided probability of a split at least as uneven as the one seen.
struct Comparison {
  std::int64_t both = 0, only_first = 0, only_second = 0, neither = 0;  // who is right
  double p = 1;
};
// Throws violin::Error where the images are not the same.
Comparison compare(const std::vector<Prediction>& first, const std::vector<Prediction>& second);

}  // namespace violin::train
