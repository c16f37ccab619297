// What torch.save has written since 1.6: a zip archive with the pickle `NAME/data.pkl`, the storages `NAME/data/KEY`
// and a few small notes beside them.
#include <algorithm>
#include <string>
#include <unordered_map>

#include "violin/checkpoint/document.h"
#include "violin/checkpoint/pickle.h"
#include "violin/checkpoint/zip.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

using Entries = std::unordered_map<std::string, ByteSpan>;  // by name without the archive's own folder

// All entries stand in one folder, whose name is that of the file when it was saved.
std::string archive_folder(const std::vector<ZipEntry>& entries) {
  for (const ZipEntry& entry : entries) {
    const std::size_t slash = entry.name.find('/');
    if (slash != std::string::npos && entry.name.substr(slash) == "/data.pkl") return entry.name.substr(0, slash + 1);
  }
  throw Error("a zip archive without data.pkl: torch.save did not write this");
}

bool is_script(const std::vector<ZipEntry>& all, const std::string& folder) {
  return std::any_of(all.begin(), all.end(), [&](const ZipEntry& entry) {
    return entry.name == folder + "constants.pkl" || entry.name.starts_with(folder + "code/");
  });
}

Entries entries_of(const std::vector<ZipEntry>& all) {
  const std::string folder = archive_folder(all);
  if (is_script(all, folder)) {
    throw Error(
        "a TorchScript archive, which holds a program; in Python: torch.save(torch.jit.load(file).state_dict(), "
        "new_file)");
  }
  Entries entries;
  for (const ZipEntry& entry : all) {
    if (entry.compressed) {
      throw Error("zip entry " + in_quotes(entry.name) +
                  " is compressed, which torch.save never does; in Python: torch.save(torch.load(file), new_file)");
    }
    if (entry.name.starts_with(folder)) entries.emplace(entry.name.substr(folder.size()), entry.bytes);
  }
  const auto order = entries.find("byteorder");
  if (order != entries.end() && as_text(order->second) != "little") {
    throw Error("entry 'byteorder' says " + in_quotes(as_text(order->second)) +
                ": only little-endian files are read; save it again on such a machine");
  }
  return entries;
}

}  // namespace

Document parse_torch_zip(ByteSpan bytes) {
  const Entries entries = entries_of(read_zip(bytes));
  Pickle pickle = read_pickle(entries.at("data.pkl"), "data.pkl");

  Document document;
  document.format = FileFormat::kTorchZip;
  document.root = std::move(pickle.root);
  for (const PickleStorage& storage : pickle.storages) {
    const std::string name = "data/" + storage.key;
    const auto found = entries.find(name);
    if (found == entries.end()) throw Error("storage " + in_quotes(name) + " is missing from the archive");
    if (static_cast<std::uint64_t>(storage.bytes) > found->second.size()) {
      throw Error("storage " + in_quotes(name) + " has " + std::to_string(found->second.size()) +
                  " bytes, data.pkl says " + std::to_string(storage.bytes));
    }
    document.storages.push_back({name, found->second});
  }
  check_tensors(document, bytes.size());
  return document;
}

}  // namespace violin::checkpoint
