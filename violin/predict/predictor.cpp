#include "violin/predict/predictor.h"

#include <torch/torch.h>

#include <algorithm>

#include "violin/error.h"
#include "violin/nn/memory.h"
#include "violin/text.h"

namespace violin {

Predictor::Predictor(const std::filesystem::path& weights, const PredictorOptions& options)
    : Predictor(checkpoint::load_model(weights, options.load), options) {}

Predictor::Predictor(checkpoint::LoadedModel model, const PredictorOptions& options)
    : model_(std::move(model)), options_(options), transform_(model_.preprocessing), names_(model_.classes) {
  if (classes() == 0) {
    throw Error(file_in_quotes(model_.report.file) +
                " has no head and so no classes; fine-tune it first, or take its features");
  }
  if (options_.batch < 1) throw Error("images per forward pass must be at least 1");
  if (model_.model->config().in_chans != 3) throw Error("the model does not take colour images of three channels");
  for (std::int64_t i = static_cast<std::int64_t>(names_.size()); i < classes(); ++i)
    names_.push_back("class " + std::to_string(i));
  model_.model->eval();
}

at::Tensor Predictor::prepare(const Image& image) const {
  at::Tensor values = at::empty({3, transform_.size().height, transform_.size().width}, at::kFloat);
  data::Random unused(0, data::Purpose::kAugment);
  transform_.apply(image, unused, values.mutable_data_ptr<float>());
  return values;
}

at::Tensor Predictor::probabilities(const at::Tensor& images) const {
  const torch::NoGradGuard no_grad;
  const at::Device device = model_.model->parameters().front().device();
  const nn::PrecisionScope precision(device.type(), options_.precision, nn::WeightCasts::kAtEachUse);
  const at::Tensor logits = nn::within_memory(
      images, options_.batch_option, [&](const at::Tensor& some) { return model_.model->forward(some.to(device)); });
  return at::softmax(logits.to(at::kFloat), -1).to(at::kCPU);
}

std::vector<Guess> Predictor::best(const at::Tensor& probabilities, std::int64_t top) const {
  const at::Tensor values = probabilities.to(at::kFloat).contiguous();
  const float* value = values.const_data_ptr<float>();
  std::vector<std::int64_t> order(static_cast<std::size_t>(values.numel()));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  const auto count = std::clamp<std::int64_t>(top, 0, values.numel());
  // Equal probabilities by number, so that the answer is the same everywhere.
  std::partial_sort(order.begin(), order.begin() + count, order.end(),
                    [&](std::int64_t a, std::int64_t b) { return value[a] != value[b] ? value[a] > value[b] : a < b; });
  std::vector<Guess> guesses;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t index = order[static_cast<std::size_t>(i)];
    guesses.push_back({index, class_name(index), static_cast<double>(value[index])});
  }
  return guesses;
}

std::vector<std::vector<Guess>> Predictor::classify(std::span<const Image> images, std::int64_t top) const {
  std::vector<std::vector<Guess>> result;
  for (std::size_t begin = 0; begin < images.size(); begin += static_cast<std::size_t>(options_.batch)) {
    std::vector<at::Tensor> prepared;
    for (const Image& image :
         images.subspan(begin, std::min(images.size() - begin, static_cast<std::size_t>(options_.batch))))
      prepared.push_back(prepare(image));
    const at::Tensor values = probabilities(at::stack(prepared));
    for (std::int64_t i = 0; i < values.size(0); ++i) result.push_back(best(values[i], top));
  }
  return result;
}

std::vector<Guess> Predictor::classify(const Image& image, std::int64_t top) const {
  return classify(std::span<const Image>(&image, 1), top).front();
}

std::vector<Guess> Predictor::classify_file(const std::filesystem::path& image, std::int64_t top) const {
  return classify(load_image(image, options_.limits), top);
}

std::vector<Guess> Predictor::classify_encoded(std::span<const std::uint8_t> jpeg_png_or_webp, std::int64_t top) const {
  return classify(decode_image(jpeg_png_or_webp, "the image in memory", options_.limits), top);
}

}  // namespace violin
