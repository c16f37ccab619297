// Losses and what is counted beside them.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace violin::train {

// Mean over the batch of -sum_k targets * log softmax(logits), in float32. targets [B,K]; weights [K] or undefined
// multiply the classes.
at::Tensor soft_target_loss(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weights = {});

// Ordinary cross entropy with smoothed labels [B].
at::Tensor label_loss(const at::Tensor& logits, const at::Tensor& labels, double smoothing,
                      const at::Tensor& weights = {});

// How a classifier did on a set of images.
struct Metrics {
  std::int64_t images = 0;
  double loss = 0;  // mean cross entropy
  double top1 = 0;  // percent
  double top5 = 0;
  double seconds = 0;
  std::vector<std::vector<std::int64_t>> confusion;  // [label][predicted]

  double images_per_second() const { return seconds > 0 ? static_cast<double>(images) / seconds : 0; }
};

// {"images":…,"top1":…,"top5":…,"loss":…}
nlohmann::ordered_json to_json(const Metrics& metrics);
Metrics metrics_from_json(const nlohmann::json& json);

// Adds up batches; numbers stay on their device until result().
class MetricsSum {
 public:
  explicit MetricsSum(std::int64_t classes) : classes_(classes) {}
  void add(const at::Tensor& logits, const at::Tensor& labels);  // [B,K], [B]
  // Sums of all processes, where there are several: [loss, top1, top5, images, confusion ...] in double.
  at::Tensor sums() const { return sums_; }
  void set_sums(const at::Tensor& sums) { sums_ = sums; }
  Metrics result() const;

 private:
  std::int64_t classes_;
  at::Tensor sums_;
};

// ema = decay * ema + (1 - decay) * now, tensor by tensor.
void update_average(std::vector<at::Tensor>& average, const std::vector<at::Tensor>& now, double decay);

}  // namespace violin::train
