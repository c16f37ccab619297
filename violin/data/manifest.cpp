// Manifests: CSV with a header, or one JSON object per line; fields path, label and optionally split.
#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "violin/data/csv.h"
#include "violin/data/layouts.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::data {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxFile = std::int64_t{1} << 30;

struct Entry {
  std::string path, label, split;
  std::int64_t line = 0;
};

[[noreturn]] void fail(const fs::path& manifest, std::int64_t line, const std::string& message) {
  throw Error("'" + manifest.string() + "', line " + std::to_string(line) + ": " + message);
}

std::string trimmed(std::string text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && is_space(text.back())) text.pop_back();
  const auto begin = std::find_if_not(text.begin(), text.end(), is_space);
  text.erase(text.begin(), begin);
  return text;
}

std::vector<Entry> read_csv(std::string_view text, const fs::path& name) {
  CsvReader reader(text, name);
  std::vector<std::string> fields;
  if (!reader.next(fields)) throw Error("'" + name.string() + "' is empty");
  const auto column = [&](const char* wanted) {
    std::int64_t found = -1;
    for (std::size_t i = 0; i < fields.size(); ++i) {
      if (trimmed(fields[i]) != wanted) continue;
      if (found >= 0) throw Error("the first line of '" + name.string() + "' names the column " + wanted + " twice");
      found = static_cast<std::int64_t>(i);
    }
    return found;
  };
  const std::int64_t path = column("path");
  const std::int64_t label = column("label");
  const std::int64_t split = column("split");
  if (path < 0 || label < 0) {
    throw Error("the first line of '" + name.string() + "' must name the columns path and label, and may name split");
  }
  const std::size_t columns = fields.size();
  std::vector<Entry> entries;
  while (reader.next(fields)) {
    if (fields.size() != columns) {
      fail(name, reader.line(),
           std::to_string(fields.size()) + " fields instead of " + std::to_string(columns) +
               "; a field with a comma needs quotes");
    }
    entries.push_back({fields[static_cast<std::size_t>(path)], trimmed(fields[static_cast<std::size_t>(label)]),
                       split < 0 ? "" : trimmed(fields[static_cast<std::size_t>(split)]), reader.line()});
  }
  return entries;
}

std::vector<Entry> read_json_lines(std::string_view text, const fs::path& name) {
  std::vector<Entry> entries;
  std::int64_t number = 0;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
    if (!object.is_object()) fail(name, number, "not a JSON object; each has a line of its own");
    const auto value = [&](const char* key, bool needed) -> std::string {
      const auto field = object.find(key);
      if (field == object.end() || field->is_null()) {
        if (needed) fail(name, number, std::string(key) + " is missing");
        return "";
      }
      if (field->is_string()) {
        const auto text = field->get<std::string>();
        // The system would take a path to end there, so that one image had many names.
        if (text.find('\0') != std::string::npos) fail(name, number, std::string(key) + " has a character of value 0");
        return text;
      }
      if (field->is_number_integer()) return field->dump();
      fail(name, number, std::string(key) + " must be text" + (needed ? " or a whole number" : ""));
    };
    entries.push_back({value("path", true), trimmed(value("label", true)), trimmed(value("split", false)), number});
  }
  return entries;
}

// An image that is listed twice must not be learned as two classes, nor be trained on and evaluated.
void check_same(const fs::path& manifest, const Entry& first, const Entry& again) {
  const std::string remedy = " on line " + std::to_string(first.line) + ": keep one";
  if (again.label != first.label) {
    fail(manifest, again.line,
         file_in_quotes(again.path) + " has label " + in_quotes(again.label) + ", but " + in_quotes(first.label) +
             remedy);
  }
  if (again.split != first.split) {
    fail(manifest, again.line,
         file_in_quotes(again.path) + " is in " + again.split + ", but in " + first.split + remedy);
  }
}

// Labels that are all whole numbers are ordered as numbers: 2 before 10.
std::vector<std::string> class_names(const std::set<std::string>& labels) {
  std::vector<std::string> names(labels.begin(), labels.end());
  const auto number = [](const std::string& text) {
    std::int64_t value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size() ? value : -1;
  };
  if (std::all_of(names.begin(), names.end(), [&](const std::string& name) { return number(name) >= 0; })) {
    std::stable_sort(names.begin(), names.end(),
                     [&](const std::string& a, const std::string& b) { return number(a) < number(b); });
  }
  return names;
}

}  // namespace

Dataset open_manifest(const fs::path& path, const DatasetOptions& options) {
  if (is_image_file(path)) throw Error("'" + path.string() + "' is an image: give a folder of images or a manifest");
  const Bytes bytes = read_file(path, kMaxFile);
  return read_manifest({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path, options);
}

Dataset read_manifest(std::string_view text, const fs::path& path, const DatasetOptions& options) {
  text = without_mark(text);
  if (text.find('\0') != std::string_view::npos) throw Error("'" + path.string() + "' is not a text file");
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) throw Error("'" + path.string() + "' is empty");
  if (text[first] == '[')
    throw Error("'" + path.string() +
                "' is a JSON list; write one object per line, {\"path\": …, \"label\": …}, or CSV");
  std::vector<Entry> entries = text[first] == '{' ? read_json_lines(text, path) : read_csv(text, path);
  if (entries.empty()) throw Error("'" + path.string() + "' lists no images");

  std::set<std::string> all;
  std::set<std::string> trained;
  for (Entry& entry : entries) {
    if (entry.path.empty()) fail(path, entry.line, "path is missing");
    if (entry.label.empty()) fail(path, entry.line, "label is missing");
    const auto split = split_of(entry.split.empty() ? "train" : entry.split);
    if (!split) fail(path, entry.line, "split " + in_quotes(entry.split) + " is not train, val or test");
    entry.split = *split;
    if (all.insert(entry.label).second && !is_utf8(entry.label))
      fail(path, entry.line, "label " + in_quotes(entry.label) + " is not UTF-8: save the file as UTF-8");
    if (entry.split == "train") trained.insert(entry.label);
  }
  Dataset dataset;
  dataset.layout = Layout::kManifest;
  dataset.classes = class_names(trained.empty() ? all : trained);
  std::map<std::string, std::int64_t> labels;
  for (const std::string& name : dataset.classes) labels.emplace(name, std::ssize(labels));

  // The same whether the manifest was given relative to the working folder or, as when a run is resumed, absolute.
  const fs::path folder = fs::absolute(path).lexically_normal().parent_path();
  std::map<std::string, std::vector<Sample>> samples;
  std::map<std::string, const Entry*> listed;  // by file, where it came first
  for (const Entry& entry : entries) {
    const auto label = labels.find(entry.label);
    if (label == labels.end()) fail(path, entry.line, "class " + in_quotes(entry.label) + " does not occur in train");
    const fs::path file = folder / entry.path;
    std::error_code error;
    if (!fs::is_regular_file(file, error)) fail(path, entry.line, "no file " + file_in_quotes(file.string()));
    const Entry& first = *listed.try_emplace(file.lexically_normal().string(), &entry).first->second;
    check_same(path, first, entry);
    // Copies take the first one's spelling, so that they are known to be one image.
    samples[entry.split].push_back({(folder / first.path).string(), -1, label->second});
  }
  if (const std::size_t repeated = entries.size() - listed.size(); repeated > 0) {
    dataset.notes.push_back(counted(repeated, "row") + " of '" + path.string() +
                            "' repeat images; what is held out is held out with all its copies");
  }
  const auto source = std::make_shared<FileSource>(options.limits);
  const auto set = [&](const char* split) {
    return SampleSet(source, std::move(samples[split]), std::ssize(dataset.classes), folder);
  };
  dataset.train = set("train");
  dataset.val = set("val");
  dataset.test = set("test");
  return dataset;
}

}  // namespace violin::data
