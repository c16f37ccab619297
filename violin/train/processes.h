// The processes that train together. One alone needs nothing; implementations over MPI and NCCL stand in distributed.h.
#pragma once

#include <torch/torch.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace violin::train {

class Processes {
 public:
  virtual ~Processes() = default;
  virtual std::int64_t rank() const { return 0; }
  virtual std::int64_t world() const { return 1; }
  // Replaces a tensor by its sum over all processes.
  virtual void sum(at::Tensor& /*tensor*/) {}
  // The same for gradients, which may begin while the backward pass goes on: watch() is told the parameters once,
  // before_backward() precedes each last pass of a step, and gradients_done() returns when all sums are there, divided
  // by the number of processes. cancel(): the step that began will not be finished.
  virtual void watch(const std::vector<at::Tensor>& /*parameters*/) {}
  virtual void before_backward() {}
  virtual void gradients_done() {}
  virtual void cancel() {}
  // Everybody gets the first one's values.
  virtual void broadcast(at::Tensor& /*tensor*/) {}
  virtual void barrier() {}
  // The common end of all; nothing else may be called afterwards.
  virtual void leave() {}
  // Ends this process and, as far as the engine can, the others.
  [[noreturn]] virtual void abort(int code) { std::_Exit(code); }
  virtual std::string describe() const { return "1 process"; }

  bool first() const { return rank() == 0; }
};

}  // namespace violin::train
