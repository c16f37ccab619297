// Another verb of this program, in a process of its own, as a person would run it.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace violin::cli {

// What it prints. What it says goes to the end of `log`, and line by line to `heed`. Throws violin::Error with the last
// of these where it fails.
std::string run_verb(const std::vector<std::string>& words, const std::filesystem::path& log,
                     const std::function<void(std::string_view line)>& heed = {});

}  // namespace violin::cli
