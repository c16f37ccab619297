// What the fuzzers ask of the code: that something holds, and that mistakes are errors of one line.
#pragma once

#include <cstdlib>
#include <string_view>

#include "violin/error.h"

namespace violin {

inline void require(bool good) {
  if (!good) std::abort();
}

template <class Work>
void attempt(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
}

}  // namespace violin
