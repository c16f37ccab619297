#include "violin/train/loss.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace violin::train {
namespace {

constexpr std::int64_t kHead = 4;             // loss, top1, top5, images
constexpr std::int64_t kMaxConfusion = 4096;  // classes; a larger matrix would fill memory and no screen

at::Tensor wide(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
}

}  // namespace

at::Tensor soft_target_loss(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weights) {
  at::Tensor terms = targets * at::log_softmax(wide(logits), -1);
  if (weights.defined()) terms = terms * weights;
  return -terms.sum(-1).mean();
}

at::Tensor label_loss(const at::Tensor& logits, const at::Tensor& labels, double smoothing, const at::Tensor& weights) {
  const std::optional<at::Tensor> weight = weights.defined() ? std::optional(weights) : std::nullopt;
  return at::cross_entropy_loss(wide(logits), labels, weight, at::Reduction::Mean, -100, smoothing);
}

nlohmann::ordered_json to_json(const Metrics& metrics) {
  return {{"images", metrics.images}, {"top1", metrics.top1}, {"top5", metrics.top5}, {"loss", metrics.loss}};
}

Metrics metrics_from_json(const nlohmann::json& json) {
  Metrics metrics;
  metrics.images = json.at("images");
  metrics.top1 = json.at("top1");
  metrics.top5 = json.at("top5");
  metrics.loss = json.at("loss");
  return metrics;
}

void MetricsSum::add(const at::Tensor& logits, const at::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  const std::int64_t classes = logits.size(1), confusion = classes <= kMaxConfusion ? classes * classes : 0;
  if (!sums_.defined()) sums_ = at::zeros({kHead + confusion}, logits.options().dtype(at::kDouble));
  const at::Tensor wide_logits = wide(logits);
  const at::Tensor order = std::get<1>(wide_logits.topk(std::min<std::int64_t>(5, classes), 1));
  const at::Tensor hits = order == labels.unsqueeze(1);
  const at::Tensor loss = at::cross_entropy_loss(wide_logits, labels, std::nullopt, at::Reduction::Sum);
  sums_[0] += loss.to(at::kDouble);
  sums_[1] += hits.select(1, 0).sum().to(at::kDouble);
  sums_[2] += hits.sum().to(at::kDouble);
  sums_[3] += static_cast<double>(labels.size(0));
  if (confusion > 0) {
    // Not bincount, which makes the host wait for a GPU. Whole numbers have the same sum in any order.
    const at::Tensor cells = labels * classes + order.select(1, 0);
    sums_.narrow(0, kHead, confusion).index_add_(0, cells, at::ones_like(cells, at::kDouble));
  }
}

Metrics MetricsSum::result() const {
  Metrics metrics;
  if (!sums_.defined()) return metrics;
  const at::Tensor sums = sums_.to(at::kCPU);
  const double* values = sums.const_data_ptr<double>();
  metrics.images = static_cast<std::int64_t>(values[3]);
  if (metrics.images == 0) return metrics;
  metrics.loss = values[0] / values[3];
  metrics.top1 = 100 * values[1] / values[3];
  metrics.top5 = 100 * values[2] / values[3];
  if (sums.numel() == kHead + classes_ * classes_) {
    for (std::int64_t label = 0; label < classes_; ++label) {
      const double* row = values + kHead + label * classes_;
      metrics.confusion.emplace_back(row, row + classes_);
    }
  }
  return metrics;
}

void update_average(std::vector<at::Tensor>& average, const std::vector<at::Tensor>& now, double decay) {
  const torch::NoGradGuard no_grad;
  at::_foreach_lerp_(average, now, 1 - decay);
}

}  // namespace violin::train
