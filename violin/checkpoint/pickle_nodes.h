// What the pickle machine works on. Nodes stand in one vector and refer to each other by number, so a pickle that
// builds cycles, sharing or a very deep nesting costs nothing special; pickle_tree.cpp makes a bounded tree of them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "violin/checkpoint/pickle.h"
#include "violin/checkpoint/pickle_globals.h"
#include "violin/error.h"

namespace violin::checkpoint {

using NodeId = std::uint32_t;

struct Node {
  enum class Kind : std::uint8_t {
    kNone,
    kBool,
    kInteger,
    kFloat,
    kText,
    kBytes,
    kList,
    kTuple,
    kSet,
    kDict,     // children: key, value, key, value, …
    kGlobal,   // text: its name
    kObject,   // text: its class; children: arguments, and behind them the state if there is one
    kStorage,  // integer: index into the storages
    kTensor,   // integer: index into the tensors
  };
  Kind kind = Kind::kNone;
  bool has_state = false;
  GlobalInfo global;  // of kGlobal; of kStorage the dtype
  union {
    std::int64_t integer = 0;
    double number;
  };
  std::string text;
  std::vector<NodeId> children;
};

// Bounds memory by the size of the pickle: sharing lets a short program ask for very much.
class Budget {
 public:
  explicit Budget(std::size_t pickle_bytes);
  void spend(std::size_t bytes) {
    if (bytes > left_) throw Error("it unfolds to more than " + std::to_string(limit_ >> 20) + " MiB");
    left_ -= bytes;
  }

 private:
  std::size_t limit_;
  std::size_t left_;
};

struct Nodes {
  explicit Nodes(std::size_t pickle_bytes) : budget(pickle_bytes) {}

  const Node& operator[](NodeId id) const { return all[id]; }
  NodeId add(Node node);
  // Appends children and pays for them.
  void extend(NodeId parent, const std::vector<NodeId>& children);

  NodeId none() { return add({}); }
  NodeId boolean(bool value);
  NodeId integer(std::int64_t value);
  NodeId floating(double value);
  NodeId text(std::string_view value);  // bytes where it is not UTF-8
  NodeId bytes(std::string_view value);
  NodeId container(Node::Kind kind, std::vector<NodeId> children);

  std::vector<Node> all;
  std::vector<TensorRef> tensors;
  std::vector<PickleStorage> storages;
  std::unordered_map<std::string, std::size_t> storage_index;  // by key
  Budget budget;
};

// What a call, an instantiation or a state leaves behind (pickle_reduce.cpp); the new node, or the changed one.
NodeId reduce(Nodes& nodes, NodeId callable, NodeId arguments);
NodeId persistent(Nodes& nodes, NodeId identifier);
void set_state(Nodes& nodes, NodeId target, NodeId state);
void set_items(Nodes& nodes, NodeId target, const std::vector<NodeId>& pairs);
void append_items(Nodes& nodes, NodeId target, const std::vector<NodeId>& items);

// A numpy scalar as a number; an object of its class where it is none (pickle_numpy.cpp).
NodeId numpy_scalar(Nodes& nodes, NodeId arguments);

// pickle_tree.cpp
Value to_tree(const Nodes& nodes, NodeId root, std::size_t pickle_bytes);

}  // namespace violin::checkpoint
