// Which instruction set the CPU kernels use; chosen once at run time.
#pragma once

#include <string_view>
#include <vector>

namespace violin::kernels::cpu {

enum class Level { kPlain, kAvx2, kAvx512 };

// The best that this machine and this build have.
Level best_level();

// All that this machine and this build have, from plain to best.
std::vector<Level> available_levels();

std::string_view level_name(Level level);  // "plain", "avx2", "avx512"

}  // namespace violin::kernels::cpu
