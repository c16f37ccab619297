#include "violin/data/mixup.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "violin/error.h"

namespace violin::data {

using torch::indexing::Slice;

Mixup::Mixup(const MixupOptions& options) : options_(options) {
  if (options.classes < 1) throw Error("mixup needs the number of classes");
  if (!(options.mixup >= 0) || !(options.cutmix >= 0)) throw Error("alpha of mixup and CutMix must not be negative");
  for (const double share : {options.probability, options.switch_probability, options.smoothing}) {
    if (!(share >= 0 && share <= 1)) throw Error("probabilities and label smoothing must be between 0 and 1");
  }
}

Mix Mixup::draw(std::int64_t height, std::int64_t width, std::int64_t epoch, std::int64_t number) const {
  Mix mix;
  Random random(options_.seed, Purpose::kMix, {epoch, number});
  if (!active() || !random.chance(options_.probability)) return mix;
  const bool both = options_.mixup > 0 && options_.cutmix > 0;
  mix.cutmix = both ? random.chance(options_.switch_probability) : options_.cutmix > 0;
  const double alpha = mix.cutmix ? options_.cutmix : options_.mixup;
  mix.lambda = random.beta(alpha, alpha);
  if (!mix.cutmix) return mix;
  const double side = std::sqrt(1 - mix.lambda);
  const auto cut_height = static_cast<std::int64_t>(static_cast<double>(height) * side);
  const auto cut_width = static_cast<std::int64_t>(static_cast<double>(width) * side);
  const std::int64_t y = random.below(height);
  const std::int64_t x = random.below(width);
  const std::int64_t top = std::clamp<std::int64_t>(y - cut_height / 2, 0, height);
  const std::int64_t bottom = std::clamp<std::int64_t>(y + (cut_height + 1) / 2, 0, height);
  const std::int64_t left = std::clamp<std::int64_t>(x - cut_width / 2, 0, width);
  const std::int64_t right = std::clamp<std::int64_t>(x + (cut_width + 1) / 2, 0, width);
  mix.box = {left, top, right - left, bottom - top};
  mix.lambda = 1 - static_cast<double>(mix.box.width * mix.box.height) / static_cast<double>(height * width);
  return mix;
}

torch::Tensor Mixup::apply(torch::Tensor images, const torch::Tensor& labels, std::int64_t epoch,
                           std::int64_t number) const {
  return apply(images, labels, draw(images.size(2), images.size(3), epoch, number));
}

torch::Tensor Mixup::apply(torch::Tensor images, const torch::Tensor& labels, const Mix& mix) const {
  const torch::Tensor targets = soft_targets(labels, options_.classes, options_.smoothing);
  if (mix.lambda == 1) return targets;
  if (mix.cutmix) {
    torch::Tensor part = images.index(
        {Slice(), Slice(), Slice(mix.box.y, mix.box.y + mix.box.height), Slice(mix.box.x, mix.box.x + mix.box.width)});
    part.copy_(part.flip(0));
  } else {
    const torch::Tensor partner = images.flip(0).mul_(1 - mix.lambda);
    images.mul_(mix.lambda).add_(partner);
  }
  return targets * mix.lambda + targets.flip(0) * (1 - mix.lambda);
}

torch::Tensor soft_targets(const torch::Tensor& labels, std::int64_t classes, double smoothing) {
  const double off = smoothing / static_cast<double>(classes);
  const torch::Tensor targets = torch::full({labels.size(0), classes}, off, labels.options().dtype(torch::kFloat32));
  return targets.scatter(1, labels.to(torch::kInt64).unsqueeze(1), 1 - smoothing + off);
}

}  // namespace violin::data
