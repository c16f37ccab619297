// What torch.save wrote before 1.6: five pickles one after another (a magic number, the format's version, facts about
// the machine, the object, the keys of the storages), then per key the number of elements and the raw bytes.
#include <string>
#include <unordered_map>

#include "violin/checkpoint/document.h"
#include "violin/checkpoint/pickle.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

// 0x1950a86a20f9469cfc6c as a pickled integer of ten bytes.
constexpr std::string_view kMagic = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
constexpr std::int64_t kVersion = 1001;

class Pickles {
 public:
  explicit Pickles(ByteSpan bytes) : reader_(bytes, "the file") {}

  Pickle next(std::string_view what) {
    Pickle pickle = read_pickle(reader_.rest(), what);
    reader_.take(pickle.bytes);
    return pickle;
  }
  ByteReader& reader() { return reader_; }

 private:
  ByteReader reader_;
};

void check_machine(const Value& facts) {
  const auto* dict = facts.get_if<Dict>();
  const Value* little = dict == nullptr ? nullptr : dict->find("little_endian");
  const bool* answer = little == nullptr ? nullptr : little->get_if<bool>();
  if (answer == nullptr) throw Error("system information: 'little_endian' is missing");
  if (!*answer) throw Error("system information: only little-endian files are read; save it again on such a machine");
}

// key → bytes
std::unordered_map<std::string, ByteSpan> read_storages(ByteReader& reader, const Value& keys,
                                                        const std::unordered_map<std::string, DType>& types) {
  const auto* list = keys.get_if<List>();
  if (list == nullptr) throw Error("storage keys: a " + std::string(keys.kind_name()) + " instead of a list");
  std::unordered_map<std::string, ByteSpan> storages;
  for (const Value& key : list->items) {
    const auto* text = key.get_if<std::string>();
    if (text == nullptr) throw Error("storage keys: a " + std::string(key.kind_name()) + " instead of text");
    const auto type = types.find(*text);
    if (type == types.end())
      throw Error("storage " + in_quotes(*text) + " belongs to no tensor, so its size is unknown");
    const auto elements = reader.number<std::uint64_t>();
    const std::size_t size = info(type->second).size;
    if (elements > reader.remaining() / size) {
      throw Error("storage " + in_quotes(*text) + ": its " + std::to_string(elements) +
                  " elements reach behind the end of the file");
    }
    if (!storages.emplace(*text, reader.take(elements * size)).second) {
      throw Error("storage " + in_quotes(*text) + " occurs twice");
    }
  }
  return storages;
}

}  // namespace

bool looks_like_torch_legacy(ByteSpan bytes) {
  // The protocol number in the second byte varies.
  return bytes.size() > 2 && bytes[0] == std::byte{0x80} && as_text(bytes.subspan(2)).starts_with(kMagic);
}

Document parse_torch_legacy(ByteSpan bytes) {
  Pickles pickles(bytes);
  pickles.next("magic number");
  const Value version = pickles.next("format version").root;
  const auto* number = version.get_if<std::int64_t>();
  if (number == nullptr || *number != kVersion)
    throw Error("format version: only " + std::to_string(kVersion) + " is known");
  check_machine(pickles.next("system information").root);
  Pickle object = pickles.next("object");
  const Value keys = pickles.next("storage keys").root;

  std::unordered_map<std::string, DType> types;
  for (const PickleStorage& storage : object.storages) types.emplace(storage.key, storage.dtype);
  const auto storages = read_storages(pickles.reader(), keys, types);

  Document document;
  document.format = FileFormat::kTorchLegacy;
  document.root = std::move(object.root);
  for (const PickleStorage& storage : object.storages) {
    const auto found = storages.find(storage.key);
    if (found == storages.end()) throw Error("storage " + in_quotes(storage.key) + " is missing from the file");
    if (static_cast<std::uint64_t>(storage.bytes) > found->second.size()) {
      throw Error("storage " + in_quotes(storage.key) + " has " + std::to_string(found->second.size()) +
                  " bytes, its tensors say " + std::to_string(storage.bytes));
    }
    document.storages.push_back({storage.key, found->second});
  }
  check_tensors(document, bytes.size());
  return document;
}

}  // namespace violin::checkpoint
