// The one exception type of the library: a message for a person, one line, naming the thing and the remedy.
#pragma once

#include <stdexcept>
#include <string>

namespace violin {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

}  // namespace violin
