// A tensor file, parsed but not touched: the tree of what it holds and where each storage lies. Nothing here needs
// torch; tensor_file.h makes tensors of it.
//
// Every parser throws violin::Error whose message names the field (tensor, entry, global) that is wrong; parse_document
// puts the file's name in front. A Document points into the bytes that it was parsed from.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "violin/checkpoint/byte_reader.h"
#include "violin/checkpoint/value.h"

namespace violin::checkpoint {

using Metadata = std::map<std::string, std::string>;

enum class FileFormat {
  kSafetensors,
  kTorchZip,     // torch.save since 1.6
  kTorchLegacy,  // torch.save before, or with _use_new_zipfile_serialization=False
};

std::string_view to_string(FileFormat format);

struct StorageBytes {
  std::string name;
  ByteSpan bytes;
  std::size_t alignment = 1;  // what the tensors on it need
};

struct Document {
  FileFormat format = FileFormat::kSafetensors;
  Value root;
  std::vector<StorageBytes> storages;
  Metadata metadata;  // of safetensors
};

// Tells the format by content. `file` is for messages.
Document parse_document(ByteSpan bytes, std::string_view file);

// The formats by themselves; messages lack the file's name.
Document parse_safetensors(ByteSpan bytes);
Document parse_torch_zip(ByteSpan bytes);
Document parse_torch_legacy(ByteSpan bytes);
bool looks_like_torch_legacy(ByteSpan bytes);

// Throws unless every tensor of the tree lies inside its storage: sizes, strides and offset not negative, nothing that
// overflows, and all together not vastly more elements (by zero strides) than the file has bytes. Notes each storage's
// alignment.
void check_tensors(Document& document, std::size_t file_bytes);

}  // namespace violin::checkpoint
