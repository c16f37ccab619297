// oneDNN takes processors at their word about tile instructions (AMX), and on some virtual machines a 16-bit product
// then ends the process. What oneDNN may use is read from the environment at its first call, whatever that computes, so
// the question is answered before main, by a process that may die of it.
#include "violin/nn/precision.h"

#if defined(__x86_64__) && defined(__linux__)
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <cpuid.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#endif

namespace violin::nn {
namespace {

#if defined(__x86_64__) && defined(__linux__)

bool announces_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTileBit = 1U << 24;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTileBit) != 0;
}

bool tiles_work() {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGILL, SIG_DFL);
    const c10::InferenceMode inference;
    at::set_num_threads(1);
    const at::Tensor square = at::ones({64, 64}, at::kBFloat16);
    _exit(at::mm(square, square).select(0, 0).select(0, 0).item<float>() == 64 ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

const bool kAsked = [] {
  if (!announces_tiles() || std::getenv("ONEDNN_MAX_CPU_ISA") != nullptr || tiles_work()) return true;
  return setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", 0) == 0;
}();

#else

const bool kAsked = true;

#endif

}  // namespace

PrecisionScope::PrecisionScope(c10::DeviceType device, Precision precision, WeightCasts casts)
    : device_(device),
      enabled_(at::autocast::is_autocast_enabled(device)),
      keeps_casts_(at::autocast::is_autocast_cache_enabled()),
      dtype_(at::autocast::get_autocast_dtype(device)) {
  at::autocast::set_autocast_enabled(device, kAsked && precision == Precision::kBf16);
  if (precision == Precision::kBf16) at::autocast::set_autocast_dtype(device, at::kBFloat16);
  at::autocast::set_autocast_cache_enabled(keeps_casts_ && casts == WeightCasts::kOncePerScope);
  at::autocast::increment_nesting();
}

PrecisionScope::~PrecisionScope() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(keeps_casts_);
  at::autocast::set_autocast_dtype(device_, dtype_);
  at::autocast::set_autocast_enabled(device_, enabled_);
}

}  // namespace violin::nn
