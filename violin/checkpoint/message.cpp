#include "violin/checkpoint/message.h"

#include <cstddef>
#include <cstdint>

namespace violin::checkpoint {
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

}  // namespace

std::string in_quotes(std::string_view text, std::size_t limit) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string result = "'";
  while (!text.empty()) {
    if (result.size() > limit) {
      result += "...";
      break;
    }
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
  return result + "'";
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace violin::checkpoint
