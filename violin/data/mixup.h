// Mixup and CutMix over a batch, with the soft targets that belong to it, as timm's Mixup in batch mode: one
// coefficient for the whole batch, image i mixed with image B-1-i. Needs torch: link violin_data_torch.
#pragma once

#include <torch/torch.h>

#include <cstdint>

#include "violin/data/random.h"
#include "violin/data/resize.h"

namespace violin::data {

struct MixupOptions {
  double mixup = 0.8;               // alpha of the Beta distribution; 0: never
  double cutmix = 1.0;              // the same for CutMix
  double probability = 1.0;         // of mixing a batch at all
  double switch_probability = 0.5;  // of CutMix where both are on
  double smoothing = 0.1;           // of labels
  std::int64_t classes = 0;
  std::uint64_t seed = 0;
};

// What is done to one batch.
struct Mix {
  double lambda = 1;  // share of the image itself; of CutMix after correction for the part of the box inside
  bool cutmix = false;
  Box box;  // CutMix: comes from the partner
};

class Mixup {
 public:
  explicit Mixup(const MixupOptions& options);

  bool active() const { return options_.mixup > 0 || options_.cutmix > 0; }

  // Draws for batch `number` of `epoch`; processes that should draw differently pass number * world + rank.
  Mix draw(std::int64_t height, std::int64_t width, std::int64_t epoch, std::int64_t number) const;

  // Mixes images [B,3,H,W] in place, on any device, and returns the targets [B,classes] float32 for labels [B].
  torch::Tensor apply(torch::Tensor images, const torch::Tensor& labels, std::int64_t epoch, std::int64_t number) const;
  torch::Tensor apply(torch::Tensor images, const torch::Tensor& labels, const Mix& mix) const;

 private:
  MixupOptions options_;
};

// labels [B] to [B,classes]: 1 - smoothing + smoothing/classes at the label, smoothing/classes elsewhere.
torch::Tensor soft_targets(const torch::Tensor& labels, std::int64_t classes, double smoothing);

}  // namespace violin::data
