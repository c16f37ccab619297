// A file as memory: pages are fetched when they are touched, and what is written to them stays private.
#pragma once

#include <filesystem>
#include <memory>
#include <span>

#include "violin/checkpoint/byte_reader.h"

namespace violin::checkpoint {

class MappedFile {
 public:
  // Throws violin::Error for what cannot be opened and for everything but regular files.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  ByteSpan bytes() const { return {data_, size_}; }

  // Copies bytes of the mapping out by reading the file, which leaves the mapping's pages untouched: half the memory of
  // a copy from page to page.
  void read(ByteSpan from, std::span<std::byte> to) const;

 private:
  MappedFile(int descriptor, std::filesystem::path path);

  int descriptor_;
  std::filesystem::path path_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace violin::checkpoint
