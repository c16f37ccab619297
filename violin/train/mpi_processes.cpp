// Processes over MPI, for CPUs.
//
// A thread of its own sums gradient buckets while the backward pass goes on. Nothing blocks inside MPI: collectives are
// begun and then looked at again and again, with pauses that leave the core to others, until they are done or the time
// is up. MPI is called by one thread at a time: while buckets are under way the main thread does not call it.
#include <mpi.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "violin/error.h"
#include "violin/train/distributed.h"
#include "violin/train/gradient_buckets.h"

namespace violin::train {
namespace {

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(std::string("MPI failed to ") + what + ": " + std::string(text, static_cast<std::size_t>(length)));
}

MPI_Datatype type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kLong:
      return MPI_INT64_T;
    case at::kByte:
      return MPI_UINT8_T;
    default:
      throw Error(std::string("MPI does not carry tensors of type ") + c10::toString(tensor.scalar_type()));
  }
}

class MpiProcesses : public Processes {
 public:
  MpiProcesses(const Launch& launch, std::chrono::seconds timeout) : timeout_(timeout) {
    int given = 0;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &given), "start");
    if (given < MPI_THREAD_SERIALIZED) throw Error("this MPI cannot be used by threads; take another, as OpenMPI");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    int rank = 0, world = 1;
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "tell the rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &world), "tell the number of processes");
    rank_ = rank;
    world_ = world;
    if (world_ != launch.world) {
      throw Error("MPI knows " + std::to_string(world_) + " processes where the environment says " +
                  std::to_string(launch.world) + "; mpirun and the library violin was built with are different MPIs");
    }
    reducer_ = std::thread([this] { reduce_buckets(); });
  }

  ~MpiProcesses() override { end_thread(); }

  std::int64_t rank() const override { return rank_; }
  std::int64_t world() const override { return world_; }
  std::string describe() const override { return std::to_string(world_) + " processes over MPI"; }

  void sum(at::Tensor& tensor) override {
    at::Tensor packed = tensor.contiguous();
    sum_packed(packed);
    if (!packed.is_same(tensor)) tensor.copy_(packed);
  }

  void broadcast(at::Tensor& tensor) override {
    const torch::NoGradGuard no_grad;
    // As bytes: weights may be of any type.
    const at::Tensor packed = tensor.contiguous();
    auto* bytes = static_cast<char*>(packed.data_ptr());
    for (std::size_t left = packed.nbytes(); left > 0;) {
      const std::size_t now = std::min(left, kChunk);
      MPI_Request request = MPI_REQUEST_NULL;
      check(MPI_Ibcast(bytes, static_cast<int>(now), MPI_BYTE, 0, MPI_COMM_WORLD, &request), "broadcast");
      wait(request);
      bytes += now;
      left -= now;
    }
    if (!packed.is_same(tensor)) tensor.copy_(packed);
  }

  void barrier() override {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Ibarrier(MPI_COMM_WORLD, &request), "wait for all processes");
    wait(request);
  }

  void watch(const std::vector<at::Tensor>& parameters) override {
    buckets_ = std::make_unique<GradientBuckets>(parameters, [this](at::Tensor& flat) {
      {
        const std::lock_guard lock(mutex_);
        queue_.push_back(flat);
        ++under_way_;
      }
      changed_.notify_all();
    });
  }
  void before_backward() override { buckets_->arm(); }
  void cancel() override {
    if (buckets_) buckets_->cancel();
  }
  void gradients_done() override {
    buckets_->flush();
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return under_way_ == 0 || problem_ != nullptr; });
      if (problem_ != nullptr) std::rethrow_exception(problem_);
    }
    buckets_->finish(1.0 / static_cast<double>(world_));
  }

  void leave() override {
    barrier();
    end_thread();
    check(MPI_Finalize(), "end");
  }

  [[noreturn]] void abort(int code) override {
    MPI_Abort(MPI_COMM_WORLD, code);
    std::_Exit(code);
  }

 private:
  static constexpr std::size_t kChunk = std::size_t{1} << 28;  // bytes; counts of MPI are ints

  void sum_packed(at::Tensor& tensor) {
    const MPI_Datatype type = type_of(tensor);
    const std::size_t width = tensor.element_size();
    auto* bytes = static_cast<char*>(tensor.mutable_data_ptr());
    for (std::size_t left = tensor.nbytes(); left > 0;) {
      const std::size_t now = std::min(left, kChunk);
      MPI_Request request = MPI_REQUEST_NULL;
      check(MPI_Iallreduce(MPI_IN_PLACE, bytes, static_cast<int>(now / width), type, MPI_SUM, MPI_COMM_WORLD, &request),
            "sum");
      wait(request);
      bytes += now;
      left -= now;
    }
  }

  void wait(MPI_Request& request) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now();
    for (int look = 0;; ++look) {
      int done = 0;
      check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "finish a transfer");
      if (done != 0) return;
      if (look < 100) {
        std::this_thread::yield();
        continue;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(look < 2000 ? 20 : 200));
      const std::lock_guard lock(mutex_);
      if (ending_) throw Error("the processes part");
      if (Clock::now() - begin > timeout_) {
        throw Error("no answer from another process for " + std::to_string(timeout_.count()) +
                    " s: it has died or hangs. --resume goes on from the last checkpoint, where there is one; "
                    "VIOLIN_TIMEOUT=SECONDS waits longer");
      }
    }
  }

  void reduce_buckets() {
    for (;;) {
      at::Tensor flat;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
        if (ending_) return;
        flat = std::move(queue_.front());
        queue_.pop_front();
      }
      try {
        sum_packed(flat);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        problem_ = std::current_exception();
        changed_.notify_all();
        return;
      }
      {
        const std::lock_guard lock(mutex_);
        --under_way_;
      }
      changed_.notify_all();
    }
  }

  void end_thread() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    if (reducer_.joinable()) reducer_.join();
  }

  std::chrono::seconds timeout_;
  std::int64_t rank_ = 0, world_ = 1;
  std::unique_ptr<GradientBuckets> buckets_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<at::Tensor> queue_;
  int under_way_ = 0;  // buckets, waiting or being summed
  std::exception_ptr problem_;
  bool ending_ = false;
  std::thread reducer_;
};

}  // namespace

std::unique_ptr<Processes> join_mpi(const Launch& launch, std::chrono::seconds timeout) {
  return std::make_unique<MpiProcesses>(launch, timeout);
}

}  // namespace violin::train
