// Which format is it? Told by content, since extensions lie; what is not read gets a message with a way out.
#include "violin/checkpoint/document.h"

#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

bool header_begins(ByteSpan bytes) {
  return bytes.size() >= 9 && as_text(bytes.subspan(8, 1)) == "{";
}

// With a length of four bytes, which may begin like anything, a pickle included.
bool looks_like_safetensors(ByteSpan bytes) {
  return header_begins(bytes) && ByteReader(bytes.subspan(4), "").number<std::uint32_t>() == 0;
}

bool looks_like_tar(ByteSpan bytes) {
  return bytes.size() >= 262 && as_text(bytes.subspan(257, 5)) == "ustar";
}

Document parse(ByteSpan bytes) {
  const std::string_view text = as_text(bytes);
  if (text.empty()) throw Error("the file is empty");
  if (looks_like_safetensors(bytes)) return parse_safetensors(bytes);
  if (text.starts_with("PK\x03\x04") || text.starts_with("PK\x05\x06")) return parse_torch_zip(bytes);
  if (looks_like_torch_legacy(bytes)) return parse_torch_legacy(bytes);
  if (looks_like_tar(bytes)) {
    throw Error(
        "a tar archive, as torch wrote before 0.1.10: not read; if you trust it, in Python: "
        "torch.save(torch.load(file, map_location='cpu', weights_only=False), new_file)");
  }
  if (text.starts_with("version https://git-lfs")) {
    throw Error("a Git LFS pointer, not the file itself; run 'git lfs pull'");
  }
  if (text.starts_with("<!DOCTYPE") || text.starts_with("<!doctype") || text.starts_with("<html")) {
    throw Error("a web page, not weights; the download went wrong");
  }
  if (text.front() == '\x80') {
    throw Error(
        "a plain pickle, which torch.save did not write: not read; if you trust it, in Python: "
        "torch.save(pickle.load(open(file, 'rb')), new_file)");
  }
  if (header_begins(bytes)) return parse_safetensors(bytes);
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
    throw Error("cannot read " + file_in_quotes(file) + ": " + error.what());
  }
}

}  // namespace violin::checkpoint
