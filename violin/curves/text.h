// Words for error messages.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace violin::curves {

// 'text' for a one-line message: unprintable characters replaced, and cut where it is very long.
std::string quoted(std::string_view text);

// "a, b, c"
std::string joined(std::span<const std::string> words);

// The word with the smallest edit distance to `text`, upper and lower case being one; the first of equals. Empty where
// no word has anything in common with the text.
std::string nearest_word(std::string_view text, std::span<const std::string> words);

}  // namespace violin::curves
