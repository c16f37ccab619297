// Accuracy of a model on labelled images.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "violin/data/data.h"
#include "violin/data/loader.h"
#include "violin/nn/precision.h"
#include "violin/nn/vit.h"
#include "violin/train/loss.h"
#include "violin/train/processes.h"

namespace violin::train {

struct EvaluateOptions {
  std::int64_t batch_size = 64;
  std::string batch_option;  // named where a batch does not fit into memory; may be empty
  int workers = 2;
  c10::Device device = c10::kCPU;
  nn::Precision precision = nn::Precision::kFp32;
  data::OnBadImage on_bad_image = data::OnBadImage::kSkip;
  std::int64_t cache_bytes = 0;
  // Logits' columns for the set's labels, where the set knows fewer or other classes than the model; empty: the same.
  std::vector<std::int64_t> columns;
  std::function<void(std::int64_t images)> progress;  // so many more are done
  // Set by a signal: the evaluation ends with the batch, and that of several processes where they next ask each other.
  const std::atomic<bool>* stop = nullptr;
};

struct Evaluation {
  bool stopped = false;  // before the last image
  Metrics metrics;
  std::vector<data::BadImage> bad_images;
  // Per image that could be read, where asked for: its index in the set, and logits.
  std::vector<std::int64_t> indices;
  at::Tensor logits;  // [n,K] on the CPU
};

// The model is put into evaluation mode, and back into the mode that it had.
Evaluation evaluate(nn::VisionTransformer& model, const data::SampleSet& set, const data::EvalOptions& preprocessing,
                    const EvaluateOptions& options, bool keep_logits = false, Processes* processes = nullptr);

// The same with a loader that is kept between calls (and with it its cache of decoded images).
class Evaluator {
 public:
  Evaluator(const data::SampleSet& set, const data::EvalOptions& preprocessing, EvaluateOptions options,
            Processes* processes = nullptr);
  Evaluation run(nn::VisionTransformer& model, bool keep_logits = false);
  std::int64_t images() const { return static_cast<std::int64_t>(picks_.size()); }

 private:
  bool alone() const { return processes_ == nullptr || processes_->world() == 1; }
  bool stop_wished(std::int64_t batch);  // by any process, before that batch

  EvaluateOptions options_;
  Processes* processes_;
  std::vector<data::Pick> picks_;
  std::int64_t common_batches_ = 0;  // that every process has at least, broken images counted
  std::int64_t asked_ = 0;           // before so many of them
  std::unique_ptr<data::Loader> loader_;
};

// Columns for `labels` among `model_classes`, both by name; a WordNet id stands for the name that begins with it. Empty
// where the lists are equal or one of them is empty; throws violin::Error naming a class that the model does not know.
std::vector<std::int64_t> match_classes(const std::vector<std::string>& model_classes,
                                        const std::vector<std::string>& labels);

}  // namespace violin::train
