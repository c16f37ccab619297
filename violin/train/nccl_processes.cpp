// Processes over NCCL, one per GPU, through torch's process group: it has its own stream for transfers, so buckets are
// summed while the backward pass computes, and a watchdog that ends the process when an answer does not come in time.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "violin/error.h"
#include "violin/train/distributed.h"
#include "violin/train/gradient_buckets.h"

namespace violin::train {
namespace {

std::string first_line(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

class NcclProcesses : public Processes {
 public:
  NcclProcesses(const Launch& launch, c10::Device device, std::chrono::seconds timeout)
      : launch_(launch), device_(device), guard_(device) {
    c10d::TCPStoreOptions meeting;
    meeting.port = static_cast<std::uint16_t>(launch.port);
    meeting.isServer = launch.rank == 0;
    meeting.numWorkers = static_cast<std::size_t>(launch.world);
    meeting.timeout = timeout;
    try {
      // torchrun's agent keeps a store at the same address already and lets process 0 be a client of it.
      const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
      if (agent != nullptr && std::string(agent) == "True") {
        meeting.isServer = false;
        meeting.waitWorkers = false;
      }
      const auto store = c10::make_intrusive<c10d::TCPStore>(launch.master, meeting);
      // A restart by torchrun must not see the keys of the attempt before.
      const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
      const auto own =
          c10::make_intrusive<c10d::PrefixStore>(std::string("violin/") + (attempt != nullptr ? attempt : "0"), store);
      auto options = c10d::ProcessGroupNCCL::Options::create();
      options->timeout = timeout;
      group_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(own, static_cast<int>(launch.rank),
                                                           static_cast<int>(launch.world), options);
      group_->setSequenceNumberForGroup();
      barrier();
    } catch (const c10::Error& error) {
      throw Error("the processes do not find each other at " + launch.master + ":" + std::to_string(launch.port) +
                  ": " + first_line(error));
    }
  }

  std::int64_t rank() const override { return launch_.rank; }
  std::int64_t world() const override { return launch_.world; }
  std::string describe() const override { return std::to_string(launch_.world) + " processes over NCCL"; }

  void sum(at::Tensor& tensor) override {
    on_device(tensor, [&](std::vector<at::Tensor>& tensors) { return group_->allreduce(tensors); });
  }
  void broadcast(at::Tensor& tensor) override {
    on_device(tensor, [&](std::vector<at::Tensor>& tensors) { return group_->broadcast(tensors); });
  }
  void barrier() override {
    at::Tensor nothing = at::zeros({1}, at::TensorOptions(device_).dtype(at::kFloat));
    sum(nothing);
    nothing.cpu();  // waits
  }

  void watch(const std::vector<at::Tensor>& parameters) override {
    buckets_ = std::make_unique<GradientBuckets>(parameters, [this](at::Tensor& flat) {
      std::vector<at::Tensor> tensors = {flat};
      under_way_.push_back(group_->allreduce(tensors));
    });
  }
  void before_backward() override { buckets_->arm(); }
  void cancel() override {
    if (buckets_) buckets_->cancel();
  }
  void gradients_done() override {
    buckets_->flush();
    for (const auto& work : under_way_) work->wait();  // the current stream does, not this thread
    under_way_.clear();
    buckets_->finish(1.0 / static_cast<double>(launch_.world));
  }

  void leave() override {
    barrier();
    buckets_.reset();
    group_->shutdown();
  }

 private:
  // NCCL takes contiguous tensors on the GPU only.
  template <class Work>
  void on_device(at::Tensor& tensor, const Work& work) {
    const torch::NoGradGuard no_grad;
    const at::Tensor packed = tensor.to(device_).contiguous();
    std::vector<at::Tensor> tensors = {packed};
    work(tensors)->wait();
    if (!packed.is_same(tensor)) tensor.copy_(packed);
  }

  Launch launch_;
  c10::Device device_;
  c10::cuda::CUDAGuard guard_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
  std::unique_ptr<GradientBuckets> buckets_;
  std::vector<c10::intrusive_ptr<c10d::Work>> under_way_;
};

}  // namespace

std::unique_ptr<Processes> join_nccl(const Launch& launch, c10::Device device, std::chrono::seconds timeout) {
  return std::make_unique<NcclProcesses>(launch, device, timeout);
}

}  // namespace violin::train
