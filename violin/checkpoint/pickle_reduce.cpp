// What the calls in a pickle stand for, as data. No Python function is imitated beyond the shape of its result.
#include <algorithm>

#include "violin/checkpoint/pickle_nodes.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

using Kind = Node::Kind;

[[noreturn]] void bad_arguments(const Node& callable, const std::string& what) {
  throw Error(in_quotes(callable.text) + " is called with " + what);
}

bool is_sequence(const Node& node) {
  return node.kind == Kind::kList || node.kind == Kind::kTuple || node.kind == Kind::kSet;
}

NodeId make_object(Nodes& nodes, const Node& callable, std::vector<NodeId> arguments) {
  Node node;
  node.kind = Kind::kObject;
  node.text = callable.text;
  node.children = std::move(arguments);
  return nodes.add(std::move(node));
}

// dict(), dict(other) or dict(list of pairs), which is how Python 2 wrote an OrderedDict.
NodeId make_dict(Nodes& nodes, const Node& callable, const std::vector<NodeId>& arguments) {
  std::vector<NodeId> pairs;
  if (!arguments.empty()) {
    const Node& source = nodes[arguments.front()];
    if (arguments.size() > 1 || (source.kind != Kind::kDict && !is_sequence(source))) {
      bad_arguments(callable, "something that is no list of pairs");
    }
    if (source.kind == Kind::kDict) {
      pairs = source.children;
    } else {
      for (const NodeId item : source.children) {
        if (!is_sequence(nodes[item]) || nodes[item].children.size() != 2) {
          bad_arguments(callable, "something that is no list of pairs");
        }
        pairs.insert(pairs.end(), nodes[item].children.begin(), nodes[item].children.end());
      }
    }
  }
  const NodeId dict = nodes.container(Kind::kDict, {});
  set_items(nodes, dict, pairs);
  return dict;
}

// list(), tuple(), set(), torch.Size() of nothing or of a sequence.
NodeId make_sequence(Nodes& nodes, Kind kind, const Node& callable, const std::vector<NodeId>& arguments) {
  if (arguments.empty()) return nodes.container(kind, {});
  const Node& source = nodes[arguments.front()];
  if (arguments.size() > 1 || !is_sequence(source)) bad_arguments(callable, "something that is no sequence");
  return nodes.container(kind, source.children);
}

// U+0000 to U+00FF back to the bytes that they stand for.
NodeId encode_latin1(Nodes& nodes, const Node& callable, const std::vector<NodeId>& arguments) {
  if (arguments.empty() || nodes[arguments.front()].kind != Kind::kText)
    bad_arguments(callable, "something else than text");
  const std::string& text = nodes[arguments.front()].text;
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) {
      bytes += text[i];
    } else if (byte <= 0xc3) {  // two bytes; the text is valid UTF-8
      bytes += static_cast<char>(((byte & 0x03) << 6) | (text[++i] & 0x3f));
    } else {
      bad_arguments(callable, "text outside Latin-1");
    }
  }
  return nodes.bytes(bytes);
}

NodeId make_bytes(Nodes& nodes, const Node& callable, const std::vector<NodeId>& arguments) {
  if (arguments.empty()) return nodes.bytes("");
  const Node& source = nodes[arguments.front()];
  if (source.kind == Kind::kText) return encode_latin1(nodes, callable, arguments);
  if (source.kind != Kind::kBytes) bad_arguments(callable, "something else than bytes");
  return arguments.front();
}

std::int64_t integer_argument(const Nodes& nodes, const Node& callable, NodeId id, const char* what) {
  if (nodes[id].kind != Kind::kInteger) bad_arguments(callable, std::string("a ") + what + " that is no integer");
  return nodes[id].integer;
}

std::vector<std::int64_t> integers_argument(const Nodes& nodes, const Node& callable, NodeId id, const char* what) {
  if (!is_sequence(nodes[id])) bad_arguments(callable, std::string("a ") + what + " that is no tuple");
  std::vector<std::int64_t> result;
  for (const NodeId item : nodes[id].children) result.push_back(integer_argument(nodes, callable, item, what));
  return result;
}

// Complex tensors may be stored as the conjugate or negative of what they mean, which a bare view cannot express.
void refuse_metadata(Nodes& nodes, const Node& callable, NodeId id) {
  const Node& metadata = nodes[id];
  if (metadata.kind == Kind::kNone) return;
  if (metadata.kind != Kind::kDict) bad_arguments(callable, "metadata that is no dictionary");
  nodes.budget.spend(metadata.children.size() * sizeof(NodeId));  // a shared one would cost time again and again
  for (std::size_t i = 1; i < metadata.children.size(); i += 2) {
    const Node& flag = nodes[metadata.children[i]];
    if (flag.kind == Kind::kBool && flag.integer == 0) continue;
    const std::string name = in_quotes(nodes[metadata.children[i - 1]].text);
    throw Error("a tensor has the property " + name + ": in Python, save tensor.resolve_conj().resolve_neg() instead");
  }
}

// _rebuild_tensor(storage, offset, sizes, strides), v2 (…, requires_grad, hooks, metadata), v3 (…, hooks, dtype,
// metadata)
NodeId rebuild_tensor(Nodes& nodes, const Node& callable, const std::vector<NodeId>& arguments) {
  const bool v3 = callable.global.role == GlobalRole::kRebuildTensorV3;
  if (arguments.size() < (v3 ? 7 : 4)) bad_arguments(callable, std::to_string(arguments.size()) + " arguments");
  const Node& storage = nodes[arguments[0]];
  if (storage.kind != Kind::kStorage) bad_arguments(callable, "a storage that is none");

  TensorRef tensor;
  tensor.storage = static_cast<std::size_t>(storage.integer);
  tensor.dtype = storage.global.dtype;
  tensor.offset = integer_argument(nodes, callable, arguments[1], "storage offset");
  tensor.sizes = integers_argument(nodes, callable, arguments[2], "size");
  tensor.strides = integers_argument(nodes, callable, arguments[3], "stride");
  if (v3) {
    const Node& dtype = nodes[arguments[6]];
    if (dtype.kind != Kind::kGlobal || dtype.global.role != GlobalRole::kTorchDType) {
      bad_arguments(callable, "a dtype that is none");
    }
    tensor.dtype = dtype.global.dtype;
  }
  const std::size_t metadata = v3 ? 7 : 6;
  if (arguments.size() > metadata) refuse_metadata(nodes, callable, arguments[metadata]);

  nodes.budget.spend(sizeof(TensorRef) + (tensor.sizes.size() + tensor.strides.size()) * sizeof(std::int64_t));
  nodes.tensors.push_back(std::move(tensor));
  Node node;
  node.kind = Kind::kTensor;
  node.integer = static_cast<std::int64_t>(nodes.tensors.size() - 1);
  return nodes.add(std::move(node));
}

// _rebuild_parameter(tensor, requires_grad, hooks[, state]): the tensor; whether it was trained is the model's
// business.
NodeId rebuild_parameter(const Nodes& nodes, const Node& callable, const std::vector<NodeId>& arguments) {
  if (arguments.empty() || nodes[arguments.front()].kind != Kind::kTensor) bad_arguments(callable, "no tensor");
  return arguments.front();
}

// _rebuild_from_type_v2(function, type, arguments, state): a tensor that carries Python attributes.
NodeId rebuild_from_type(Nodes& nodes, const Node& callable, const std::vector<NodeId>& arguments) {
  if (arguments.size() < 3) bad_arguments(callable, std::to_string(arguments.size()) + " arguments");
  const Node& function = nodes[arguments[0]];
  const Node& type = nodes[arguments[1]];
  const auto role = function.global.role;
  const bool makes_tensor =
      function.kind == Kind::kGlobal && (role == GlobalRole::kRebuildTensor || role == GlobalRole::kRebuildTensorV3 ||
                                         role == GlobalRole::kRebuildParameter);
  const bool plain_type = type.kind == Kind::kGlobal && type.global.role == GlobalRole::kTensorType;
  if (!makes_tensor || !plain_type) bad_arguments(callable, "a tensor type of somebody's own");
  return reduce(nodes, arguments[0], arguments[2]);
}

std::string_view class_of(const Node& node) {
  return node.kind == Kind::kObject || node.kind == Kind::kGlobal ? std::string_view(node.text) : "a plain value";
}

}  // namespace

NodeId reduce(Nodes& nodes, NodeId callable_id, NodeId arguments_id) {
  // Copies: making nodes moves the others.
  const Node callable = nodes[callable_id];
  if (callable.kind != Kind::kGlobal)
    throw Error("calls " + in_quotes(class_of(callable)) + ", which is no known function");
  if (nodes[arguments_id].kind != Kind::kTuple) bad_arguments(callable, "arguments that are no tuple");
  nodes.budget.spend(nodes[arguments_id].children.size() * sizeof(NodeId));
  const std::vector<NodeId> arguments = nodes[arguments_id].children;
  switch (callable.global.role) {
    case GlobalRole::kInert:
    case GlobalRole::kTensorType:
    case GlobalRole::kTorchDType:
    case GlobalRole::kStorageType:
      return make_object(nodes, callable, arguments);
    case GlobalRole::kDict:
      return make_dict(nodes, callable, arguments);
    case GlobalRole::kDefaultDict:  // the factory is of no use here
      return make_dict(nodes, callable, {arguments.begin() + (arguments.empty() ? 0 : 1), arguments.end()});
    case GlobalRole::kList:
      return make_sequence(nodes, Kind::kList, callable, arguments);
    case GlobalRole::kTuple:
      return make_sequence(nodes, Kind::kTuple, callable, arguments);
    case GlobalRole::kSet:
      return make_sequence(nodes, Kind::kSet, callable, arguments);
    case GlobalRole::kBytes:
      return make_bytes(nodes, callable, arguments);
    case GlobalRole::kEncodeLatin1:
      return encode_latin1(nodes, callable, arguments);
    case GlobalRole::kNumpyScalar:
      return numpy_scalar(nodes, arguments_id);
    case GlobalRole::kRebuildTensor:
    case GlobalRole::kRebuildTensorV3:
      return rebuild_tensor(nodes, callable, arguments);
    case GlobalRole::kRebuildParameter:
      return rebuild_parameter(nodes, callable, arguments);
    case GlobalRole::kRebuildFromType:
      return rebuild_from_type(nodes, callable, arguments);
  }
  throw Error("calls " + in_quotes(callable.text));
}

// ("storage", storage type, key, device, elements[, view]): the only thing that torch keeps outside the pickle.
NodeId persistent(Nodes& nodes, NodeId identifier) {
  const std::vector<NodeId>& parts = nodes[identifier].children;
  if (nodes[identifier].kind != Kind::kTuple || parts.empty() || nodes[parts[0]].kind != Kind::kText) {
    throw Error("a persistent id is not what torch writes");
  }
  if (nodes[parts[0]].text != "storage") {
    throw Error("a persistent id of kind " + in_quotes(nodes[parts[0]].text) +
                ": a whole module was saved; save its state_dict() instead");
  }
  if (parts.size() < 5 || nodes[parts[2]].kind != Kind::kText || nodes[parts[4]].kind != Kind::kInteger) {
    throw Error("a storage's persistent id is not what torch writes");
  }
  const std::string& key = nodes[parts[2]].text;
  const Node& type = nodes[parts[1]];
  if (type.kind != Kind::kGlobal || type.global.role != GlobalRole::kStorageType) {
    throw Error("storage " + in_quotes(key) + " has " + in_quotes(class_of(type)) + " as its type");
  }
  const DType dtype = type.global.dtype;
  const std::int64_t elements = nodes[parts[4]].integer;
  std::int64_t bytes = 0;
  if (elements < 0 || __builtin_mul_overflow(elements, static_cast<std::int64_t>(info(dtype).size), &bytes)) {
    throw Error("storage " + in_quotes(key) + " cannot have " + std::to_string(elements) + " elements");
  }
  if (parts.size() > 5 && nodes[parts[5]].kind != Kind::kNone) {
    throw Error("storage " + in_quotes(key) + " is a view of another, which only very old torch wrote");
  }
  // Tensors that share a storage name it each time.
  nodes.budget.spend(sizeof(PickleStorage) + 2 * key.size());
  const auto [found, added] = nodes.storage_index.emplace(key, nodes.storages.size());
  if (added) nodes.storages.push_back({key, dtype, 0});
  PickleStorage& storage = nodes.storages[found->second];
  storage.bytes = std::max(storage.bytes, bytes);
  Node node;
  node.kind = Kind::kStorage;
  node.global.dtype = dtype;
  node.integer = static_cast<std::int64_t>(found->second);
  return nodes.add(std::move(node));
}

// Attributes of a dictionary (a state_dict's `_metadata`) or of a tensor are dropped; an object keeps its state.
void set_state(Nodes& nodes, NodeId target, NodeId state) {
  Node& node = nodes.all[target];
  if (node.kind == Kind::kDict || node.kind == Kind::kTensor) return;
  if (node.kind != Kind::kObject || node.has_state) throw Error("a state is given to " + in_quotes(class_of(node)));
  node.has_state = true;
  nodes.extend(target, {state});
}

void set_items(Nodes& nodes, NodeId target, const std::vector<NodeId>& pairs) {
  if (nodes[target].kind != Kind::kDict) throw Error("items are given to something that is no dictionary");
  if (pairs.size() % 2 != 0) throw Error("a key has no value");
  for (std::size_t i = 0; i < pairs.size(); i += 2) {
    const Kind kind = nodes[pairs[i]].kind;
    if (kind == Kind::kList || kind == Kind::kDict) throw Error("a dictionary's key is a list or a dictionary");
  }
  nodes.extend(target, pairs);
}

void append_items(Nodes& nodes, NodeId target, const std::vector<NodeId>& items) {
  const Kind kind = nodes[target].kind;
  if (kind != Kind::kList && kind != Kind::kSet) throw Error("items are appended to something that is no list");
  nodes.extend(target, items);
}

}  // namespace violin::checkpoint
