#include "violin/checkpoint/value.h"

#include <iterator>

#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

constexpr std::size_t kMaxNameBytes = 512;

class Walker {
 public:
  explicit Walker(const std::function<void(const std::string&, const TensorRef&)>& visit) : visit_(visit) {}

  void walk(const Value& value) {
    if (const auto* tensor = value.get_if<TensorRef>()) {
      if (name_.size() > kMaxNameBytes) throw Error("the name of tensor " + in_quotes(name_) + " is too long");
      visit_(name_, *tensor);
    } else if (const auto* list = value.get_if<List>()) {
      for (std::size_t i = 0; i < list->items.size(); ++i) descend(std::to_string(i), list->items[i]);
    } else if (const auto* dict = value.get_if<Dict>()) {
      walk_dict(*dict);
    } else if (const auto* object = value.get_if<Object>()) {
      if (const Dict* attributes = object->attributes()) walk_dict(*attributes);
    }
  }

 private:
  void walk_dict(const Dict& dict) {
    for (const auto& [key, value] : dict.items) {
      if (const auto* text = key.get_if<std::string>()) {
        descend(*text, value);
      } else if (const auto* number = key.get_if<std::int64_t>()) {
        descend(std::to_string(*number), value);
      } else {
        descend("(" + std::string(key.kind_name()) + ")", value);
      }
    }
  }

  void descend(std::string_view part, const Value& value) {
    const bool leads_on = value.is<TensorRef>() || value.is<List>() || value.is<Dict>() || value.is<Object>();
    if (!leads_on) return;
    const std::size_t length = name_.size();
    if (depth_ > 0) name_ += '.';
    // Never longer than one part above the limit: the rest could only make it more wrong.
    if (length <= kMaxNameBytes) name_ += part.substr(0, kMaxNameBytes + 1);
    ++depth_;
    walk(value);
    --depth_;
    name_.resize(length);
  }

  const std::function<void(const std::string&, const TensorRef&)>& visit_;
  std::string name_;
  int depth_ = 0;
};

}  // namespace

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : items) {
    const auto* text = name.get_if<std::string>();
    if (text != nullptr && *text == key) return &value;
  }
  return nullptr;
}

const Dict* Object::attributes() const {
  return state.empty() ? nullptr : state.front().get_if<Dict>();
}

std::string_view Value::kind_name() const {
  static constexpr std::string_view kNames[] = {"none",  "bool", "integer",    "float",  "text",
                                                "bytes", "list", "dictionary", "tensor", "object"};
  static_assert(std::size(kNames) == std::variant_size_v<decltype(data)>);
  if (const auto* list = get_if<List>()) {
    if (list->kind == List::Kind::kTuple) return "tuple";
    if (list->kind == List::Kind::kSet) return "set";
  }
  return kNames[data.index()];
}

void for_each_tensor(const Value& root, const std::function<void(const std::string&, const TensorRef&)>& visit) {
  Walker(visit).walk(root);
}

std::vector<NamedRef> flatten(const Value& root) {
  std::vector<NamedRef> all;
  for_each_tensor(root, [&](const std::string& name, const TensorRef& tensor) { all.push_back({name, tensor}); });
  return all;
}

}  // namespace violin::checkpoint
