#include "violin/data/sampler.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "violin/data/random.h"
#include "violin/error.h"

namespace violin::data {

Sampler::Sampler(std::int64_t size, const SamplerOptions& options, const std::vector<std::int64_t>& labels)
    : size_(size), options_(options) {
  if (size < 1) throw Error("there are no images to draw from");
  if (options.batch < 1) throw Error("batch size " + std::to_string(options.batch) + " must be at least 1");
  if (options.repeats < 1) throw Error("repeats " + std::to_string(options.repeats) + " must be at least 1");
  if (options.world < 1 || options.rank < 0 || options.rank >= options.world) {
    throw Error("rank " + std::to_string(options.rank) + " is not one of " + std::to_string(options.world) +
                " processes");
  }
  if (options.balanced) {
    if (static_cast<std::int64_t>(labels.size()) != size) throw Error("balanced sampling needs a label for each image");
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t label = labels[static_cast<std::size_t>(i)];
      if (label < 0) throw Error("balanced sampling needs labels of 0 and more");
      if (label >= static_cast<std::int64_t>(by_class_.size())) by_class_.resize(static_cast<std::size_t>(label) + 1);
      by_class_[static_cast<std::size_t>(label)].push_back(i);
    }
    std::erase_if(by_class_, [](const std::vector<std::int64_t>& members) { return members.empty(); });
  }
  if (options.drop_last && batches() < 1) {
    throw Error(std::to_string(size) + " images are fewer than one batch of " + std::to_string(options.batch) +
                (options.world > 1 ? " in each of " + std::to_string(options.world) + " processes" : "") +
                ": choose a smaller batch");
  }
}

// Repeated augmentation sees as many picks per epoch as there are images, rounded down to a multiple of 256 as DeiT
// does where that leaves a batch.
std::int64_t Sampler::global_picks() const {
  std::int64_t picks = size_;
  const std::int64_t together = options_.batch * options_.world;
  if (options_.repeats > 1 && size_ / 256 * 256 >= together) picks = size_ / 256 * 256;
  if (options_.drop_last) picks = picks / together * together;
  return picks;
}

std::int64_t Sampler::picks() const {
  return (global_picks() - options_.rank + options_.world - 1) / options_.world;
}

std::int64_t Sampler::batches() const {
  return (picks() + options_.batch - 1) / options_.batch;
}

std::vector<Pick> Sampler::global_epoch(std::int64_t epoch) const {
  const std::int64_t count = global_picks();
  const std::int64_t distinct = (count + options_.repeats - 1) / options_.repeats;
  std::vector<std::int64_t> order(static_cast<std::size_t>(size_));
  Random random(options_.seed, Purpose::kOrder, {epoch});
  if (options_.balanced) {
    order.resize(static_cast<std::size_t>(distinct));
    for (std::int64_t& index : order) {
      const auto& members = by_class_[static_cast<std::size_t>(random.below(std::ssize(by_class_)))];
      index = members[static_cast<std::size_t>(random.below(std::ssize(members)))];
    }
  } else {
    std::iota(order.begin(), order.end(), 0);
    for (std::int64_t i = 0; options_.shuffle && i < distinct; ++i) {
      std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(i + random.below(size_ - i))]);
    }
  }
  std::vector<Pick> picks(static_cast<std::size_t>(count));
  std::vector<std::int64_t> visits(static_cast<std::size_t>(size_));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t index = order[static_cast<std::size_t>(i / options_.repeats)];
    picks[static_cast<std::size_t>(i)] = {index, visits[static_cast<std::size_t>(index)]++};
  }
  return picks;
}

std::vector<Pick> Sampler::epoch(std::int64_t epoch) const {
  const std::vector<Pick> all = global_epoch(epoch);
  std::vector<Pick> own;
  own.reserve(static_cast<std::size_t>(picks()));
  for (auto i = static_cast<std::size_t>(options_.rank); i < all.size();
       i += static_cast<std::size_t>(options_.world)) {
    own.push_back(all[i]);
  }
  return own;
}

}  // namespace violin::data
