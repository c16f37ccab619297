#include "violin/train/distributed.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "violin/error.h"

namespace violin::train {
namespace {

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::string text(const char* name) const {
    const char* value = environment_ ? environment_(name) : std::getenv(name);
    return value != nullptr ? value : "";
  }
  bool has(const char* name) const { return !text(name).empty(); }
  std::optional<std::int64_t> number(const char* name) const {
    const std::string value = text(name);
    if (value.empty()) return std::nullopt;
    std::int64_t result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || result < 0)
      throw Error(std::string("environment variable ") + name + " is '" + value + "'; expected a number");
    return result;
  }
  // The first of them that is set.
  std::int64_t number(std::initializer_list<const char*> names, std::int64_t otherwise) const {
    for (const char* name : names)
      if (const auto value = number(name)) return *value;
    return otherwise;
  }

 private:
  const Environment& environment_;
};

}  // namespace

Launch find_launch(const Environment& environment) {
  const Variables variables(environment);
  Launch launch;
  if (variables.has("OMPI_COMM_WORLD_SIZE") || variables.has("PMI_SIZE")) {
    launch.by = Launch::By::kMpirun;
    launch.world = variables.number({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}, 1);
    launch.rank = variables.number({"OMPI_COMM_WORLD_RANK", "PMI_RANK"}, 0);
    launch.local_rank = variables.number({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"}, 0);
    launch.local_world = variables.number({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}, 1);
  } else if (variables.has("RANK") && variables.has("WORLD_SIZE")) {
    launch.by = Launch::By::kTorchrun;
    launch.world = variables.number({"WORLD_SIZE"}, 1);
    launch.rank = variables.number({"RANK"}, 0);
    launch.local_rank = variables.number({"LOCAL_RANK"}, 0);
    launch.local_world = variables.number({"LOCAL_WORLD_SIZE"}, 1);
  } else if (variables.has("SLURM_STEP_NUM_TASKS") && variables.has("SLURM_PROCID")) {
    // A step's variables: a batch script that calls no srun has those of the job only and is one process.
    launch.by = Launch::By::kSlurm;
    launch.world = variables.number({"SLURM_STEP_NUM_TASKS"}, 1);
    launch.rank = variables.number({"SLURM_PROCID"}, 0);
    launch.local_rank = variables.number({"SLURM_LOCALID"}, 0);
    const std::string per_node = variables.text("SLURM_STEP_TASKS_PER_NODE");  // 4(x2),3
    std::from_chars(per_node.data(), per_node.data() + per_node.size(), launch.local_world);
    launch.master = variables.text("SLURM_LAUNCH_NODE_IPADDR");
    // The same for all processes of a job, another for another job.
    launch.port = 20000 + variables.number({"SLURM_JOB_ID"}, 0) % 20000;
  } else {
    return launch;
  }
  if (variables.has("MASTER_ADDR")) launch.master = variables.text("MASTER_ADDR");
  launch.port = variables.number({"MASTER_PORT"}, launch.port);
  launch.local_world = std::max<std::int64_t>(launch.local_world, 1);
  if (launch.world < 1 || launch.rank >= launch.world) {
    throw Error("the environment says process " + std::to_string(launch.rank) + " of " + std::to_string(launch.world) +
                "; start the command with mpirun, torchrun or srun");
  }
  if (launch.port > 65535)
    throw Error("environment variable MASTER_PORT is " + std::to_string(launch.port) + "; expected at most 65535");
  return launch;
}

std::chrono::seconds answer_timeout(const Environment& environment) {
  const std::int64_t seconds = Variables(environment).number({"VIOLIN_TIMEOUT"}, 600);
  if (seconds < 1) throw Error("environment variable VIOLIN_TIMEOUT is 0; expected seconds, at least 1");
  return std::chrono::seconds(std::min<std::int64_t>(seconds, 7 * 24 * 3600));
}

int fair_cores(const Launch& launch) {
  const auto all = static_cast<int>(std::max(::sysconf(_SC_NPROCESSORS_ONLN), 1L));
  cpu_set_t set;
  CPU_ZERO(&set);
  const int own = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : all;
  if (own < all) return std::max(own, 1);  // bound to its share already
  return std::max<int>(1, all / static_cast<int>(std::clamp<std::int64_t>(launch.local_world, 1, all)));
}

bool has_mpi() {
#ifdef VIOLIN_HAVE_MPI
  return true;
#else
  return false;
#endif
}

bool has_nccl() {
#ifdef VIOLIN_HAVE_NCCL
  return true;
#else
  return false;
#endif
}

#ifndef VIOLIN_HAVE_MPI
std::unique_ptr<Processes> join_mpi(const Launch& launch, std::chrono::seconds /*timeout*/) {
  throw Error("this violin was built without MPI and cannot join " + std::to_string(launch.world) +
              " processes on CPUs; install libopenmpi-dev and build again");
}
#endif

#ifndef VIOLIN_HAVE_NCCL
std::unique_ptr<Processes> join_nccl(const Launch& launch, c10::Device /*device*/, std::chrono::seconds /*timeout*/) {
  throw Error("this violin was built without NCCL and cannot join " + std::to_string(launch.world) +
              " processes on GPUs; build it with a CUDA build of torch");
}
#endif

std::unique_ptr<Processes> join_processes(const Launch& launch, c10::Device device, std::chrono::seconds timeout) {
  if (device.is_cuda()) {
    if (launch.by == Launch::By::kHand) return std::make_unique<Processes>();
    if (launch.by == Launch::By::kMpirun && !launch.several()) return std::make_unique<Processes>();
    if (launch.by == Launch::By::kSlurm && !launch.several()) return std::make_unique<Processes>();
    if (launch.by == Launch::By::kTorchrun && !launch.several() && !has_nccl()) return std::make_unique<Processes>();
    if (launch.master.empty() || launch.port == 0) {
      throw Error(
          "processes on GPUs meet where MASTER_ADDR and MASTER_PORT say, which are not set; start them with "
          "torchrun, or set both to the machine of process 0 and a free port");
    }
    return join_nccl(launch, device, timeout);
  }
  if (!launch.several()) return std::make_unique<Processes>();
  if (launch.by == Launch::By::kTorchrun) {
    throw Error("torchrun starts processes on GPUs; on CPUs take mpirun -n " + std::to_string(launch.world) +
                " instead");
  }
  return join_mpi(launch, timeout);
}

void broadcast_text(Processes& processes, std::string& text) {
  if (processes.world() == 1) return;
  at::Tensor size = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  processes.broadcast(size);
  at::Tensor bytes = at::zeros({size.item<std::int64_t>()}, at::kByte);
  if (processes.first()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  if (bytes.numel() > 0) processes.broadcast(bytes);
  text.assign(static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(bytes.numel()));
}

bool first_says(Processes& processes, bool answer) {
  at::Tensor flag = at::full({1}, static_cast<std::int64_t>(answer), at::kLong);
  processes.broadcast(flag);
  return flag.item<std::int64_t>() != 0;
}

void expect_same(Processes& processes, const std::string& text, const std::string& what) {
  std::string firsts = text;
  broadcast_text(processes, firsts);
  at::Tensor different = at::full({1}, firsts == text ? 0.0 : 1.0, at::kDouble);
  processes.sum(different);
  const auto count = static_cast<std::int64_t>(different.item<double>());
  if (count > 0) {
    throw Error(what + " in " + std::to_string(count) + " of " + std::to_string(processes.world()) +
                " processes than in the first one; give all of them the same files and arguments");
  }
}

}  // namespace violin::train
