#include "violin/kernels/cuda/attention_sm80.cuh"

namespace violin::kernels::cuda::sm80 {
VIOLIN_ATTENTION_SM80(128)
}  // namespace violin::kernels::cuda::sm80
