// Names that come out of a file, made fit for a one-line message.
#pragma once

#include <string>
#include <string_view>

namespace violin::checkpoint {

// In single quotes, cut after 120 bytes; control characters and broken UTF-8 are written as \xNN.
std::string in_quotes(std::string_view text);

bool is_utf8(std::string_view text);

}  // namespace violin::checkpoint
