// A number as text.
#pragma once

#include <array>
#include <cstdio>
#include <string>

namespace violin {

// `format` takes one double: "%.2f%%".
inline std::string number_text(double value, const char* format = "%.6g") {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

}  // namespace violin
