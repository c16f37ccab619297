// The safetensors format: 8 bytes header length, a JSON object of names, the tensors' bytes one after another.
//
//   {"__metadata__": {"key": "text", …}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
//
// The format asks for a buffer that is covered exactly: no overlap, no hole, nothing behind the last tensor. All of
// that is enforced, as the reference implementation does, and so is that names are unique. The JSON is consumed as
// events, so neither its depth nor its size costs memory beyond what a valid header needs.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <unordered_set>

#include "violin/checkpoint/document.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::size_t kMaxDimensions = 64;              // torch's iterators stop there

struct Entry {
  std::string name;
  std::set<std::string, std::less<>> fields;  // that have been seen
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> offsets;  // begin and end, once check_entry has seen them
};

class HeaderEvents : public nlohmann::json::json_sax_t {
 public:
  std::vector<Entry> entries;
  Metadata metadata;

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override { return whole(value); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(INT64_MAX)) return unexpected("a number above 2^63");
    return whole(static_cast<std::int64_t>(value));
  }
  bool number_float(number_float_t, const string_t& text) override { return unexpected("the number " + text); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool string(string_t& text) override {
    if (place_ == Place::kMetadata) {
      if (!metadata.emplace(key_, text).second) fail("metadata key " + in_quotes(key_) + " occurs twice");
      return true;
    }
    if (place_ != Place::kEntry || key_ != "dtype") return unexpected("text");
    Entry& entry = entries.back();
    const auto dtype = dtype_from_safetensors(text);
    if (!dtype) fail("tensor " + in_quotes(entry.name) + " has the unknown dtype " + in_quotes(text));
    entry.dtype = *dtype;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop) {
      place_ = key_ == "__metadata__" ? Place::kMetadata : Place::kEntry;
      if (!names_.insert(key_).second) fail("tensor " + in_quotes(key_) + " occurs twice");
      if (place_ == Place::kEntry) entries.emplace_back().name = key_;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(string_t& text) override {
    key_ = text;
    if (place_ == Place::kEntry) {
      Entry& entry = entries.back();
      if (!entry.fields.insert(text).second) {
        fail("tensor " + in_quotes(entry.name) + " has two fields " + in_quotes(text));
      }
      if (text != "dtype" && text != "shape" && text != "data_offsets") {
        fail("tensor " + in_quotes(entry.name) + " has the unknown field " + in_quotes(text));
      }
    }
    return true;
  }

  bool end_object() override {
    place_ = place_ == Place::kTop ? Place::kOutside : Place::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kEntry || key_ == "dtype") return unexpected("an array");
    place_ = Place::kArray;
    return true;
  }

  bool end_array() override {
    place_ = Place::kEntry;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    fail("broken JSON at byte " + std::to_string(position) + " of it");
  }

 private:
  enum class Place { kOutside, kTop, kMetadata, kEntry, kArray };

  [[noreturn]] static void fail(const std::string& what) { throw Error("safetensors header: " + what); }

  [[noreturn]] bool unexpected(const std::string& what) const {
    switch (place_) {
      case Place::kOutside:
        fail(what + " instead of an object");
      case Place::kTop:
        fail("tensor " + in_quotes(key_) + " is " + what + " instead of an object");
      case Place::kMetadata:
        fail("metadata " + in_quotes(key_) + " is " + what + " instead of text");
      case Place::kEntry:
      case Place::kArray:
        break;
    }
    fail("tensor " + in_quotes(entries.back().name) + " has " + what + " in field " + in_quotes(key_));
  }

  bool whole(std::int64_t value) {
    if (place_ != Place::kArray) return unexpected("a number");
    if (value < 0) return unexpected("the negative number " + std::to_string(value));
    auto& list = key_ == "shape" ? entries.back().shape : entries.back().offsets;
    if (list.size() == kMaxDimensions) return unexpected("more than " + std::to_string(kMaxDimensions) + " numbers");
    list.push_back(value);
    return true;
  }

  Place place_ = Place::kOutside;
  std::string key_;
  std::unordered_set<std::string> names_;
};

// Elements times size in bytes; nothing where that overflows, be it only in the dimensions beside an empty one.
std::optional<std::int64_t> byte_count(const std::vector<std::int64_t>& shape, DType dtype) {
  auto bytes = static_cast<std::int64_t>(info(dtype).size);
  bool empty = false;
  for (const std::int64_t size : shape) {
    empty |= size == 0;
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  return empty ? 0 : bytes;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) text += (text.size() > 1 ? "," : "") + std::to_string(size);
  return text + "]";
}

void check_entry(const Entry& entry, std::size_t buffer_bytes) {
  const std::string who = "tensor " + in_quotes(entry.name);
  for (const char* field : {"dtype", "shape"}) {
    if (!entry.fields.contains(field)) throw Error(who + " has no " + field);
  }
  if (entry.offsets.size() != 2) throw Error(who + " needs two data_offsets");
  const std::int64_t begin = entry.offsets.front();
  const std::int64_t end = entry.offsets.back();
  const std::string range = "data_offsets [" + std::to_string(begin) + "," + std::to_string(end) + "]";
  if (begin > end) throw Error(who + ": " + range + " run backwards");
  if (static_cast<std::uint64_t>(end) > buffer_bytes) {
    throw Error(who + ": " + range + " reach behind the " + std::to_string(buffer_bytes) + " bytes of data");
  }
  const auto bytes = byte_count(entry.shape, entry.dtype);
  if (bytes != end - begin) {
    throw Error(who + ": " + range + " do not fit shape " + shape_text(entry.shape) + " of dtype " +
                std::string(info(entry.dtype).safetensors));
  }
}

// The data must be covered exactly, each byte once.
void check_cover(const std::vector<Entry>& entries, std::size_t buffer_bytes) {
  std::vector<const Entry*> order;
  order.reserve(entries.size());
  for (const Entry& entry : entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) { return a->offsets < b->offsets; });
  std::int64_t reached = 0;
  for (const Entry* entry : order) {
    const std::int64_t begin = entry->offsets.front();
    if (begin != reached) {
      throw Error("tensor " + in_quotes(entry->name) +
                  (begin < reached ? " overlaps another: it" : " leaves a hole: it") + " begins at byte " +
                  std::to_string(begin) + " of the data instead of " + std::to_string(reached));
    }
    reached = entry->offsets.back();
  }
  if (static_cast<std::uint64_t>(reached) != buffer_bytes) {
    throw Error("the tensors end at byte " + std::to_string(reached) + " of the data, which has " +
                std::to_string(buffer_bytes) + " bytes");
  }
}

std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<std::int64_t>(shape[i], 1);  // byte_count has seen that this does not overflow
  }
  return strides;
}

}  // namespace

Document parse_safetensors(ByteSpan bytes) {
  ByteReader reader(bytes, "the file");
  const auto header_bytes = reader.number<std::uint64_t>();
  if (header_bytes > kMaxHeaderBytes || header_bytes > reader.remaining()) {
    throw Error("safetensors header: its length " + std::to_string(header_bytes) + " is beyond the " +
                (header_bytes > kMaxHeaderBytes ? "limit of " + std::to_string(kMaxHeaderBytes)
                                                : "file's " + std::to_string(bytes.size()) + " bytes"));
  }
  const std::string_view text = as_text(reader.take(header_bytes));
  HeaderEvents events;
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);

  const ByteSpan data = reader.rest();
  for (const Entry& entry : events.entries) check_entry(entry, data.size());
  check_cover(events.entries, data.size());

  Document document;
  document.format = FileFormat::kSafetensors;
  document.metadata = std::move(events.metadata);
  Dict root;
  root.items.reserve(events.entries.size());
  document.storages.reserve(events.entries.size());
  for (Entry& entry : events.entries) {
    const auto begin = static_cast<std::size_t>(entry.offsets.front());
    const auto end = static_cast<std::size_t>(entry.offsets.back());
    TensorRef tensor;
    tensor.storage = document.storages.size();
    tensor.dtype = entry.dtype;
    tensor.strides = row_major_strides(entry.shape);
    tensor.sizes = std::move(entry.shape);
    document.storages.push_back({entry.name, data.subspan(begin, end - begin)});
    root.items.push_back({{std::move(entry.name)}, {std::move(tensor)}});
  }
  document.root.data = std::move(root);
  check_tensors(document, bytes.size());
  return document;
}

}  // namespace violin::checkpoint
