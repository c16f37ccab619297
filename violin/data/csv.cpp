#include "violin/data/csv.h"

#include <algorithm>

#include "violin/error.h"

namespace violin::data {
namespace {

[[noreturn]] void fail(const std::filesystem::path& file, std::int64_t line, const std::string& message) {
  throw Error("'" + file.string() + "', line " + std::to_string(line) + ": " + message);
}

}  // namespace

bool CsvReader::next(std::vector<std::string>& fields) {
  for (; at_ < text_.size() && (text_[at_] == '\n' || text_[at_] == '\r'); ++at_) line_ += line_ends() ? 1 : 0;
  if (at_ >= text_.size()) return false;
  fields.clear();
  begins_ = line_;
  for (;;) {
    fields.push_back(field());
    if (at_ < text_.size() && text_[at_] == ',') {
      ++at_;
      continue;
    }
    if (at_ < text_.size() && text_[at_] != '\n' && text_[at_] != '\r')
      fail(name_, line_, "text after a closing quote");
    return true;
  }
}

bool CsvReader::line_ends() const {
  return text_[at_] == '\n' || (text_[at_] == '\r' && !text_.substr(at_ + 1).starts_with('\n'));
}

std::string CsvReader::field() {
  std::string value;
  const std::size_t begin = std::min(text_.find_first_not_of(" \t", at_), text_.size());
  if (text_.substr(begin).starts_with('"')) at_ = begin;
  if (at_ >= text_.size() || text_[at_] != '"') {
    while (at_ < text_.size() && text_[at_] != ',' && text_[at_] != '\n' && text_[at_] != '\r') value += text_[at_++];
    return value;
  }
  for (++at_;; ++at_) {
    if (at_ >= text_.size()) fail(name_, begins_, "a quote is not closed");
    if (text_[at_] == '"' && (at_ + 1 >= text_.size() || text_[at_ + 1] != '"')) break;
    if (text_[at_] == '"') ++at_;
    if (line_ends()) ++line_;
    value += text_[at_];
  }
  ++at_;
  return value;
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string result = "\"";
  for (const char c : text) result += c == '"' ? "\"\"" : std::string(1, c);
  return result + "\"";
}

}  // namespace violin::data
