// Options of every verb that runs a model: --device, --threads, --workers, --seed, --precision.
#pragma once

#include <c10/core/Device.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "violin/nn/precision.h"

namespace violin::cli {

struct ComputeOptions {
  std::string device = "auto";
  int threads = 0;   // of tensor operations; 0: one per core
  int workers = -1;  // that decode images; -1: one per core, at most 8
  std::uint64_t seed = 0;
  std::string precision = "fp32";
};

// A verb that draws no random numbers has no --seed.
enum class Draws { kNone, kRandom };
void add_compute_options(CLI::App& verb, ComputeOptions& options, Draws draws = Draws::kRandom);

// What the options mean on this machine. `start` sets the number of threads for the whole process. Each throws Usage
// that names the option.
struct Compute {
  c10::Device device = c10::kCPU;
  nn::Precision precision = nn::Precision::kFp32;
  int workers = 0;
  std::uint64_t seed = 0;
};
Compute start_compute(const ComputeOptions& options);

c10::Device resolve_device(const std::string& name);  // auto: cuda where there is one
int resolve_workers(int workers);

}  // namespace violin::cli
