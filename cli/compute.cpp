#include "cli/compute.h"

#include <torch/cuda.h>
#include <torch/torch.h>

#include <algorithm>
#include <thread>

#include "cli/common.h"
#include "violin/train/task.h"

namespace violin::cli {

void add_compute_options(CLI::App& verb, ComputeOptions& options, Draws draws) {
  verb.add_option("--device", options.device, "cpu, cuda, cuda:1, or auto (default: a GPU where there is one)")
      ->type_name("DEVICE")
      ->group("Computation");
  verb.add_option("--threads", options.threads, "Threads of tensor operations (default: one per core)")
      ->type_name("N")
      ->group("Computation");
  verb.add_option("--workers", options.workers, "Threads that decode images (default: one per core, at most 8)")
      ->type_name("N")
      ->group("Computation");
  verb.add_option("--precision", options.precision, "fp32 (default) or bf16, several times as fast on GPUs")
      ->type_name("P")
      ->group("Computation");
  if (draws == Draws::kRandom)
    verb.add_option("--seed", options.seed, "Seed of everything random (default 0)")
        ->check(check_seed)
        ->type_name("N")
        ->group("Computation");
}

c10::Device resolve_device(const std::string& name) {
  const auto cuda_devices = static_cast<std::int64_t>(torch::cuda::device_count());
  if (name == "cpu") return c10::kCPU;
  if (name == "auto") return cuda_devices > 0 ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU);
  std::int64_t index = -1;
  if (name == "cuda") index = 0;
  if (name.starts_with("cuda:") && name.size() > 5 && name.size() <= 8 &&
      std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    index = std::stoll(name.substr(5));
  }
  if (index < 0) throw Usage("--device '" + name + "': expected cpu, cuda, cuda:0, cuda:1, … or auto");
  if (cuda_devices == 0) throw Error("--device " + name + ": no GPU can be used here; take --device cpu");
  if (index >= cuda_devices) {
    throw Error("--device " + name + ": this machine has GPUs 0 to " + std::to_string(cuda_devices - 1));
  }
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

int resolve_workers(int workers) {
  if (workers < -1 || workers > 256) throw Usage("--workers must be from 0 to 256");
  if (workers >= 0) return workers;
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
}

Compute start_compute(const ComputeOptions& options) {
  if (options.threads < 0 || options.threads > train::kMostThreads)
    throw Usage("--threads must be from 1 to " + std::to_string(train::kMostThreads));
  Compute compute;
  compute.precision = argument("--precision", [&] { return nn::parse_precision(options.precision); });
  compute.workers = resolve_workers(options.workers);
  compute.device = resolve_device(options.device);
  compute.seed = options.seed;
  if (options.threads > 0) at::set_num_threads(options.threads);
  return compute;
}

}  // namespace violin::cli
