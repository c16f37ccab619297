// Torch files, and pickles by themselves: mutations of a whole archive seldom get past its directory.
#include <algorithm>
#include <cstdint>

#include "tests/checkpoint/touch.h"
#include "violin/checkpoint/pickle.h"
#include "violin/error.h"

namespace violin::checkpoint {
namespace {

// The pickle of an archive whose storages all have as many bytes as it says, up to a limit.
void read_alone(ByteSpan bytes) {
  static const std::byte kStorage[256] = {};
  Pickle pickle = read_pickle(bytes, "data.pkl");
  Document document;
  document.root = std::move(pickle.root);
  for (const PickleStorage& storage : pickle.storages) {
    const auto length = static_cast<std::size_t>(std::min<std::int64_t>(storage.bytes, sizeof(kStorage)));
    document.storages.push_back({storage.key, ByteSpan(kStorage).first(length)});
  }
  check_tensors(document, bytes.size());
  touch(document);
}

}  // namespace
}  // namespace violin::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace violin::checkpoint;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    if (size > 0 && data[0] == 0x80 && !looks_like_torch_legacy(bytes)) {
      read_alone(bytes);
    } else {
      touch(parse_document(bytes, "input"));
    }
  } catch (const violin::Error&) {
    return 0;
  }
  return 0;
}
