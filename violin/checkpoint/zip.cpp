#include "violin/checkpoint/zip.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

constexpr std::uint32_t kLocalSignature = 0x04034b50;
constexpr std::uint32_t kCentralSignature = 0x02014b50;
constexpr std::uint32_t kEndSignature = 0x06054b50;
constexpr std::uint32_t kEnd64Signature = 0x06064b50;
constexpr std::uint32_t kLocator64Signature = 0x07064b50;
constexpr std::size_t kEndBytes = 22;
constexpr std::size_t kLocator64Bytes = 20;
constexpr std::size_t kEnd64Bytes = 56;
constexpr std::uint32_t kSaturated32 = 0xffffffff;
constexpr std::uint16_t kSaturated16 = 0xffff;

struct Directory {
  std::uint64_t entries = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

std::uint32_t signature_at(ByteSpan archive, std::size_t position) {
  return ByteReader(archive.subspan(position), "the archive").number<std::uint32_t>();
}

// The end record stands at the very end, followed by a comment of at most 65,535 bytes that it announces.
std::size_t find_end_record(ByteSpan archive) {
  if (archive.size() >= kEndBytes) {
    const std::size_t last = archive.size() - kEndBytes;
    const std::size_t first = last > kSaturated16 ? last - kSaturated16 : 0;
    for (std::size_t position = last + 1; position-- > first;) {
      if (signature_at(archive, position) != kEndSignature) continue;
      ByteReader reader(archive.subspan(position + kEndBytes - 2), "the archive");
      if (reader.number<std::uint16_t>() == last - position) return position;
    }
  }
  throw Error("the zip archive has no end record: the file is cut off or damaged; fetch or save it again");
}

template <typename T>
void agree(T small, std::uint64_t large, T saturated, const char* what) {
  if (small != saturated && small != large)
    throw Error(std::string("the zip archive gives two values for its ") + what);
}

Directory find_directory(ByteSpan archive) {
  const std::size_t end = find_end_record(archive);
  ByteReader reader(archive.subspan(end + 4), "the zip end record");
  const auto disk = reader.number<std::uint16_t>();
  const auto directory_disk = reader.number<std::uint16_t>();
  const auto disk_entries = reader.number<std::uint16_t>();
  const auto entries = reader.number<std::uint16_t>();
  const auto bytes = reader.number<std::uint32_t>();
  const auto offset = reader.number<std::uint32_t>();
  const bool one_disk = (disk == 0 || disk == kSaturated16) && (directory_disk == 0 || directory_disk == kSaturated16);
  if (!one_disk || disk_entries != entries) throw Error("the zip archive is one part of several");

  Directory directory{entries, offset, bytes};
  std::size_t directory_end = end;
  const bool large = end >= kLocator64Bytes && signature_at(archive, end - kLocator64Bytes) == kLocator64Signature;
  if (large) {
    ByteReader locator(archive.subspan(end - kLocator64Bytes + 8), "the zip64 locator");
    const auto position = locator.number<std::uint64_t>();
    if (position > end - kLocator64Bytes || end - kLocator64Bytes - position < kEnd64Bytes ||
        signature_at(archive, position) != kEnd64Signature) {
      throw Error("the zip64 end record is not where the archive says");
    }
    ByteReader record(archive.subspan(position + 32), "the zip64 end record");
    directory.entries = record.number<std::uint64_t>();
    directory.bytes = record.number<std::uint64_t>();
    directory.offset = record.number<std::uint64_t>();
    agree(entries, directory.entries, kSaturated16, "number of entries");
    agree(bytes, directory.bytes, kSaturated32, "directory's size");
    agree(offset, directory.offset, kSaturated32, "directory's offset");
    directory_end = position;
  }
  if (directory.offset > directory_end || directory_end - directory.offset != directory.bytes) {
    throw Error("the zip directory (offset " + std::to_string(directory.offset) + ", " +
                std::to_string(directory.bytes) + " bytes) does not end at its end record");
  }
  return directory;
}

struct Record {
  ZipEntry entry;
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint64_t packed = 0;
  std::uint64_t size = 0;
  std::uint64_t header = 0;   // where the local header begins
  std::uint64_t content = 0;  // where the bytes begin
};

std::string who(const Record& record) {
  return "zip entry " + in_quotes(record.entry.name);
}

// Values that do not fit into 32 bits stand in the extra field 1, in this order, each only if it is needed.
void read_zip64_extra(ByteSpan extra, Record& record) {
  const bool needed = record.size == kSaturated32 || record.packed == kSaturated32 || record.header == kSaturated32;
  const std::string name = who(record);
  ByteReader fields(extra, name);
  while (needed && fields.remaining() >= 4) {
    const auto id = fields.number<std::uint16_t>();
    const auto length = fields.number<std::uint16_t>();
    ByteReader field(fields.take(length), name);
    if (id != 1) continue;
    for (std::uint64_t* value : {&record.size, &record.packed, &record.header}) {
      if (*value == kSaturated32) *value = field.number<std::uint64_t>();
    }
    return;
  }
  if (needed) throw Error(name + " lacks its zip64 sizes");
}

Record read_record(ByteReader& reader) {
  Record record;
  if (reader.number<std::uint32_t>() != kCentralSignature) {
    throw Error("the zip directory is damaged: no entry at byte " + std::to_string(reader.position() - 4) + " of it");
  }
  reader.take(4);  // versions
  record.flags = reader.number<std::uint16_t>();
  record.method = reader.number<std::uint16_t>();
  reader.take(8);  // time, date, checksum
  record.packed = reader.number<std::uint32_t>();
  record.size = reader.number<std::uint32_t>();
  const auto name_bytes = reader.number<std::uint16_t>();
  const auto extra_bytes = reader.number<std::uint16_t>();
  const auto comment_bytes = reader.number<std::uint16_t>();
  reader.take(8);  // disk, attributes
  record.header = reader.number<std::uint32_t>();
  record.entry.name = as_text(reader.take(name_bytes));
  read_zip64_extra(reader.take(extra_bytes), record);
  reader.take(comment_bytes);
  return record;
}

// Nothing is ever unpacked to disk, but a name that would escape a folder marks a file that means harm.
bool leads_out(std::string_view name) {
  if (name.empty() || name.front() == '/' || name.find('\\') != name.npos || name.find('\0') != name.npos) return true;
  if (name.size() > 1 && name[1] == ':') return true;
  while (!name.empty()) {
    const std::size_t slash = name.find('/');
    if (name.substr(0, slash) == "..") return true;
    if (slash == name.npos) break;
    name.remove_prefix(slash + 1);
  }
  return false;
}

void check_record(const Record& record) {
  if (leads_out(record.entry.name)) throw Error(who(record) + " has a name that leads out of the archive: refused");
  if ((record.flags & 0x2041) != 0) throw Error(who(record) + " is encrypted");
  if (record.method == 0 && record.packed != record.size) throw Error(who(record) + " is stored but has two sizes");
}

// Finds the bytes behind the local header, which must tell the same name: two readers must not see two archives.
void locate(ByteSpan archive, std::uint64_t directory_offset, Record& record) {
  const ByteSpan before = archive.first(directory_offset);
  const std::string name = who(record);
  if (record.header > before.size()) {
    throw Error(name + ": its offset " + std::to_string(record.header) + " lies behind the archive's data");
  }
  ByteReader reader(before.subspan(record.header), name);
  if (reader.number<std::uint32_t>() != kLocalSignature) {
    throw Error(name + ": there is no entry at its offset " + std::to_string(record.header));
  }
  reader.take(4);  // version, flags
  const auto method = reader.number<std::uint16_t>();
  reader.take(16);  // time, date, checksum, sizes (which may follow the data and are zero then)
  const auto name_bytes = reader.number<std::uint16_t>();
  const auto extra_bytes = reader.number<std::uint16_t>();
  if (as_text(reader.take(name_bytes)) != record.entry.name || method != record.method) {
    throw Error(name + ": its local header tells another name or method");
  }
  reader.take(extra_bytes);
  if (record.packed > reader.remaining()) {
    throw Error(name + ": its " + std::to_string(record.packed) + " bytes reach behind the archive's data");
  }
  record.content = record.header + reader.position();
  record.entry.bytes = archive.subspan(record.content, record.packed);
  record.entry.compressed = record.method != 0;
}

void check_overlap(const std::vector<Record>& records) {
  std::vector<const Record*> order;
  order.reserve(records.size());
  for (const Record& record : records) order.push_back(&record);
  std::sort(order.begin(), order.end(), [](const Record* a, const Record* b) { return a->header < b->header; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const Record& left = *order[i - 1];
    if (left.content + left.packed > order[i]->header) {
      throw Error(who(*order[i]) + " overlaps " + in_quotes(left.entry.name));
    }
  }
}

}  // namespace

std::vector<ZipEntry> read_zip(ByteSpan archive) {
  const Directory directory = find_directory(archive);
  ByteReader reader(archive.subspan(directory.offset, directory.bytes), "the zip directory");
  std::vector<Record> records;
  std::unordered_set<std::string> names;
  while (reader.remaining() > 0) {
    Record record = read_record(reader);
    check_record(record);
    if (!names.insert(record.entry.name).second) throw Error(who(record) + " occurs twice");
    locate(archive, directory.offset, record);
    records.push_back(std::move(record));
  }
  if (records.size() != directory.entries) {
    throw Error("the zip directory announces " + std::to_string(directory.entries) + " entries and has " +
                std::to_string(records.size()));
  }
  check_overlap(records);
  std::vector<ZipEntry> entries;
  entries.reserve(records.size());
  for (Record& record : records) entries.push_back(std::move(record.entry));
  return entries;
}

}  // namespace violin::checkpoint
