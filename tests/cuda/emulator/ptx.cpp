#include "ptx.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace violin::emulator {
namespace {

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

struct Token {
  std::string text;
  int line = 0;
};

// Words (with points, and :: inside), single characters otherwise; comments are left out.
class Tokens {
 public:
  Tokens(std::string_view text, int line) : text_(text), line_(line) { advance(); }
  const Token& now() const { return token_; }
  bool at(std::string_view what) const { return token_.text == what; }
  bool done() const { return token_.text.empty(); }
  std::string take() {
    std::string text = std::move(token_.text);
    advance();
    return text;
  }
  bool take_if(std::string_view what) {
    if (!at(what)) return false;
    advance();
    return true;
  }
  void expect(std::string_view what) {
    if (!take_if(what)) fail("'" + std::string(what) + "' expected, not '" + token_.text + "'");
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw Error("PTX line " + std::to_string(token_.line) + ": " + what);
  }

 private:
  void skip() {
    while (at_ < text_.size()) {
      if (text_[at_] == '\n') ++line_;
      if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
        ++at_;
      } else if (text_.substr(at_, 2) == "//") {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (text_.substr(at_, 2) == "/*") {
        const std::size_t end = text_.find("*/", at_);
        while (at_ < std::min(end, text_.size())) line_ += text_[at_++] == '\n';
        at_ = std::min(at_ + 2, text_.size());
      } else {
        return;
      }
    }
  }
  void advance() {
    skip();
    token_.line = line_;
    const std::size_t begin = at_;
    if (at_ < text_.size()) {
      if (is_word(text_[at_])) {
        while (at_ < text_.size() && (is_word(text_[at_]) || text_.substr(at_, 2) == "::"))
          at_ += is_word(text_[at_]) ? 1 : 2;
      } else {
        ++at_;
      }
    }
    token_.text = std::string(text_.substr(begin, at_ - begin));
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int line_;
  Token token_;
};

std::size_t type_bytes(const std::string& type) {
  if (type.size() < 3 || type[0] != '.') throw Error("not a type: " + type);
  return std::stoul(type.substr(2)) / 8;
}

bool is_number(const std::string& word) {
  return !word.empty() && std::isdigit(static_cast<unsigned char>(word[0]));
}

// Bits of a literal; floats are given by theirs.
std::uint64_t literal(const std::string& word) {
  if (word.size() > 2 && word[0] == '0' && (word[1] == 'f' || word[1] == 'F'))
    return std::stoull(word.substr(2), nullptr, 16);
  if (word.size() > 2 && word[0] == '0' && (word[1] == 'd' || word[1] == 'D'))
    return std::stoull(word.substr(2), nullptr, 16);
  std::string digits = word;
  while (!digits.empty() && (digits.back() == 'U' || digits.back() == 'u')) digits.pop_back();
  return std::stoull(digits, nullptr, 0);
}

std::size_t aligned(std::size_t at, std::size_t align) {
  return (at + align - 1) / align * align;
}

class Parser {
 public:
  Parser(std::string_view text, int line, const std::map<std::string, std::size_t>& dynamic_shared, Function& f)
      : tokens_(text, line), dynamic_shared_(dynamic_shared), f_(f) {}

  void run() {
    f_.static_shared = 0;
    header();
    tokens_.expect("{");
    scopes_.emplace_back();
    body();
    // A static array comes first, then what the launch adds.
    for (const auto& [slot, offset] : shared_slots_) f_.constants.push_back({slot, kSharedStart + offset});
    for (const auto& [slot, align] : dynamic_slots_) {
      f_.shared_align = std::max(f_.shared_align, align);
      pending_dynamic_.push_back(slot);
    }
    const std::size_t dynamic = aligned(kSharedStart + f_.static_shared, f_.shared_align);
    for (const int slot : pending_dynamic_) f_.constants.push_back({slot, dynamic});
  }

 private:
  // (.param ...) name (.param ..., ...) .maxntid 128, 1, 1
  void header() {
    while (!tokens_.at(".entry") && !tokens_.at(".func")) tokens_.take();  // .visible, .weak
    f_.is_entry = tokens_.take() == ".entry";
    if (tokens_.at("(")) f_.returns = parameters();
    f_.name = tokens_.take();
    if (tokens_.at("(")) f_.params = parameters();
    std::size_t at = 0;
    for (auto* list : {&f_.returns, &f_.params}) {
      for (Variable& v : *list) {
        v.offset = at = aligned(at, v.align);
        at += v.bytes;
      }
    }
    f_.param_bytes = at;
    while (!tokens_.at("{")) {
      const std::string word = tokens_.take();
      if (word == ".maxntid") f_.max_threads = number();
      if (word == ".reqnctapercluster") f_.cluster = number();
      if (tokens_.done()) tokens_.fail("a function without a body");
    }
  }
  int number() { return static_cast<int>(literal(tokens_.take())); }

  std::vector<Variable> parameters() {
    std::vector<Variable> list;
    tokens_.expect("(");
    while (!tokens_.take_if(")")) {
      tokens_.expect(".param");
      list.push_back(variable());
      tokens_.take_if(",");
    }
    return list;
  }
  // .align 8 .b8 name[40]
  Variable variable() {
    Variable v;
    bool has_align = false;
    if (tokens_.take_if(".align")) {
      v.align = static_cast<std::size_t>(number());
      has_align = true;
    }
    const std::size_t size = type_bytes(tokens_.take());
    while (tokens_.at(".ptr") || tokens_.at(".global") || tokens_.at(".align")) {  // attributes of pointers
      if (tokens_.take() == ".align") tokens_.take();
    }
    v.name = tokens_.take();
    v.bytes = size;
    if (!has_align) v.align = size;
    if (tokens_.take_if("[")) {
      v.bytes = tokens_.at("]") ? 0 : size * literal(tokens_.take());
      tokens_.expect("]");
    }
    return v;
  }

  void body() {
    while (!scopes_.empty()) {
      if (tokens_.done()) tokens_.fail("the end of a function is missing");
      if (tokens_.take_if("{")) {
        scopes_.emplace_back();
      } else if (tokens_.take_if("}")) {
        scopes_.pop_back();
      } else if (tokens_.at(".reg")) {
        registers();
      } else if (tokens_.at(".param") || tokens_.at(".local") || tokens_.at(".shared")) {
        declare(tokens_.take());
      } else if (tokens_.at(".pragma") || tokens_.at(".loc") || tokens_.at(".file")) {
        while (!tokens_.take_if(";")) tokens_.take();
      } else {
        statement();
      }
    }
  }
  // .reg .b32 %r<770>;  .reg .pred p;  .reg .f16 low,high;
  void registers() {
    tokens_.expect(".reg");
    tokens_.take();  // the type: every slot has eight bytes
    do {
      const std::string name = tokens_.take();
      if (tokens_.take_if("<")) {
        const int count = number();
        tokens_.expect(">");
        for (int i = 0; i < count; ++i) scopes_.back()[name + std::to_string(i)] = f_.slots++;
      } else {
        scopes_.back()[name] = f_.slots++;
      }
    } while (tokens_.take_if(","));
    tokens_.expect(";");
  }
  void declare(const std::string& space) {
    Variable v = variable();
    tokens_.expect(";");
    std::size_t& end = space == ".param" ? f_.call_bytes : space == ".local" ? f_.local_bytes : f_.static_shared;
    v.offset = aligned(end, v.align);
    end = v.offset + v.bytes;
    if (space == ".param") {
      f_.call_params.push_back(v);
      scopes_.back()[v.name] = special("call " + std::to_string(v.offset));
    } else if (space == ".local") {
      scopes_.back()[v.name] = special("local " + std::to_string(v.offset));
    } else {
      const int slot = f_.slots++;
      shared_slots_.emplace_back(slot, v.offset);
      scopes_.back()[v.name] = slot;
    }
  }

  void statement() {
    Statement s;
    s.line = tokens_.now().line;
    if (tokens_.take_if("@")) {
      s.guard_negated = tokens_.take_if("!");
      s.guard = slot_of(tokens_.take());
    }
    std::string word = tokens_.take();
    if (tokens_.take_if(":")) {
      f_.labels[word] = static_cast<int>(f_.statements.size());
      return;
    }
    for (std::size_t begin = 0; begin < word.size();) {
      std::size_t end = word.find('.', begin);
      if (end == std::string::npos) end = word.size();
      s.opcode.push_back(word.substr(begin, end - begin));
      begin = end + 1;
    }
    if (s.opcode.empty()) tokens_.fail("an instruction expected, not '" + word + "'");
    const bool jumps = s.opcode[0] == "bra" || s.opcode[0] == "call";
    while (!tokens_.take_if(";")) {
      s.operands.push_back(operand(jumps));
      tokens_.take_if(",");
    }
    f_.statements.push_back(std::move(s));
  }

  Operand operand(bool names) {
    Operand o;
    if (tokens_.take_if("[")) {
      o = operand(false);
      o.kind = Operand::Kind::kAddress;
      if (tokens_.take_if("+")) o.offset = integer();
      if (tokens_.take_if(",")) o.parts = operand(false).parts;
      tokens_.expect("]");
      return o;
    }
    for (const auto& [open, close] : {std::pair{"{", "}"}, std::pair{"(", ")"}}) {
      if (tokens_.take_if(open)) {
        o.kind = Operand::Kind::kVector;
        while (!tokens_.take_if(close)) {
          o.parts.push_back(operand(names));
          tokens_.take_if(",");
        }
        return o;
      }
    }
    if (tokens_.take_if("!")) o.negated = true;
    if (tokens_.at("-") || is_number(tokens_.now().text)) {
      o.kind = Operand::Kind::kSlot;
      o.slot = constant(static_cast<std::uint64_t>(integer()));
      return o;
    }
    const std::string word = tokens_.take();
    if (word == "_") {
      o.kind = Operand::Kind::kNothing;
    } else if (names && !known(word)) {
      o.kind = Operand::Kind::kName;
      o.name = word;
    } else {
      o.kind = Operand::Kind::kSlot;
      o.name = word;
      o.slot = slot_of(word);
    }
    if (tokens_.take_if("|")) {
      Operand pair;
      pair.kind = Operand::Kind::kPair;
      pair.parts = {o, operand(false)};
      return pair;
    }
    return o;
  }
  std::int64_t integer() {
    const bool negative = tokens_.take_if("-");
    const auto value = static_cast<std::int64_t>(literal(tokens_.take()));
    return negative ? -value : value;
  }

  int constant(std::uint64_t value) {
    const auto [at, is_new] = constants_.try_emplace(value, f_.slots);
    if (is_new) f_.constants.push_back({f_.slots++, value});
    return at->second;
  }
  int special(const std::string& name) {
    const auto [at, is_new] = specials_.try_emplace(name, f_.slots);
    if (is_new) f_.specials.push_back({f_.slots++, name});
    return at->second;
  }
  bool known(const std::string& name) const {
    return std::any_of(scopes_.begin(), scopes_.end(), [&](const auto& scope) { return scope.contains(name); });
  }
  int slot_of(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto at = scope->find(name); at != scope->end()) return at->second;
    }
    for (const auto* list : {&f_.params, &f_.returns}) {
      for (const Variable& v : *list) {
        if (v.name == name) return special("param " + std::to_string(v.offset));
      }
    }
    if (const auto at = dynamic_shared_.find(name); at != dynamic_shared_.end()) {
      const int slot = f_.slots++;
      scopes_.front()[name] = slot;
      dynamic_slots_.emplace_back(slot, at->second);
      return slot;
    }
    if (name[0] == '%') return special(name);
    tokens_.fail("unknown name '" + name + "'");
  }

  Tokens tokens_;
  const std::map<std::string, std::size_t>& dynamic_shared_;
  Function& f_;
  std::vector<std::map<std::string, int>> scopes_;
  std::map<std::uint64_t, int> constants_;
  std::map<std::string, int> specials_;
  std::vector<std::pair<int, std::size_t>> shared_slots_, dynamic_slots_;
  std::vector<int> pending_dynamic_;
};

}  // namespace

bool Statement::has(std::string_view part) const {
  return std::find(opcode.begin(), opcode.end(), part) != opcode.end();
}

std::string Statement::text() const {
  std::string all;
  for (const std::string& part : opcode) all += (all.empty() ? "" : ".") + part;
  return all;
}

Module::Module(std::string text) : text_(std::move(text)) {
  // Functions and arrays stand at the beginning of a line.
  int line = 1;
  for (std::size_t at = 0; at < text_.size();) {
    const std::size_t end = std::min(text_.find('\n', at), text_.size());
    std::string_view row(text_.data() + at, end - at);
    const bool is_entry = row.find(".entry ") != row.npos;
    if (!row.starts_with("\t") && !row.starts_with("//") && (is_entry || row.find(".func ") != row.npos)) {
      // A declaration ends with a semicolon, a definition with the brace that closes it.
      const std::size_t brace = std::min(text_.find('{', at), text_.size());
      const std::size_t semicolon = std::min(text_.find(';', at), text_.size());
      if (brace < semicolon) {
        std::size_t close = brace;
        for (int depth = 0; close < text_.size();) {
          depth += text_[close] == '{' ? 1 : text_[close] == '}' ? -1 : 0;
          ++close;
          if (depth == 0) break;
        }
        std::size_t name = row.find(is_entry ? ".entry " : ".func ") + (is_entry ? 7 : 6);
        if (!is_entry) {
          while (name < row.size() && row[name] == ' ') ++name;
          if (row[name] == '(') name = row.find(')', name) + 1;
          while (name < row.size() && row[name] == ' ') ++name;
        }
        std::size_t name_end = name;
        while (name_end < row.size() && is_word(row[name_end])) ++name_end;
        places_[std::string(row.substr(name, name_end - name))] = {at, close, is_entry, line};
        line += static_cast<int>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(at),
                                            text_.begin() + static_cast<std::ptrdiff_t>(close), '\n'));
        at = close;
        continue;
      }
    }
    if (row.starts_with(".extern .shared")) {
      Tokens tokens(row, line);
      std::size_t align = 16;
      std::string name;
      while (!tokens.done() && !tokens.at("[")) {
        if (tokens.at(".align")) {
          tokens.take();
          align = literal(tokens.now().text);
        }
        name = tokens.take();
      }
      dynamic_shared_[name] = align;
    }
    at = end + 1;
    ++line;
  }
}

std::vector<std::string> Module::entries() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : places_) {
    if (place.is_entry) names.push_back(name);
  }
  return names;
}

std::shared_ptr<const Function> Module::function(const std::string& name) {
  if (const auto at = parsed_.find(name); at != parsed_.end()) return at->second;
  const auto place = places_.find(name);
  if (place == places_.end()) return nullptr;
  auto f = std::make_shared<Function>();
  Parser(std::string_view(text_).substr(place->second.begin, place->second.end - place->second.begin),
         place->second.line, dynamic_shared_, *f)
      .run();
  return parsed_[name] = f;
}

}  // namespace violin::emulator
