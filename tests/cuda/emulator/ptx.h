// PTX text as functions with statements: names are resolved to slots of a thread's registers, nothing is executed here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace violin::emulator {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Operand {
  enum class Kind {
    kSlot,     // a register or a constant: slot
    kAddress,  // [slot + offset], or [slot, {parts}] for boxes of tensor maps
    kVector,   // {parts}
    kPair,     // a|b: parts
    kName,     // a label or a function
    kNothing,  // _
  };
  Kind kind = Kind::kNothing;
  int slot = -1;
  bool negated = false;  // !p
  std::int64_t offset = 0;
  std::vector<Operand> parts;
  std::string name;
};

struct Statement {
  std::vector<std::string> opcode;  // split at its points: setp, lt, s32
  std::vector<Operand> operands;
  int guard = -1;  // slot of the predicate
  bool guard_negated = false;
  int line = 0;

  bool has(std::string_view part) const;
  std::string text() const;
};

// A variable in memory: a parameter, or one in shared or local memory.
struct Variable {
  std::string name;
  std::size_t bytes = 0, align = 1;
  std::size_t offset = 0;  // in its space
};

struct Function {
  std::string name;
  bool is_entry = false;
  std::vector<Variable> returns, params;  // offsets from the start of the parameters; results come first
  std::size_t param_bytes = 0;
  std::vector<Variable> call_params;  // what the function declares to call others
  std::size_t call_bytes = 0;
  std::size_t local_bytes = 0;
  std::size_t static_shared = 0;  // bytes behind the start of a block's shared memory
  std::size_t shared_align = 16;  // of what the launch adds to that
  int max_threads = 0;
  int cluster = 1;

  std::vector<Statement> statements;
  std::map<std::string, int> labels;  // index of the statement
  int slots = 0;

  // Slots that are filled before a thread starts.
  struct Constant {
    int slot;
    std::uint64_t value;
  };
  std::vector<Constant> constants;
  struct Special {  // %tid.x and the like, and addresses that differ between launches or threads
    int slot;
    std::string name;
  };
  std::vector<Special> specials;
};

// Shared memory of a block starts here: an address of 0 would hide mistakes.
constexpr std::size_t kSharedStart = 1024;

// Functions of a file by name, parsed when they are asked for.
class Module {
 public:
  explicit Module(std::string text);
  std::vector<std::string> entries() const;
  // Null where the file has none of this name.
  std::shared_ptr<const Function> function(const std::string& name);

 private:
  struct Place {
    std::size_t begin, end;
    bool is_entry;
    int line;
  };
  std::string text_;
  std::map<std::string, Place> places_;
  std::map<std::string, std::shared_ptr<const Function>> parsed_;
  std::map<std::string, std::size_t> dynamic_shared_;  // extern .shared arrays and their alignment
};

}  // namespace violin::emulator
