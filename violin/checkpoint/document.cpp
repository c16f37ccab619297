// Which format is it? Told by content, since extensions lie; what is not read gets a message with a way out.
#include "violin/checkpoint/document.h"

#include "violin/checkpoint/message.h"
#include "violin/error.h"

namespace violin::checkpoint {
namespace {

constexpr char kResave[] = "; in Python: torch.save(torch.load(file, map_location='cpu'), new_file)";

bool looks_like_safetensors(ByteSpan bytes) {
  return bytes.size() >= 9 && as_text(bytes.subspan(8, 1)) == "{";
}

bool looks_like_tar(ByteSpan bytes) {
  return bytes.size() >= 262 && as_text(bytes.subspan(257, 5)) == "ustar";
}

Document parse(ByteSpan bytes) {
  const std::string_view text = as_text(bytes);
  if (text.empty()) throw Error("the file is empty");
  if (text.starts_with("PK\x03\x04") || text.starts_with("PK\x05\x06")) return parse_torch_zip(bytes);
  if (looks_like_torch_legacy(bytes)) return parse_torch_legacy(bytes);
  if (looks_like_tar(bytes)) {
    throw Error(std::string("a tar archive, as torch wrote before 0.1.10: no longer read") + kResave);
  }
  if (text.starts_with("version https://git-lfs")) {
    throw Error("a Git LFS pointer, not the file itself; run 'git lfs pull'");
  }
  if (text.starts_with("<!DOCTYPE") || text.starts_with("<!doctype") || text.starts_with("<html")) {
    throw Error("a web page, not weights; the download went wrong");
  }
  if (text.front() == '\x80') {
    throw Error(std::string("a plain pickle, which torch.save did not write: not read") + kResave);
  }
  if (looks_like_safetensors(bytes)) return parse_safetensors(bytes);
  throw Error("neither a safetensors file nor a file of torch.save");
}

}  // namespace

std::string_view to_string(FileFormat format) {
  switch (format) {
    case FileFormat::kSafetensors:
      return "safetensors";
    case FileFormat::kTorchZip:
      return "torch";
    case FileFormat::kTorchLegacy:
      return "torch (legacy)";
  }
  return "";
}

Document parse_document(ByteSpan bytes, std::string_view file) {
  try {
    return parse(bytes);
  } catch (const Error& error) {
    throw Error("cannot read " + in_quotes(file) + ": " + error.what());
  }
}

}  // namespace violin::checkpoint
