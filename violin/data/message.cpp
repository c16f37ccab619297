#include "violin/data/message.h"

namespace violin::data {

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLongest = 1000;
  std::string result = "'";
  for (const char c : text.substr(0, kLongest)) {
    const auto code = static_cast<unsigned char>(c);
    result += code < 0x20 || code == 0x7f ? '?' : c;
  }
  return result + (text.size() > kLongest ? "...'" : "'");
}

}  // namespace violin::data
