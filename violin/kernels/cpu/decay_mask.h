// The decay mask on the CPU: forward and backward of violin/kernels/decay_mask.h. Works like the attention kernels:
// phases of independent tasks that depend on the shape alone, so the result has the same bits whatever the number of
// threads.
#pragma once

#include <cstdint>

#include "violin/kernels/cpu/attention.h"
#include "violin/kernels/decay_mask.h"

namespace violin::kernels::cpu {

// The largest distance between two tokens: along any curve with its axes added, or along any axis with one decay per
// axis. The caller, who checks the ranks anyway, finds it once; `span` below.
std::int64_t largest_distance(const DecayMask& mask);

Work plan(const DecayMaskForward& call, std::int64_t span);
Work plan(const DecayMaskBackward& call, std::int64_t span);

// Runs tasks [begin, end) of one phase.
void run(const DecayMaskForward& call, std::int64_t span, Level level, int phase, std::int64_t begin, std::int64_t end,
         Scratch scratch);
void run(const DecayMaskBackward& call, std::int64_t span, Level level, int phase, std::int64_t begin, std::int64_t end,
         Scratch scratch);

}  // namespace violin::kernels::cpu
