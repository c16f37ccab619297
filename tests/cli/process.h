// Runs the built violin command as a user would.
#pragma once

#include <string>
#include <vector>

namespace violin {

struct Outcome {
  int code = -1;  // exit status; -1 when a signal ended it
  std::string out;
  std::string err;
};

// Neither stream is a terminal, so nothing is coloured. `stdout_path` sends stdout elsewhere.
Outcome run_violin(const std::vector<std::string>& arguments, const std::string& stdout_path = "");

}  // namespace violin
