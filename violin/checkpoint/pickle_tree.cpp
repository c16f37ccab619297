// From the machine's nodes, which may share and even contain each other, to a tree of limited depth and size.
#include <unordered_set>

#include "violin/checkpoint/pickle_nodes.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

using Kind = Node::Kind;

// State dicts nest to about five; a destructor that recurses stays far from the end of the stack.
constexpr int kMaxDepth = 100;

class Unfolder {
 public:
  Unfolder(const Nodes& nodes, std::size_t pickle_bytes) : nodes_(nodes), budget_(pickle_bytes) {}

  Value unfold(NodeId id, int depth) {
    if (depth > kMaxDepth) throw Error("values are nested more than " + std::to_string(kMaxDepth) + " deep");
    const Node& node = nodes_[id];
    budget_.spend(node.text.size());
    switch (node.kind) {
      case Kind::kNone:
        return {};
      case Kind::kBool:
        return {node.integer != 0};
      case Kind::kInteger:
        return {node.integer};
      case Kind::kFloat:
        return {node.number};
      case Kind::kText:
        return {node.text};
      case Kind::kBytes:
        return {Bytes{node.text}};
      case Kind::kList:
        return {List{List::Kind::kList, children(node, depth)}};
      case Kind::kTuple:
        return {List{List::Kind::kTuple, children(node, depth)}};
      case Kind::kSet:
        return {List{List::Kind::kSet, children(node, depth)}};
      case Kind::kDict:
        return {dict(node, depth)};
      case Kind::kGlobal:
        return {Object{node.text, {}, {}}};
      case Kind::kObject:
        return {object(node, depth)};
      case Kind::kStorage:
        return {Object{"torch.storage", {}, {}}};
      case Kind::kTensor: {
        const TensorRef& tensor = nodes_.tensors[static_cast<std::size_t>(node.integer)];
        budget_.spend((tensor.sizes.size() + tensor.strides.size()) * sizeof(std::int64_t));
        return {tensor};
      }
    }
    return {};
  }

 private:
  std::vector<Value> children(const Node& node, int depth) {
    std::vector<Value> result;
    budget_.spend(node.children.size() * sizeof(Value));
    result.reserve(node.children.size());
    for (const NodeId child : node.children) result.push_back(unfold(child, depth + 1));
    return result;
  }

  Dict dict(const Node& node, int depth) {
    Dict result;
    budget_.spend(node.children.size() * sizeof(Value));
    result.items.reserve(node.children.size() / 2);
    std::unordered_set<std::string_view> texts;
    std::unordered_set<std::int64_t> numbers;
    for (std::size_t i = 0; i + 1 < node.children.size(); i += 2) {
      const Node& key = nodes_[node.children[i]];
      const bool again = (key.kind == Kind::kText && !texts.insert(key.text).second) ||
                         (key.kind == Kind::kInteger && !numbers.insert(key.integer).second);
      if (again) {
        throw Error("a dictionary has the key " +
                    (key.kind == Kind::kText ? in_quotes(key.text) : std::to_string(key.integer)) + " twice");
      }
      result.items.push_back({unfold(node.children[i], depth + 1), unfold(node.children[i + 1], depth + 1)});
    }
    return result;
  }

  Object object(const Node& node, int depth) {
    Object result{node.text, children(node, depth), {}};
    if (node.has_state) {
      result.state.push_back(std::move(result.arguments.back()));
      result.arguments.pop_back();
    }
    return result;
  }

  const Nodes& nodes_;
  Budget budget_;
};

}  // namespace

Value to_tree(const Nodes& nodes, NodeId root, std::size_t pickle_bytes) {
  return Unfolder(nodes, pickle_bytes).unfold(root, 0);
}

}  // namespace violin::checkpoint
