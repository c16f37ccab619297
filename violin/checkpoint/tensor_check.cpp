// Does a tensor stay inside its storage? Sizes, strides and offsets come from the file, so every product is checked.
#include <algorithm>
#include <optional>

#include "violin/checkpoint/document.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

constexpr std::size_t kMaxDimensions = 64;
// Zero strides make a big tensor of a small storage; copying a file's tensors must not be a way to exhaust memory.
constexpr std::size_t kMaxRepeatedBytes = std::size_t{64} << 20;

struct Extent {
  std::int64_t bytes;  // of all elements, one by one
  std::int64_t end;    // byte behind the last element, counted from the start of the storage; 0 when there is none
};

// Nothing where a product overflows; dimensions beside an empty one count as well, for torch multiplies them too.
std::optional<Extent> extent(const TensorRef& tensor) {
  const auto element = static_cast<std::int64_t>(info(tensor.dtype).size);
  std::int64_t bytes = element;
  std::int64_t last = tensor.offset;
  bool overflow = false;
  bool empty = false;
  for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
    const std::int64_t size = std::max<std::int64_t>(tensor.sizes[i], 1);
    empty |= tensor.sizes[i] == 0;
    std::int64_t reach = 0;
    overflow |= __builtin_mul_overflow(bytes, size, &bytes);
    overflow |= __builtin_mul_overflow(size - 1, tensor.strides[i], &reach);
    overflow |= __builtin_add_overflow(last, reach, &last);
  }
  std::int64_t end = 0;
  overflow |= __builtin_add_overflow(last, 1, &end);
  overflow |= __builtin_mul_overflow(end, element, &end);
  if (overflow) return std::nullopt;
  return empty ? Extent{0, 0} : Extent{bytes, end};
}

bool any_negative(const std::vector<std::int64_t>& numbers) {
  return std::any_of(numbers.begin(), numbers.end(), [](std::int64_t n) { return n < 0; });
}

// Empty when all is well. `repeats`: bytes that the file's tensors may still have beyond those of their storages.
std::string problem(const TensorRef& tensor, const StorageBytes& storage, std::uint64_t& repeats) {
  if (tensor.sizes.size() > kMaxDimensions) return "has " + std::to_string(tensor.sizes.size()) + " dimensions";
  if (tensor.sizes.size() != tensor.strides.size()) {
    return "has " + std::to_string(tensor.sizes.size()) + " sizes and " + std::to_string(tensor.strides.size()) +
           " strides";
  }
  if (any_negative(tensor.sizes)) return "has a negative size";
  if (any_negative(tensor.strides)) return "has a negative stride";
  if (tensor.offset < 0) return "has the negative storage offset " + std::to_string(tensor.offset);
  const auto reached = extent(tensor);
  if (!reached) return "has sizes, strides or an offset beyond every memory";
  if (static_cast<std::uint64_t>(reached->end) > storage.bytes.size()) {
    return "needs " + std::to_string(reached->end) + " bytes of storage " + in_quotes(storage.name) + ", which has " +
           std::to_string(storage.bytes.size());
  }
  const auto bytes = static_cast<std::uint64_t>(reached->bytes);
  const std::uint64_t repeated = bytes - std::min<std::uint64_t>(bytes, storage.bytes.size());
  if (repeated > repeats) {
    return "repeats its elements to " + std::to_string(bytes) +
           " bytes: such tensors make more of the file than it holds (save them as .contiguous())";
  }
  repeats -= repeated;
  return "";
}

}  // namespace

void check_tensors(Document& document, std::size_t file_bytes) {
  std::uint64_t repeats = std::max(file_bytes, kMaxRepeatedBytes);
  for_each_tensor(document.root, [&](const std::string& name, const TensorRef& tensor) {
    StorageBytes& storage = document.storages.at(tensor.storage);
    const std::string found = problem(tensor, storage, repeats);
    if (!found.empty()) throw Error("tensor " + in_quotes(name) + " " + found);
    storage.alignment = std::max(storage.alignment, info(tensor.dtype).alignment);
  });
}

}  // namespace violin::checkpoint
