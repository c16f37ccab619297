// safetensors headers: whatever the bytes, an Error or tensors that lie inside.
#include <cstdint>

#include "tests/checkpoint/touch.h"
#include "violin/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace violin::checkpoint;
  try {
    const Document document = parse_safetensors({reinterpret_cast<const std::byte*>(data), size});
    touch(document);
  } catch (const violin::Error&) {
    return 0;
  }
  return 0;
}
