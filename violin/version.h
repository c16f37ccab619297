// What this build is and what it runs on.
#pragma once

#include <string>

namespace violin {

// The number alone: "0.1.0".
const char* version();

// A few lines for `violin --version` and for reports: versions of violin and torch, the attention path that is in use
// on this CPU (instruction set, or the reference), whether CUDA kernels are built in and whether a CUDA device is
// there.
std::string version_text();

}  // namespace violin
