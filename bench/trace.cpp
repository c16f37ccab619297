#include "bench/trace.h"

#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include "violin/error.h"

namespace violin::bench {

void trace(const std::string& file, const std::function<void()>& work) {
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (torch::cuda::is_available()) activities.insert(ActivityType::CUDA);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  work();
  if (torch::cuda::is_available()) torch::cuda::synchronize();
  const auto result = profiler::disableProfiler();
  if (!result) throw Error("torch recorded nothing; this build of it has no profiler");
  result->save(file);
}

}  // namespace violin::bench
