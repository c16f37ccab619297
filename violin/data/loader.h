// Batches of normalised images as tensors, made by worker threads ahead of the caller. Needs torch: link
// violin_data_torch.
//
//   Sampler sampler(set.size(), {.batch = 256});
//   const auto augment = std::make_shared<TrainTransform>(deit_augmentation(Size::square(224)));
//   Loader loader(set, augment, {.workers = 8, .seed = 7});
//   for (int epoch = 0; epoch < 300; ++epoch) {
//     loader.start(sampler.epoch(epoch), sampler.options().batch, epoch);
//     while (std::optional<Batch> batch = loader.next()) train_on(*batch);
//   }
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "violin/data/dataset.h"
#include "violin/data/sampler.h"
#include "violin/data/transforms.h"

namespace violin::data {

enum class OnBadImage { kSkip, kFatal };
std::string_view on_bad_image_name(OnBadImage policy);  // "skip", "fatal"
OnBadImage parse_on_bad_image(std::string_view name);

struct Batch {
  torch::Tensor images;   // [B,3,H,W] float32, normalised; pinned where asked for
  torch::Tensor labels;   // [B] int64
  torch::Tensor indices;  // [B] int64, into the sample set
  std::int64_t epoch = 0;
  std::int64_t number = 0;  // within the epoch, from 0; counts on from `first_batch`
  std::int64_t size() const { return labels.size(0); }
};

struct BadImage {
  std::string name;
  std::string message;
  std::int64_t index = 0;  // into the sample set
};

struct LoaderOptions {
  int workers = 2;            // 0: next() makes the batch itself
  std::int64_t prefetch = 3;  // batches that may be ready or in work beyond the one handed out
  OnBadImage on_bad_image = OnBadImage::kSkip;
  // A skipped image's place is taken by another one, drawn by (seed, epoch, index), so that batches keep their size
  // (training); false: the batch gets smaller, and nothing is counted twice (evaluation).
  bool replace_bad = false;
  std::int64_t cache_bytes = 0;  // of decoded images kept in memory; 0: none
  bool pin = false;              // page-locked buffers, for copies to a GPU
  std::uint64_t seed = 0;        // of augmentation
};

class Loader {
 public:
  Loader(SampleSet set, std::shared_ptr<const Transform> transform, const LoaderOptions& options);
  // Ends the workers, also in the middle of an epoch.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Begins an epoch; an unfinished one is dropped. Batches before `first_batch` are left out without decoding anything:
  // a resumed run gets the same batches as one that was never interrupted.
  void start(std::vector<Pick> picks, std::int64_t batch_size, std::int64_t epoch, std::int64_t first_batch = 0);

  // The next batch in order; nothing at the end of the epoch. Throws what a worker threw, with the image's name.
  std::optional<Batch> next();

  std::int64_t batches() const;  // of the epoch that was started, those before first_batch included
  const SampleSet& set() const;

  // Images that could not be decoded so far, each once.
  std::vector<BadImage> bad_images() const;
  std::int64_t cached_bytes() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

// All images of a set once, in order: for evaluation.
std::vector<Pick> in_order(std::int64_t size);

}  // namespace violin::data
