// What a tensor file holds, as plain data: a tree of containers, numbers, text and references to tensors. Files are
// hostile, so the parsers bound the depth and the size of a tree; whoever walks one may recurse.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "violin/checkpoint/dtype.h"

namespace violin::checkpoint {

struct Value;

struct None {};

struct Bytes {
  std::string data;
};

struct List {
  enum class Kind { kList, kTuple, kSet };
  Kind kind = Kind::kList;
  std::vector<Value> items;
};

// Keys in the order of the file; text keys and whole-number keys occur once each.
struct Dict {
  struct Item;
  std::vector<Item> items;

  // The value under a text key, or null.
  const Value* find(std::string_view key) const;
};

// An instance of a class that is harmless to know about, such as argparse.Namespace, or such a class itself
// (torch.float32). Nothing of it is ever run: it is its name and the plain data that was stored with it.
struct Object {
  std::string class_name;
  std::vector<Value> arguments;
  std::vector<Value> state;  // none or one

  // The state where it is a dictionary, as it is for argparse.Namespace; otherwise null.
  const Dict* attributes() const;
};

// A view of one of the file's storages.
struct TensorRef {
  std::size_t storage = 0;  // index into Document::storages
  DType dtype = DType::kF32;
  std::int64_t offset = 0;  // elements
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // elements
};

struct Value {
  std::variant<None, bool, std::int64_t, double, std::string, Bytes, List, Dict, TensorRef, Object> data;

  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&data);
  }
  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(data);
  }
  // "dictionary", "tensor", …: for messages.
  std::string_view kind_name() const;
};

struct Dict::Item {
  Value key;
  Value value;
};

struct NamedRef {
  std::string name;
  TensorRef tensor;
};

// A tensor's name is the path to it: dictionary keys, list positions and attribute names, joined by dots.
// Throws violin::Error for a name of more than 512 bytes.
void for_each_tensor(const Value& root, const std::function<void(const std::string& name, const TensorRef&)>& visit);
std::vector<NamedRef> flatten(const Value& root);

}  // namespace violin::checkpoint
