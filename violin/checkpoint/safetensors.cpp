#include "violin/checkpoint/safetensors.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "violin/data/file.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

constexpr std::size_t kDataAlignment = 64;
constexpr std::size_t kLengthBytes = 8;

struct Item {
  const std::string* name;
  const at::Tensor* tensor;
  const DTypeInfo* type;
};

const DTypeInfo& type_of(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) throw Error("tensor " + in_quotes(name) + " cannot be saved: it is undefined");
  if (tensor.layout() != at::kStrided) throw Error("tensor " + in_quotes(name) + " cannot be saved: it is not dense");
  for (int i = 0; i <= static_cast<int>(DType::kC128); ++i) {
    const DTypeInfo& type = info(static_cast<DType>(i));
    if (scalar_type(type.dtype) == tensor.scalar_type() && !type.safetensors.empty()) return type;
  }
  throw Error("tensor " + in_quotes(name) + " cannot be saved: safetensors has no dtype for " +
              c10::toString(tensor.scalar_type()));
}

std::vector<Item> ordered(const NamedTensors& tensors) {
  std::vector<Item> items;
  for (const auto& [name, tensor] : tensors) {
    if (name == "__metadata__" || !is_utf8(name)) throw Error(in_quotes(name) + " cannot be a tensor's name");
    items.push_back({&name, &tensor, &type_of(name, tensor)});
  }
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return *a.name < *b.name; });
  for (std::size_t i = 1; i < items.size(); ++i) {
    if (*items[i].name == *items[i - 1].name) throw Error("two tensors have the name " + in_quotes(*items[i].name));
  }
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.type->size > b.type->size; });
  return items;
}

// Length and JSON, padded with spaces to where the data begins.
std::string header(const std::vector<Item>& items, const Metadata& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const auto& [key, text] : metadata) {
    if (!is_utf8(key) || !is_utf8(text)) throw Error("metadata " + in_quotes(key) + " is not UTF-8");
    json["__metadata__"][key] = text;
  }
  std::size_t offset = 0;
  for (const Item& item : items) {
    const std::size_t end = offset + item.tensor->nbytes();
    json[*item.name] = {
        {"dtype", item.type->safetensors}, {"shape", item.tensor->sizes()}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = json.dump();
  text.append((kDataAlignment - (kLengthBytes + text.size()) % kDataAlignment) % kDataAlignment, ' ');
  const std::uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + text;
}

std::span<const std::uint8_t> as_bytes(const void* data, std::size_t count) {
  return {static_cast<const std::uint8_t*>(data), count};
}

}  // namespace

void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors, const Metadata& metadata) {
  const std::vector<Item> items = ordered(tensors);
  const std::string head = header(items, metadata);
  write_file_atomically(path, [&](const ByteSink& sink) {
    sink(as_bytes(head.data(), head.size()));
    for (const Item& item : items) {
      // One at a time: a copy, where strides or the device ask for one, lives no longer than its turn.
      const at::Tensor dense = item.tensor->detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
      sink(as_bytes(dense.const_data_ptr(), dense.nbytes()));
    }
  });
}

}  // namespace violin::checkpoint
