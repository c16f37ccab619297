// Gradients gathered into buckets of a few megabytes, each of which is summed over all processes as soon as the
// backward pass has made the last gradient in it, while it goes on with the layers before.
//
// Every process starts the same buckets in the same order, whatever the order in which gradients become ready: a bucket
// that is complete waits for those before it. A parameter that got no gradient counts as zero; where no process has
// one, it stays without, as it would with one process.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace violin::train {

class GradientBuckets {
 public:
  // Begins to sum a flat tensor over all processes, in place; the sum may arrive later.
  using Start = std::function<void(at::Tensor& flat)>;
  static constexpr std::int64_t kBytes = std::int64_t{4} << 20;

  // Parameters in the order of the forward pass; the last ones come first in the backward pass.
  GradientBuckets(const std::vector<at::Tensor>& parameters, Start start, std::int64_t bytes = kBytes);
  ~GradientBuckets();
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // The backward pass that follows is the last one of the step.
  void arm();
  // Starts what has not started yet. What it started must have arrived before finish().
  void flush();
  // Sums times `factor` become the gradients.
  void finish(double factor);
  void cancel();

  std::int64_t buckets() const;

 private:
  class State;
  std::shared_ptr<State> state_;  // hooks at parameters, which may live longer, hold it weakly
};

}  // namespace violin::train
