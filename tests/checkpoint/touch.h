// Reads the first and the last element of every tensor of a parsed file; stops the program when one lies outside.
#pragma once

#include <cstdlib>

#include "violin/checkpoint/document.h"

namespace violin::checkpoint {

inline std::size_t touch(const Document& document) {
  std::size_t sum = 0;
  for_each_tensor(document.root, [&](const std::string& name, const TensorRef& tensor) {
    const ByteSpan bytes = document.storages.at(tensor.storage).bytes;
    const std::size_t size = info(tensor.dtype).size;
    auto last = static_cast<std::size_t>(tensor.offset);
    sum += name.size();
    for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
      if (tensor.sizes[i] == 0) return;
      last += static_cast<std::size_t>(tensor.sizes[i] - 1) * static_cast<std::size_t>(tensor.strides[i]);
    }
    if (last >= bytes.size() / size) std::abort();
    sum += std::to_integer<std::size_t>(bytes[static_cast<std::size_t>(tensor.offset) * size]);
    sum += std::to_integer<std::size_t>(bytes[last * size + size - 1]);
  });
  return sum;
}

}  // namespace violin::checkpoint
