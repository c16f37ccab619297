#include "violin/train/gradient_buckets.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace violin::train {

class GradientBuckets::State {
 public:
  State(const std::vector<at::Tensor>& parameters, Start start, std::int64_t bytes) : start_(std::move(start)) {
    std::vector<at::Tensor> members;
    std::int64_t size = 0;
    for (auto parameter = parameters.rbegin(); parameter != parameters.rend(); ++parameter) {
      const auto own = static_cast<std::int64_t>(parameter->nbytes());
      const bool other = !members.empty() && wide(members.front()) != wide(*parameter);
      if (!members.empty() && (other || size + own > bytes)) {
        add(std::move(members));
        members.clear();
        size = 0;
      }
      members.push_back(*parameter);
      size += own;
    }
    if (!members.empty()) add(std::move(members));
  }

  void arm() {
    for (Bucket& bucket : buckets_) {
      std::fill(bucket.ready.begin(), bucket.ready.end(), false);
      bucket.missing = std::ssize(bucket.parameters);
    }
    next_ = 0;
    armed_ = true;
  }
  void cancel() { armed_ = false; }

  void ready(std::size_t bucket, std::size_t place) {
    if (!armed_ || buckets_[bucket].ready[place]) return;
    buckets_[bucket].ready[place] = true;
    --buckets_[bucket].missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) start_next();
  }

  void flush() {
    while (armed_ && next_ < buckets_.size()) start_next();
    armed_ = false;
  }

  void finish(double factor) {
    const torch::NoGradGuard no_grad;
    for (Bucket& bucket : buckets_) {
      bucket.flat.mul_(factor);
      for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
        at::Tensor& gradient = bucket.parameters[i].mutable_grad();
        if (gradient.defined()) {
          gradient.copy_(bucket.views[i]);
        } else if (bucket.given[static_cast<std::int64_t>(i)].item<double>() > 0) {
          gradient = at::empty_like(bucket.parameters[i]).copy_(bucket.views[i]);
        }
      }
    }
  }

  std::size_t size() const { return buckets_.size(); }
  const std::vector<at::Tensor>& parameters(std::size_t bucket) const { return buckets_[bucket].parameters; }

 private:
  struct Bucket {
    std::vector<at::Tensor> parameters;
    at::Tensor flat;                // all gradients, then for each how many processes have it
    std::vector<at::Tensor> views;  // into flat, one per parameter, of its shape
    at::Tensor given;               // into flat, [parameters]
    std::vector<bool> ready;
    std::int64_t missing = 0;
  };

  // Sums of 16-bit gradients are made in float32.
  static at::ScalarType wide(const at::Tensor& parameter) {
    return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }

  void add(std::vector<at::Tensor> members) {
    Bucket bucket;
    std::int64_t count = 0;
    for (const at::Tensor& parameter : members) count += parameter.numel();
    const std::int64_t places = std::ssize(members);
    bucket.flat = at::zeros({count + places}, at::TensorOptions(members.front().device()).dtype(wide(members.front())));
    std::int64_t offset = 0;
    for (const at::Tensor& parameter : members) {
      bucket.views.push_back(bucket.flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
      offset += parameter.numel();
    }
    bucket.given = bucket.flat.narrow(0, count, places);
    bucket.ready.resize(members.size());
    bucket.parameters = std::move(members);
    buckets_.push_back(std::move(bucket));
  }

  void start_next() {
    const torch::NoGradGuard no_grad;
    Bucket& bucket = buckets_[next_++];
    bucket.given.fill_(1);
    for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
      const at::Tensor& gradient = bucket.parameters[i].grad();
      if (gradient.defined()) {
        bucket.views[i].copy_(gradient);
      } else {
        bucket.views[i].zero_();
        bucket.given[static_cast<std::int64_t>(i)].zero_();
      }
    }
    start_(bucket.flat);
  }

  Start start_;
  std::vector<Bucket> buckets_;
  std::size_t next_ = 0;  // the first that has not started
  bool armed_ = false;
};

namespace {

template <class State>
class Ready : public torch::autograd::PostAccumulateGradHook {
 public:
  Ready(std::weak_ptr<State> state, std::size_t bucket, std::size_t place)
      : state_(std::move(state)), bucket_(bucket), place_(place) {}
  void operator()(const at::Tensor& /*parameter*/) override {
    if (const auto state = state_.lock()) state->ready(bucket_, place_);
  }

 private:
  std::weak_ptr<State> state_;
  std::size_t bucket_, place_;
};

}  // namespace

GradientBuckets::GradientBuckets(const std::vector<at::Tensor>& parameters, Start start, std::int64_t bytes)
    : state_(std::make_shared<State>(parameters, std::move(start), bytes)) {
  for (std::size_t bucket = 0; bucket < state_->size(); ++bucket) {
    const std::vector<at::Tensor>& members = state_->parameters(bucket);
    for (std::size_t place = 0; place < members.size(); ++place) {
      torch::autograd::impl::set_post_acc_grad_hooks(members[place],
                                                     std::make_unique<Ready<State>>(state_, bucket, place));
    }
  }
}

GradientBuckets::~GradientBuckets() = default;

void GradientBuckets::arm() {
  state_->arm();
}
void GradientBuckets::flush() {
  state_->flush();
}
void GradientBuckets::finish(double factor) {
  state_->finish(factor);
}
void GradientBuckets::cancel() {
  state_->cancel();
}
std::int64_t GradientBuckets::buckets() const {
  return static_cast<std::int64_t>(state_->size());
}

}  // namespace violin::train
