#include "violin/version.h"

#include <ATen/Context.h>
#include <torch/version.h>

#include "violin/ops/path.h"
#include "violin/version_number.h"

namespace violin {

const char* version() {
  return VIOLIN_VERSION;
}

std::string version_text() {
#ifdef VIOLIN_HAVE_CUDA
  const std::string kernels = "yes";
#else
  const std::string kernels = "no";
#endif
  return std::string("violin ") + version() + "\ntorch " + TORCH_VERSION + "\nCPU path " +
         ops::path_name(ops::choose_path(at::kCPU)) + "\nCUDA kernels " + kernels + ", CUDA device " +
         (at::hasCUDA() ? "yes" : "no") + "\n";
}

}  // namespace violin
