// Words for messages: what comes from outside, made fit for one line, and small grammar.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace violin {

// On one line, steering no terminal: control characters and broken UTF-8 as \xNN, cut after about `limit` bytes.
std::string printable(std::string_view text, std::size_t limit = std::string_view::npos);

// The same in single quotes: a word from outside, and the name of a file, whole.
std::string in_quotes(std::string_view text, std::size_t limit = 120);
inline std::string file_in_quotes(std::string_view path) {
  return in_quotes(path, std::string_view::npos);
}

bool is_utf8(std::string_view text);

// "1 image", "3 images"
std::string counted(std::int64_t count, std::string_view one);

// "a, b, c"
std::string joined(std::span<const std::string> words);

// The word with the smallest edit distance to `text`, upper and lower case being one; the first of equals. Empty where
// no word has anything in common with the text.
std::string nearest_word(std::string_view text, std::span<const std::string> words);

// "; did you mean 'nearest word'?", or `otherwise`.
std::string did_you_mean(std::string_view text, std::span<const std::string> words, std::string_view otherwise = "");

}  // namespace violin
