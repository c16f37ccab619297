// Words from outside, fit for a message.
#pragma once

#include <string>
#include <string_view>

namespace violin::data {

// 'text' on one line: control characters are replaced, and what is very long is cut.
std::string in_quotes(std::string_view text);

}  // namespace violin::data
