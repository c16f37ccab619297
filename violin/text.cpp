#include "violin/text.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace violin {
namespace {

// Bytes of the well-formed UTF-8 sequence at the front of the text, 0 where there is none.
std::size_t utf8_length(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t lead = at(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates and numbers above U+10FFFF.
  if ((lead == 0xe0 && at(1) < 0xa0) || (lead == 0xed && at(1) > 0x9f)) return 0;
  if ((lead == 0xf0 && at(1) < 0x90) || (lead == 0xf4 && at(1) > 0x8f)) return 0;
  return length;
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

// Insertions, deletions and replacements that turn a into b.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (lower(a[i]) == lower(b[j]) ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string printable(std::string_view text, std::size_t limit) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string result;
  while (!text.empty()) {
    if (result.size() >= limit) return result + "...";
    const auto byte = static_cast<std::uint8_t>(text.front());
    std::size_t length = utf8_length(text);
    // U+0080 to U+009F steer terminals too.
    const bool control = byte < 0x20 || byte == 0x7f || (byte == 0xc2 && length == 2 && (text[1] & 0xe0) == 0x80);
    if (length == 0 || control) {
      length = 1;
      result += "\\x";
      result += kHex[byte >> 4];
      result += kHex[byte & 15];
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length);
  }
  return result;
}

std::string in_quotes(std::string_view text, std::size_t limit) {
  return "'" + printable(text, limit) + "'";
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string counted(std::int64_t count, std::string_view one) {
  return std::to_string(count) + " " + std::string(one) + (count == 1 ? "" : "s");
}

std::string joined(std::span<const std::string> words) {
  std::string result;
  for (const std::string& word : words) result += (result.empty() ? "" : ", ") + word;
  return result;
}

std::string nearest_word(std::string_view text, std::span<const std::string> words) {
  constexpr std::size_t kLongest = 60;
  text = text.substr(0, kLongest);
  std::string nearest;
  std::size_t smallest = 0;
  for (const std::string& word : words) {
    const std::size_t distance = edit_distance(text, word);
    const bool related = distance < std::max(text.size(), word.size());
    if (related && (nearest.empty() || distance < smallest)) {
      nearest = word;
      smallest = distance;
    }
  }
  return nearest;
}

std::string did_you_mean(std::string_view text, std::span<const std::string> words, std::string_view otherwise) {
  const std::string nearest = nearest_word(text, words);
  return nearest.empty() ? std::string(otherwise) : "; did you mean '" + nearest + "'?";
}

}  // namespace violin
