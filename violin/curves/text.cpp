#include "violin/curves/text.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace violin::curves {
namespace {

constexpr std::size_t kLongestQuote = 60;

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

std::string quoted(std::string_view text) {
  const bool cut = text.size() > kLongestQuote;
  std::string result = "'";
  for (const char c : text.substr(0, kLongestQuote)) {
    const auto code = static_cast<unsigned char>(c);
    result += code < 0x20 || code == 0x7f ? '?' : c;
  }
  return result + (cut ? "...'" : "'");
}

std::string joined(std::span<const std::string> words) {
  std::string result;
  for (const std::string& word : words) result += (result.empty() ? "" : ", ") + word;
  return result;
}

std::string nearest_word(std::string_view text, std::span<const std::string> words) {
  text = text.substr(0, kLongestQuote);
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

}  // namespace violin::curves
