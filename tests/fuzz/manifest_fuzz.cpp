// Manifests and lists of classes: whatever the text, an Error of one line or what is documented.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/require.h"
#include "tests/temporary_folder.h"
#include "violin/data/csv.h"
#include "violin/data/file.h"
#include "violin/data/layouts.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::data {
namespace {

namespace fs = std::filesystem;

// What manifests may name; nothing here is decoded, so the files are empty.
const fs::path& folder() {
  static const TemporaryFolder folder;
  static const bool filled = [] {
    fs::create_directory(folder.path() / "c");
    for (const char* name : {"a.png", "b.png", "c/d.png"}) write_file_atomically(folder.path() / name, "");
    return true;
  }();
  require(filled);
  return folder.path();
}

void check_names(const std::vector<std::string>& names) {
  for (const std::string& name : names) require(!name.empty() && is_utf8(name));
}

void check_manifest(std::string_view text) {
  const Dataset dataset = read_manifest(text, folder() / "list", {});
  check_names(dataset.classes);
  require(!dataset.classes.empty() && !dataset.fingerprint().empty());
  // An image has one label and is in one split.
  std::map<fs::path, std::pair<const SampleSet*, std::int64_t>> images;
  for (const SampleSet* set : {&dataset.train, &dataset.val, &dataset.test}) {
    for (std::int64_t i = 0; i < set->size(); ++i) {
      const Sample& sample = (*set)[i];
      require(fs::is_regular_file(sample.path) && sample.path.find('\0') == std::string::npos);
      require(sample.label >= 0 && sample.label < std::ssize(dataset.classes));
      const std::pair<const SampleSet*, std::int64_t> place(set, sample.label);
      require(images.emplace(fs::path(sample.path).lexically_normal(), place).first->second == place);
      require(!set->name(i).empty());
    }
  }
  const auto [rest, share] = dataset.train.split(0.5, text.size());
  require(rest.size() + share.size() == dataset.train.size());
  require(dataset.train.limited(2, text.size()).size() == std::min<std::int64_t>(dataset.train.size(), 2));
}

// What is written as CSV is read back.
void check_csv(std::string_view text) {
  CsvReader reader(text, "list");
  std::vector<std::string> fields;
  while (reader.next(fields)) {
    std::string line = "x";
    for (const std::string& field : fields) line += "," + csv_field(field);
    std::vector<std::string> again;
    CsvReader second(line, "again");
    require(second.next(again) && std::equal(fields.begin(), fields.end(), again.begin() + 1, again.end()));
    require(!second.next(again));
  }
}

}  // namespace
}  // namespace violin::data

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace violin;
  using namespace violin::data;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  attempt([&] { check_manifest(text); });
  attempt([&] { check_csv(text); });
  attempt([&] { check_names(read_class_list(text, "list", 10)); });
  return 0;
}
