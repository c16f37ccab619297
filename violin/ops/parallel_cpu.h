// Runs the phases of a CPU kernel: one after another, the tasks of each over torch's threads, with scratch from torch's
// allocator. What a task computes does not depend on who runs it, so neither do the results.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "violin/kernels/cpu/attention.h"

namespace violin::ops {

// Below so many operations waking threads takes longer than doing without them.
inline constexpr std::int64_t kWorthThreads = 1 << 16;

// run(phase, begin, end, scratch); `operations`: about how many additions or multiplications all phases take.
template <class Run>
void run_phases(const kernels::cpu::Work& work, std::int64_t operations, const Run& run) {
  constexpr std::int64_t kAlign = 64;  // of torch's CPU allocator too
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  const bool serial = operations < kWorthThreads || at::in_parallel_region();
  const std::int64_t threads = serial ? 1 : at::get_num_threads();
  const std::int64_t stride = (work.thread_scratch_bytes + kAlign - 1) / kAlign * kAlign;
  const at::Tensor shared = at::empty({work.shared_scratch_bytes}, bytes);
  const at::Tensor own = at::empty({threads * stride}, bytes);
  auto* const shared_data = shared.mutable_data_ptr<std::uint8_t>();
  auto* const own_data = own.mutable_data_ptr<std::uint8_t>();
  for (int phase = 0; phase < work.phases; ++phase) {
    if (serial) {
      run(phase, std::int64_t{0}, work.tasks[phase], kernels::cpu::Scratch{shared_data, own_data});
      continue;
    }
    at::parallel_for(0, work.tasks[phase], 1, [&](std::int64_t begin, std::int64_t end) {
      run(phase, begin, end, kernels::cpu::Scratch{shared_data, own_data + at::get_thread_num() * stride});
    });
  }
}

}  // namespace violin::ops
