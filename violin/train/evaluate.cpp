#include "violin/train/evaluate.h"

#include <algorithm>
#include <chrono>

#include "violin/error.h"
#include "violin/nn/memory.h"

namespace violin::train {
namespace {

// "n01440764", what ImageNet's folders are called.
bool is_wordnet_id(const std::string& label) {
  return label.size() == 9 && label[0] == 'n' &&
         std::all_of(label.begin() + 1, label.end(), [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

std::vector<std::int64_t> match_classes(const std::vector<std::string>& model_classes,
                                        const std::vector<std::string>& labels) {
  if (model_classes.empty() || labels.empty() || model_classes == labels) return {};
  std::vector<std::int64_t> columns;
  for (const std::string& label : labels) {
    const auto named = [&](const std::string& name) {
      return name == label || (is_wordnet_id(label) && name.starts_with(label + " "));
    };
    const auto found = std::find_if(model_classes.begin(), model_classes.end(), named);
    if (found == model_classes.end()) {
      throw Error("the images have a class '" + label + "' that the model does not know; it knows " +
                  std::to_string(model_classes.size()) + " classes, the first of them '" + model_classes.front() + "'");
    }
    if (std::any_of(found + 1, model_classes.end(), named)) {
      throw Error("the model has two classes named '" + label +
                  "', so that nobody knows which is right; violin convert --classes FILE names them apart");
    }
    columns.push_back(found - model_classes.begin());
  }
  return columns;
}

Evaluator::Evaluator(const data::SampleSet& set, const data::EvalOptions& preprocessing, EvaluateOptions options,
                     Processes* processes)
    : options_(std::move(options)), processes_(processes) {
  picks_ = data::in_order(set.size());
  if (!alone()) {
    common_batches_ = (set.size() / processes->world() + options_.batch_size - 1) / options_.batch_size;
    std::vector<data::Pick> own;
    for (std::size_t i = static_cast<std::size_t>(processes->rank()); i < picks_.size();
         i += static_cast<std::size_t>(processes->world()))
      own.push_back(picks_[i]);
    picks_ = std::move(own);
  }
  data::LoaderOptions loader;
  loader.workers = options_.workers;
  loader.on_bad_image = options_.on_bad_image;
  loader.cache_bytes = options_.cache_bytes;
  loader.pin = options_.device.is_cuda();
  loader_ = std::make_unique<data::Loader>(set, std::make_shared<data::EvalTransform>(preprocessing), loader);
}

bool Evaluator::stop_wished(std::int64_t batch) {
  if (options_.stop == nullptr) return false;
  const bool own = options_.stop->load();
  if (alone()) return own;
  // All ask before the same batches, and all end there; the answer makes the host wait for a GPU. A batch of nothing
  // but broken images never comes, but the others ask before theirs: what was missed is asked now.
  const std::int64_t every = options_.device.is_cuda() ? 8 : 1;
  for (; asked_ <= batch && asked_ < common_batches_; asked_ += every) {
    at::Tensor wishes = at::full({1}, own ? 1.0 : 0.0, at::TensorOptions(options_.device).dtype(at::kDouble));
    processes_->sum(wishes);
    if (wishes.item<double>() > 0) return true;
  }
  return false;
}

Evaluation Evaluator::run(nn::VisionTransformer& model, bool keep_logits) {
  const bool training = model.is_training();
  model.eval();
  const torch::NoGradGuard no_grad;
  const nn::PrecisionScope precision(options_.device.type(), options_.precision);
  const auto start = std::chrono::steady_clock::now();
  const std::int64_t outputs = model.config().num_classes;
  const at::Tensor columns =
      options_.columns.empty() ? at::Tensor() : at::tensor(options_.columns, at::kLong).to(options_.device);
  MetricsSum sum(outputs);
  Evaluation result;
  std::vector<at::Tensor> kept;
  asked_ = 0;
  loader_->start(picks_, options_.batch_size, 0);
  while (std::optional<data::Batch> batch = loader_->next()) {
    if (stop_wished(batch->number)) {
      result.stopped = true;
      break;
    }
    if (batch->size() > 0) {
      at::Tensor labels = batch->labels.to(options_.device, /*non_blocking=*/true);
      if (columns.defined()) labels = columns.index_select(0, labels);
      const at::Tensor logits = nn::within_memory(batch->images, options_.batch_option, [&](const at::Tensor& images) {
        return model.forward(images.to(options_.device, /*non_blocking=*/true)).to(at::kFloat);
      });
      sum.add(logits, labels);
      if (keep_logits) {
        kept.push_back(logits.to(at::kCPU));
        const auto* indices = batch->indices.const_data_ptr<std::int64_t>();
        result.indices.insert(result.indices.end(), indices, indices + batch->size());
      }
    }
    if (options_.progress) options_.progress(batch->size());
  }
  if (!alone()) {
    if (!result.stopped) result.stopped = stop_wished(common_batches_);  // where the last batches did not come
    at::Tensor sums = sum.sums().defined() ? sum.sums()
                                           : at::zeros({4 + (outputs <= 4096 ? outputs * outputs : 0)},
                                                       at::TensorOptions(options_.device).dtype(at::kDouble));
    processes_->sum(sums);
    sum.set_sums(sums);
  }
  result.metrics = sum.result();
  result.metrics.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.bad_images = loader_->bad_images();
  if (keep_logits && !kept.empty()) result.logits = at::cat(kept);
  model.train(training);
  return result;
}

Evaluation evaluate(nn::VisionTransformer& model, const data::SampleSet& set, const data::EvalOptions& preprocessing,
                    const EvaluateOptions& options, bool keep_logits, Processes* processes) {
  return Evaluator(set, preprocessing, options, processes).run(model, keep_logits);
}

}  // namespace violin::train
