// The stack machine: instructions that make and combine plain values. What calls leave behind is in pickle_reduce.cpp.
#include "violin/checkpoint/pickle.h"

#include <bit>
#include <unordered_map>

#include "violin/checkpoint/pickle_nodes.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

using Kind = Node::Kind;

constexpr std::size_t kMaxPickleBytes = std::size_t{256} << 20;

// Instruction bytes, under the names of Python's pickletools.
enum Op : std::uint8_t {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDup = '2',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinString = 'T',
  kShortBinString = 'U',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kDict = 'd',
  kEmptyDict = '}',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kList = 'l',
  kEmptyList = ']',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kEmptyTuple = ')',
  kSetItems = 'u',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjEx = 0x92,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
};

class Machine {
 public:
  explicit Machine(ByteSpan bytes) : reader_(bytes, "the pickle"), nodes_(bytes.size()) {}

  std::size_t position() const { return reader_.position(); }
  Nodes& nodes() { return nodes_; }

  // Runs to the end of the pickle; the node that it leaves.
  NodeId run() {
    if (reader_.number<std::uint8_t>() != kProto) throw Error("it does not begin like a pickle of protocol 2 to 5");
    const auto protocol = reader_.number<std::uint8_t>();
    if (protocol < 2 || protocol > 5) {
      throw Error("pickle protocol " + std::to_string(protocol) + " is not known; torch writes 2 to 5");
    }
    while (true) {
      const auto op = reader_.number<std::uint8_t>();
      if (op == kStop) break;
      step(op);
    }
    if (stack_.size() != 1 || !marks_.empty()) throw Error("it leaves " + std::to_string(stack_.size()) + " values");
    return stack_.back();
  }

 private:
  void step(std::uint8_t op) {
    switch (op) {
      case kNone:
        return push(nodes_.none());
      case kNewTrue:
        return push(nodes_.boolean(true));
      case kNewFalse:
        return push(nodes_.boolean(false));
      case kBinInt:
        return push(nodes_.integer(static_cast<std::int32_t>(reader_.number<std::uint32_t>())));
      case kBinInt1:
        return push(nodes_.integer(reader_.number<std::uint8_t>()));
      case kBinInt2:
        return push(nodes_.integer(reader_.number<std::uint16_t>()));
      case kLong1:
        return push(long_integer(reader_.number<std::uint8_t>()));
      case kLong4:
        return push(long_integer(reader_.number<std::uint32_t>()));
      case kBinFloat:
        return push(nodes_.floating(std::bit_cast<double>(__builtin_bswap64(reader_.number<std::uint64_t>()))));
      case kShortBinUnicode:
      case kShortBinString:
        return push(nodes_.text(counted<std::uint8_t>()));
      case kBinUnicode:
      case kBinString:
        return push(nodes_.text(counted<std::uint32_t>()));
      case kBinUnicode8:
        return push(nodes_.text(counted<std::uint64_t>()));
      case kShortBinBytes:
        return push(nodes_.bytes(counted<std::uint8_t>()));
      case kBinBytes:
        return push(nodes_.bytes(counted<std::uint32_t>()));
      case kBinBytes8:
      case kByteArray8:
        return push(nodes_.bytes(counted<std::uint64_t>()));
      case kFrame:  // says how much may be fetched at once; the bytes are all here
        reader_.take(8);
        return;
      default:
        return step_container(op);
    }
  }

  void step_container(std::uint8_t op) {
    switch (op) {
      case kMark:
        nodes_.budget.spend(sizeof(std::size_t));
        return marks_.push_back(stack_.size());
      case kEmptyTuple:
        return push(nodes_.container(Kind::kTuple, {}));
      case kTuple:
        return push(nodes_.container(Kind::kTuple, pop_to_mark()));
      case kTuple1:
      case kTuple2:
      case kTuple3:
        return push(nodes_.container(Kind::kTuple, pop_count(op - kTuple1 + 1)));
      case kEmptyList:
        return push(nodes_.container(Kind::kList, {}));
      case kList:
        return push(nodes_.container(Kind::kList, pop_to_mark()));
      case kEmptyDict:
        return push(nodes_.container(Kind::kDict, {}));
      case kDict: {
        const auto pairs = pop_to_mark();
        const NodeId dict = nodes_.container(Kind::kDict, {});
        set_items(nodes_, dict, pairs);
        return push(dict);
      }
      case kEmptySet:
        return push(nodes_.container(Kind::kSet, {}));
      case kFrozenSet:
        return push(nodes_.container(Kind::kSet, pop_to_mark()));
      case kAppend: {
        const auto items = pop_count(1);
        return append_items(nodes_, top(), items);
      }
      case kAppends:
      case kAddItems: {
        const auto items = pop_to_mark();
        return append_items(nodes_, top(), items);
      }
      case kSetItem: {
        const auto pair = pop_count(2);
        return set_items(nodes_, top(), pair);
      }
      case kSetItems: {
        const auto pairs = pop_to_mark();
        return set_items(nodes_, top(), pairs);
      }
      default:
        return step_stack(op);
    }
  }

  void step_stack(std::uint8_t op) {
    switch (op) {
      case kPop:
        if (!marks_.empty() && marks_.back() == stack_.size()) return marks_.pop_back();
        pop();
        return;
      case kPopMark:
        pop_to_mark();
        return;
      case kDup:
        return push(top());
      case kBinPut:
        return remember(reader_.number<std::uint8_t>());
      case kLongBinPut:
        return remember(reader_.number<std::uint32_t>());
      case kMemoize:
        return remember(static_cast<std::uint32_t>(memo_.size()));
      case kBinGet:
        return push(recall(reader_.number<std::uint8_t>()));
      case kLongBinGet:
        return push(recall(reader_.number<std::uint32_t>()));
      default:
        return step_call(op);
    }
  }

  void step_call(std::uint8_t op) {
    switch (op) {
      case kGlobal: {
        const std::string module(line());
        return push(global(module, line()));
      }
      case kStackGlobal: {
        const auto names = pop_count(2);
        return push(global(text_of(names[0]), text_of(names[1])));
      }
      case kReduce:
      case kNewObj: {
        const auto call = pop_count(2);
        return push(reduce(nodes_, call[0], call[1]));
      }
      case kNewObjEx: {
        const auto call = pop_count(3);
        const Node& named = nodes_[call[2]];
        if (named.kind != Kind::kDict || !named.children.empty()) throw Error("NEWOBJ_EX with named arguments");
        return push(reduce(nodes_, call[0], call[1]));
      }
      case kBuild: {
        const NodeId state = pop();
        return set_state(nodes_, top(), state);
      }
      case kBinPersId:
        return push(persistent(nodes_, pop()));
      default: {
        static constexpr char kHex[] = "0123456789abcdef";
        throw Error(std::string("the instruction 0x") + kHex[op >> 4] + kHex[op & 15] +
                    " has no place in a file of tensors");
      }
    }
  }

  NodeId global(std::string_view module, std::string_view name) {
    const std::string full = std::string(module) + "." + std::string(name);
    const GlobalInfo* known = find_global(full);
    if (known == nullptr) {
      throw Error("refuses global " + in_quotes(full) +
                  ": only tensors and plain data are read and nothing is executed; in Python, keep what you need and "
                  "save it again, e.g. torch.save(model.state_dict(), file)");
    }
    Node node;
    node.kind = Kind::kGlobal;
    node.global = *known;
    node.text = full;
    return nodes_.add(std::move(node));
  }

  // Two's complement, little-endian. What 64 bits do not hold is kept as an object with its bytes.
  NodeId long_integer(std::size_t count) {
    const ByteSpan bytes = reader_.take(count);
    if (count > sizeof(std::int64_t)) {
      Node node;
      node.kind = Kind::kObject;
      node.text = "int";
      node.children = {nodes_.bytes(as_text(bytes))};
      return nodes_.add(std::move(node));
    }
    const bool negative = count > 0 && (std::to_integer<unsigned>(bytes.back()) & 0x80U) != 0;
    std::int64_t value = negative ? -1 : 0;
    if (count > 0) std::memcpy(&value, bytes.data(), count);
    return nodes_.integer(value);
  }

  template <typename Length>
  std::string_view counted() {
    const Length length = reader_.number<Length>();
    return as_text(reader_.take(length));
  }

  std::string_view line() {
    const std::string_view rest = as_text(reader_.rest());
    const std::size_t end = rest.find('\n');
    if (end == rest.npos) throw Error("the name of a global does not end");
    return as_text(reader_.take(end + 1)).substr(0, end);
  }

  const std::string& text_of(NodeId id) const {
    if (nodes_[id].kind != Kind::kText) throw Error("the name of a global is not text");
    return nodes_[id].text;
  }

  void push(NodeId id) {
    nodes_.budget.spend(sizeof(NodeId));
    stack_.push_back(id);
  }

  // Values below the last mark belong to somebody else.
  void need(std::size_t count) const {
    const std::size_t floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() - floor < count) throw Error("an instruction finds too few values");
  }

  NodeId top() const {
    need(1);
    return stack_.back();
  }

  NodeId pop() {
    const NodeId id = top();
    stack_.pop_back();
    return id;
  }

  std::vector<NodeId> pop_count(std::size_t count) {
    need(count);
    std::vector<NodeId> items(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return items;
  }

  std::vector<NodeId> pop_to_mark() {
    if (marks_.empty()) throw Error("an instruction finds no mark");
    const std::size_t count = stack_.size() - marks_.back();
    std::vector<NodeId> items = pop_count(count);
    marks_.pop_back();
    return items;
  }

  void remember(std::uint32_t slot) {
    nodes_.budget.spend(sizeof(NodeId) * 8);
    memo_[slot] = top();
  }

  NodeId recall(std::uint32_t slot) const {
    const auto found = memo_.find(slot);
    if (found == memo_.end()) throw Error("memo " + std::to_string(slot) + " is asked for but was never set");
    return found->second;
  }

  ByteReader reader_;
  Nodes nodes_;
  std::vector<NodeId> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint32_t, NodeId> memo_;
};

}  // namespace

Pickle read_pickle(ByteSpan bytes, std::string_view what) {
  if (bytes.size() > kMaxPickleBytes) bytes = bytes.first(kMaxPickleBytes);  // a legacy file goes on with its storages
  Machine machine(bytes);
  try {
    const NodeId root = machine.run();
    Pickle pickle;
    pickle.root = to_tree(machine.nodes(), root, machine.position());
    pickle.storages = std::move(machine.nodes().storages);
    pickle.bytes = machine.position();
    return pickle;
  } catch (const Error& error) {
    throw Error(std::string(what) + ", byte " + std::to_string(machine.position()) + ": " + error.what());
  }
}

}  // namespace violin::checkpoint
