// Files made by hand, right and wrong, and what is expected of them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "violin/checkpoint/document.h"
#include "violin/error.h"

namespace violin::checkpoint {

inline std::string golden(const std::string& name) {
  return std::string(VIOLIN_GOLDEN_DIR) + "/" + name;
}

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void put(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline ByteSpan bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

template <typename T>
std::string little(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

inline std::string join(std::initializer_list<std::string_view> parts) {
  std::string result;
  for (const std::string_view part : parts) result += part;
  return result;
}

// The message of the violin::Error that `action` throws; anything else fails the test.
template <typename Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a violin::Error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline std::string parse_error(std::string_view text) {
  return error_of([&] { parse_document(bytes_of(text), "evil.bin"); });
}

inline ::testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << part << "' is not in: " << text;
}

inline std::string safetensors(const std::string& header, std::string_view data = "") {
  return little<std::uint64_t>(header.size()) + header + std::string(data);
}

// A zip entry as the directory describes it; each part can lie.
struct Stored {
  std::string name;
  std::string bytes;
  std::uint16_t method = 0;
  std::uint16_t flags = 0;
  std::int64_t header_shift = 0;  // added to the true offset
  std::int64_t size_shift = 0;
  std::string local_name = {};  // when it differs
};

struct ZipOptions {
  bool zip64 = false;  // sizes and offsets in zip64 fields, with a zip64 end record
  std::int64_t entries_shift = 0;
  std::int64_t directory_shift = 0;
};

inline std::string zip(const std::vector<Stored>& entries, const ZipOptions& options = {}) {
  std::string file;
  std::string directory;
  for (const Stored& entry : entries) {
    const std::string& local_name = entry.local_name.empty() ? entry.name : entry.local_name;
    const auto offset = static_cast<std::uint64_t>(static_cast<std::int64_t>(file.size()) + entry.header_shift);
    const auto size = static_cast<std::uint64_t>(static_cast<std::int64_t>(entry.bytes.size()) + entry.size_shift);
    const auto small = [&](std::uint64_t value) {
      return little(options.zip64 ? 0xffffffffU : static_cast<std::uint32_t>(value));
    };
    const std::string common = join({little<std::uint16_t>(entry.flags), little<std::uint16_t>(entry.method),
                                     std::string(8, '\0'), small(size), small(size)});
    file += join({"PK\x03\x04", little<std::uint16_t>(20), common, little<std::uint16_t>(local_name.size()),
                  little<std::uint16_t>(0), local_name, entry.bytes});
    const std::string zip64 =
        join({little<std::uint16_t>(1), little<std::uint16_t>(24), little(size), little(size), little(offset)});
    const std::string extra = options.zip64 ? zip64 : "";
    directory += join({"PK\x01\x02", little<std::uint32_t>(20), common, little<std::uint16_t>(entry.name.size()),
                       little<std::uint16_t>(extra.size()), std::string(10, '\0'), small(offset), entry.name, extra});
  }
  const auto start = static_cast<std::uint64_t>(static_cast<std::int64_t>(file.size()) + options.directory_shift);
  const auto count = static_cast<std::uint64_t>(static_cast<std::int64_t>(entries.size()) + options.entries_shift);
  file += directory;
  if (options.zip64) {
    const std::uint64_t record = file.size();
    file += "PK\x06\x06" + little<std::uint64_t>(44) + std::string(12, '\0') + little(count) + little(count) +
            little<std::uint64_t>(directory.size()) + little(start);
    file += "PK\x06\x07" + little<std::uint32_t>(0) + little(record) + little<std::uint32_t>(1);
    return file + "PK\x05\x06" + std::string(4, '\0') + std::string(12, '\xff') + std::string(2, '\0');
  }
  return file + "PK\x05\x06" + std::string(4, '\0') + little(static_cast<std::uint16_t>(count)) +
         little(static_cast<std::uint16_t>(count)) + little(static_cast<std::uint32_t>(directory.size())) +
         little(static_cast<std::uint32_t>(start)) + std::string(2, '\0');
}

// Instructions of a pickle.
namespace op {

inline std::string text(std::string_view value) {
  return "X" + little<std::uint32_t>(value.size()) + std::string(value);
}
inline std::string integer(std::int64_t value) {
  return std::string("\x8a\x08") + little(value);
}
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string tuple(const std::vector<std::string>& items) {
  std::string result = "(";
  for (const std::string& item : items) result += item;
  return result + "t";
}
inline std::string integers(const std::vector<std::int64_t>& values) {
  std::vector<std::string> items;
  items.reserve(values.size());
  for (const std::int64_t value : values) items.push_back(integer(value));
  return tuple(items);
}
inline std::string storage(const std::string& type, const std::string& key, std::int64_t elements) {
  return tuple({text("storage"), global("torch", type), text(key), text("cpu"), integer(elements)}) + "Q";
}
inline std::string tensor(const std::string& storage, std::int64_t offset, const std::vector<std::int64_t>& sizes,
                          const std::vector<std::int64_t>& strides) {
  return global("torch._utils", "_rebuild_tensor_v2") +
         tuple({storage, integer(offset), integers(sizes), integers(strides), "\x89",
                global("collections", "OrderedDict") + ")R"}) +
         "R";
}
inline std::string dict(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string result = "}(";
  for (const auto& [key, value] : items) result += text(key) + value;
  return result + "u";
}
inline std::string pickle(const std::string& body) {
  return "\x80\x02" + body + ".";
}

}  // namespace op

// A torch file of one pickle and the storages "0", "1", ….
inline std::string torch_file(const std::string& body, const std::vector<std::string>& storages = {}) {
  std::vector<Stored> entries = {{"m/data.pkl", op::pickle(body)}};
  for (std::size_t i = 0; i < storages.size(); ++i) entries.push_back({"m/data/" + std::to_string(i), storages[i]});
  return zip(entries);
}

}  // namespace violin::checkpoint
