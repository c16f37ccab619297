// The tile products that the CPU kernels are handed: the BLAS and oneDNN inside LibTorch.
#pragma once

#include "violin/kernels/cpu/attention.h"

namespace violin::ops {

const kernels::cpu::MatMul& cpu_matmul();

}  // namespace violin::ops
