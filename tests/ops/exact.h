// Attention and its gradients in plain loops over 80-bit numbers: what float64 is measured against.
#pragma once

#include "tests/ops/formula.h"

namespace violin::tests {

// As run() gives them, and "lse", all in float64.
Results exact_attention(const AttentionInputs& inputs);

}  // namespace violin::tests
