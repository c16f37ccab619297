// Which images an epoch visits, in which order, and which of them belong to this process.
//
// The order of an epoch is drawn for all processes together and dealt out one by one: process r of w takes the places
// r, r+w, r+2w, … . So batch k of all processes together is the same set of images for every w, as long as w times the
// batch of a process stays the same.
#pragma once

#include <cstdint>
#include <vector>

namespace violin::data {

// One visit of an image; `repeat` counts its earlier visits in the same epoch, so that each is augmented anew.
struct Pick {
  std::int64_t index = 0;
  std::int64_t repeat = 0;
  friend bool operator==(const Pick&, const Pick&) = default;
};

struct SamplerOptions {
  std::uint64_t seed = 0;
  bool shuffle = true;
  bool balanced = false;     // draws with replacement, every class equally likely; needs labels
  std::int64_t repeats = 1;  // repeated augmentation: every image so often, and as many fewer images per epoch
  std::int64_t batch = 64;   // of one process
  bool drop_last = true;     // only whole batches, the same number in every process; false: every image once
  std::int64_t rank = 0;
  std::int64_t world = 1;
};

class Sampler {
 public:
  // `size` images; labels [size] are needed for balanced sampling only. With drop_last, fewer images than a batch of
  // all processes are an error that names both numbers.
  Sampler(std::int64_t size, const SamplerOptions& options, const std::vector<std::int64_t>& labels = {});

  // The picks of this process.
  std::vector<Pick> epoch(std::int64_t epoch) const;
  // The picks of all processes in their common order, before they are dealt out.
  std::vector<Pick> global_epoch(std::int64_t epoch) const;

  std::int64_t picks() const;    // of this process per epoch
  std::int64_t batches() const;  // of this process per epoch
  const SamplerOptions& options() const { return options_; }

 private:
  std::int64_t global_picks() const;

  std::int64_t size_;
  SamplerOptions options_;
  std::vector<std::vector<std::int64_t>> by_class_;  // classes that have images
};

}  // namespace violin::data
