#include "violin/checkpoint/pickle_nodes.h"

#include <algorithm>

#include "violin/text.h"

namespace violin::checkpoint {
namespace {

constexpr std::size_t kLeastBudget = std::size_t{16} << 20;
constexpr std::size_t kLargestBudget = std::size_t{1} << 30;
constexpr std::size_t kBudgetPerByte = 256;  // a one-byte instruction makes a node of about a hundred

}  // namespace

Budget::Budget(std::size_t pickle_bytes)
    : limit_(std::clamp(std::min(pickle_bytes, kLargestBudget) * kBudgetPerByte, kLeastBudget, kLargestBudget)),
      left_(limit_) {}

NodeId Nodes::add(Node node) {
  budget.spend(sizeof(Node) + node.text.size() + node.children.size() * sizeof(NodeId));
  all.push_back(std::move(node));
  return static_cast<NodeId>(all.size() - 1);
}

void Nodes::extend(NodeId parent, const std::vector<NodeId>& children) {
  budget.spend(children.size() * sizeof(NodeId));
  auto& list = all[parent].children;
  list.insert(list.end(), children.begin(), children.end());
}

NodeId Nodes::boolean(bool value) {
  Node node;
  node.kind = Node::Kind::kBool;
  node.integer = value ? 1 : 0;
  return add(std::move(node));
}

NodeId Nodes::integer(std::int64_t value) {
  Node node;
  node.kind = Node::Kind::kInteger;
  node.integer = value;
  return add(std::move(node));
}

NodeId Nodes::floating(double value) {
  Node node;
  node.kind = Node::Kind::kFloat;
  node.number = value;
  return add(std::move(node));
}

NodeId Nodes::text(std::string_view value) {
  if (!is_utf8(value)) return bytes(value);
  Node node;
  node.kind = Node::Kind::kText;
  node.text = value;
  return add(std::move(node));
}

NodeId Nodes::bytes(std::string_view value) {
  Node node;
  node.kind = Node::Kind::kBytes;
  node.text = value;
  return add(std::move(node));
}

NodeId Nodes::container(Node::Kind kind, std::vector<NodeId> children) {
  Node node;
  node.kind = kind;
  node.children = std::move(children);
  return add(std::move(node));
}

}  // namespace violin::checkpoint
