// Comma-separated values with quotes as in RFC 4180. Blanks before a quote are passed over, and lines may end with LF,
// CR LF or CR.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace violin::data {

// Without the mark of UTF-8 that spreadsheets put first.
inline std::string_view without_mark(std::string_view text) {
  return text.starts_with("\xef\xbb\xbf") ? text.substr(3) : text;
}

// A quoted field may hold commas, line ends and doubled quotes. Mistakes are named with `name` and their line.
class CsvReader {
 public:
  CsvReader(std::string_view text, std::filesystem::path name) : text_(without_mark(text)), name_(std::move(name)) {}

  // False at the end of the file. Empty lines are passed over.
  bool next(std::vector<std::string>& fields);
  // Of the fields that came last.
  std::int64_t line() const { return begins_; }

 private:
  std::string field();
  bool line_ends() const;  // here; of CR LF, at LF

  std::string_view text_;
  std::filesystem::path name_;
  std::size_t at_ = 0;
  std::int64_t line_ = 1;
  std::int64_t begins_ = 1;
};

// A field as a file holds it: in quotes where it needs them.
std::string csv_field(const std::string& text);

}  // namespace violin::data
