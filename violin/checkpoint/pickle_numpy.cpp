// numpy scalars, which training scripts leave in checkpoints as accuracies and losses: scalar(dtype('f8'), bytes).
#include <string_view>

#include "violin/checkpoint/pickle_nodes.h"

namespace violin::checkpoint {
namespace {

using Kind = Node::Kind;

// "f8" of dtype("f8", False, True) with state (3, "<", …); empty for anything but little-endian numbers.
std::string_view number_code(const Nodes& nodes, const Node& dtype) {
  if (dtype.kind != Kind::kObject || dtype.text != "numpy.dtype" || dtype.children.empty()) return {};
  const Node& code = nodes[dtype.children.front()];
  if (code.kind != Kind::kText) return {};
  if (dtype.has_state) {
    const Node& state = nodes[dtype.children.back()];
    if (state.kind != Kind::kTuple || state.children.size() < 2) return {};
    const Node& order = nodes[state.children[1]];
    if (order.kind != Kind::kText || order.text == ">") return {};
  }
  return code.text;
}

template <typename T>
T load(std::string_view bytes) {
  T value;
  bytes.copy(reinterpret_cast<char*>(&value), sizeof(T));
  return value;
}

}  // namespace

NodeId numpy_scalar(Nodes& nodes, NodeId arguments) {
  const std::vector<NodeId> parts = nodes[arguments].children;  // a copy: adding nodes moves the others
  const auto as_object = [&] {
    Node node;
    node.kind = Kind::kObject;
    node.text = "numpy.scalar";
    node.children = parts;
    return nodes.add(std::move(node));
  };
  if (parts.size() != 2 || nodes[parts[1]].kind != Kind::kBytes) return as_object();
  const std::string code(number_code(nodes, nodes[parts[0]]));
  const std::string_view bytes = nodes[parts[1]].text;  // read before a node is added
  if (code.size() != 2 || bytes.size() != static_cast<std::size_t>(code[1] - '0')) return as_object();
  if (code == "f8") return nodes.floating(load<double>(bytes));
  if (code == "f4") return nodes.floating(load<float>(bytes));
  if (code == "b1") return nodes.boolean(bytes[0] != 0);
  if (code == "i8") return nodes.integer(load<std::int64_t>(bytes));
  if (code == "i4") return nodes.integer(load<std::int32_t>(bytes));
  if (code == "i2") return nodes.integer(load<std::int16_t>(bytes));
  if (code == "i1") return nodes.integer(load<std::int8_t>(bytes));
  if (code == "u4") return nodes.integer(load<std::uint32_t>(bytes));
  if (code == "u2") return nodes.integer(load<std::uint16_t>(bytes));
  if (code == "u1") return nodes.integer(load<std::uint8_t>(bytes));
  return as_object();
}

}  // namespace violin::checkpoint
