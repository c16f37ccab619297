#include "violin/kernels/cpu/level.h"

namespace violin::kernels::cpu {

std::vector<Level> available_levels() {
  std::vector<Level> levels{Level::kPlain};
#ifdef VIOLIN_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    levels.push_back(Level::kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      levels.push_back(Level::kAvx512);
    }
  }
#endif
  return levels;
}

Level best_level() {
  static const Level best = available_levels().back();
  return best;
}

std::string_view level_name(Level level) {
  switch (level) {
    case Level::kPlain:
      return "plain";
    case Level::kAvx2:
      return "avx2";
    case Level::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace violin::kernels::cpu
