// Names that come out of a file, made fit for a one-line message.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace violin::checkpoint {

// In single quotes, cut after about `limit` bytes; control characters and broken UTF-8 are written as \xNN.
std::string in_quotes(std::string_view text, std::size_t limit = 120);

// The name of a file, whole.
inline std::string file_in_quotes(std::string_view path) {
  return in_quotes(path, path.size() * 4);
}

bool is_utf8(std::string_view text);

}  // namespace violin::checkpoint
