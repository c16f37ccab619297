#include "violin/ops/device.h"

namespace violin::ops {

bool on_gpu(const at::Tensor& tensor) {
  return tensor.is_cuda();
}

}  // namespace violin::ops
