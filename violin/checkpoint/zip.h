// Zip archives, zip64 included. Names and offsets are hostile. Nothing is unpacked: torch.save stores its entries as
// they are.
#pragma once

#include <string>
#include <vector>

#include "violin/checkpoint/byte_reader.h"

namespace violin::checkpoint {

struct ZipEntry {
  std::string name;
  ByteSpan bytes;           // inside the archive, as they are there
  bool compressed = false;  // what the bytes are then is of no use here
};

// All entries in the order of the central directory. Throws violin::Error, naming the entry, for compressed or
// encrypted entries, names that lead out of a folder, names that occur twice, and entries that overlap or leave the
// archive. Checksums are not verified: torch itself neither verifies nor always writes them.
std::vector<ZipEntry> read_zip(ByteSpan archive);

}  // namespace violin::checkpoint
