// Several processes: how they were started, and the engines through which they talk.
//
//   MPI    on CPUs, started by mpirun (or srun with PMI)
//   NCCL   on GPUs, one process each, started by torchrun or srun
//
// Each engine is there where the build found it. An answer that does not come within the timeout is an error that says
// so: a process that died somewhere must not leave the others waiting for ever.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "violin/train/processes.h"

namespace violin::train {

struct Launch {
  enum class By { kHand, kMpirun, kTorchrun, kSlurm };
  By by = By::kHand;
  std::int64_t rank = 0, world = 1;
  std::int64_t local_rank = 0, local_world = 1;  // on this machine
  std::string master;                            // where process 0 listens, for NCCL; empty: not said
  std::int64_t port = 0;

  // A single process that torchrun started on a GPU goes through NCCL like any number of them.
  bool several() const { return world > 1; }
};

using Environment = std::function<const char*(const char* name)>;  // as std::getenv
// Throws violin::Error where variables contradict each other.
Launch find_launch(const Environment& environment = nullptr);

// VIOLIN_TIMEOUT in seconds; 600 where it is not set.
std::chrono::seconds answer_timeout(const Environment& environment = nullptr);

// Cores that a process should use where several share this machine.
int fair_cores(const Launch& launch);

bool has_mpi();
bool has_nccl();

// Waits for all processes; throws violin::Error with a remedy where the engine that the device needs is missing.
std::unique_ptr<Processes> join_processes(const Launch& launch, c10::Device device, std::chrono::seconds timeout);

// The first one's text or answer for everybody.
void broadcast_text(Processes& processes, std::string& text);
bool first_says(Processes& processes, bool answer);
// Throws where processes have different texts; `what` names them.
void expect_same(Processes& processes, const std::string& text, const std::string& what);

// The engines; distributed.cpp alone calls them.
std::unique_ptr<Processes> join_mpi(const Launch& launch, std::chrono::seconds timeout);
std::unique_ptr<Processes> join_nccl(const Launch& launch, c10::Device device, std::chrono::seconds timeout);

}  // namespace violin::train
