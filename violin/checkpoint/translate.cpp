#include "violin/checkpoint/translate.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

// By preference. A file with an average beside the model gives the model unless the average is asked for.
constexpr std::array<std::string_view, 12> kWrappers = {"teacher",        "model",  "state_dict", "model_state_dict",
                                                        "student",        "net",    "ema",        "model_ema",
                                                        "state_dict_ema", "module", "_orig_mod",  "backbone"};
constexpr std::array<std::string_view, 3> kAverages = {"model_ema", "state_dict_ema", "ema"};

struct Source {
  std::string rest;  // of the name, behind the wrappers
  std::string name;
  TensorRef tensor;
};

std::string_view first_part(std::string_view name) {
  return name.substr(0, name.find('.'));
}

// One step into the file: keeps what stands under `key`, notes the rest.
void enter(std::vector<Source>& sources, std::string_view key, State& state, std::string& path) {
  std::vector<Source> inside;
  std::map<std::string, std::size_t> beside;
  for (Source& source : sources) {
    if (first_part(source.rest) == key && source.rest.size() > key.size()) {
      source.rest.erase(0, key.size() + 1);
      inside.push_back(std::move(source));
    } else {
      ++beside[path + std::string(first_part(source.rest))];
    }
  }
  for (const auto& [name, count] : beside) state.ignored.push_back(name + ": " + counted(count, "tensor"));
  sources = std::move(inside);
  path += std::string(key) + ".";
}

std::optional<std::string> wrapper_in(const std::set<std::string>& keys) {
  for (const std::string_view wrapper : kWrappers)
    if (keys.contains(std::string(wrapper))) return std::string(wrapper);
  return std::nullopt;
}

std::set<std::string> first_parts(const std::vector<Source>& sources) {
  std::set<std::string> keys;
  for (const Source& source : sources)
    if (source.rest.find('.') != std::string::npos) keys.emplace(first_part(source.rest));
  return keys;
}

bool is_model(const std::vector<Source>& sources) {
  return std::any_of(sources.begin(), sources.end(), [](const Source& source) {
    return source.rest.starts_with("patch_embed.") || source.rest.starts_with("blocks.");
  });
}

std::string listed(const std::set<std::string>& keys) {
  constexpr std::size_t kMost = 8;
  std::string text;
  std::size_t count = 0;
  for (const std::string& key : keys) {
    if (++count > kMost) return text + ", …";
    text += (text.empty() ? "" : ", ") + in_quotes(key);
  }
  return text.empty() ? "none" : text;
}

void unwrap(std::vector<Source>& sources, const std::string& branch, State& state) {
  std::string path;
  std::string wanted = branch;
  const std::set<std::string> top = first_parts(sources);
  // The depth of wrapping is bounded by the depth of names.
  for (;;) {
    const std::set<std::string> keys = first_parts(sources);
    if (keys.contains("teacher") || keys.contains("student")) state.from_dino = true;
    std::optional<std::string> key;
    if (!wanted.empty()) {
      if (keys.contains(wanted)) key = wanted;
      if (!key && wanted == "ema")
        for (const std::string_view average : kAverages)
          if (!key && keys.contains(std::string(average))) key = std::string(average);
      if (key) wanted.clear();
    }
    if (!key && is_model(sources)) break;
    if (!key) key = wrapper_in(keys);
    if (!key) break;
    if (*key != "module" && *key != "_orig_mod" && *key != "backbone")
      state.branch += (state.branch.empty() ? "" : ".") + *key;
    enter(sources, *key, state, path);
  }
  if (!wanted.empty()) {
    throw Error(file_in_quotes(state.file) + " has no branch " + in_quotes(wanted) + "; at the top it has " +
                listed(top));
  }
}

bool replace_suffix(std::string& name, std::string_view old_end, std::string_view new_end) {
  if (!name.ends_with(old_end)) return false;
  name.replace(name.size() - old_end.size(), old_end.size(), new_end);
  return true;
}

// "blocks.3.attn.ai_list.5" -> ("blocks.3.attn.", 5)
std::optional<std::pair<std::string, std::size_t>> curve_decay(const std::string& name) {
  constexpr std::string_view kKey = ".attn.ai_list.";
  const std::size_t at = name.rfind(kKey);
  if (at == std::string::npos) return std::nullopt;
  const std::string_view digits = std::string_view(name).substr(at + kKey.size());
  std::size_t curve = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), curve);
  if (error != std::errc() || end != digits.data() + digits.size() || curve > 1000) return std::nullopt;
  return std::pair{name.substr(0, at) + ".attn.", curve};
}

std::int64_t count_of(const std::vector<std::int64_t>& sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

class Translator {
 public:
  Translator(const TensorFile& file, State& state) : file_(file), state_(state) {}

  void add(const Source& source) {
    std::string name = source.rest;
    const TensorRef& tensor = source.tensor;
    if (const auto decay = curve_decay(name)) {
      curves_[decay->first][decay->second] = source;
      return;
    }
    if (name == "mask_token") {
      state_.ignored.push_back("mask_token: only used in pretraining");
      return;
    }
    if (replace_suffix(name, ".attn.ai_list", ".attn.violin.gamma")) {
      note("attn.ai_list, a fixed decay, is attn.violin.gamma");
    } else if (replace_suffix(name, ".attn.normalize", ".attn.violin.alpha")) {
      note("attn.normalize is attn.violin.alpha");
      // [1,h,1,1] in some versions
      put(name, source.name, tensor.dtype, {count_of(tensor.sizes)},
          [file = file_, tensor] { return file.tensor(tensor).reshape({-1}); });
      return;
    } else if (replace_suffix(name, ".gamma_1", ".ls1.gamma") || replace_suffix(name, ".gamma_2", ".ls2.gamma")) {
      note("gamma_1 and gamma_2 are ls1.gamma and ls2.gamma");
    } else if (name == "register_tokens") {
      name = "reg_token";
      note("register_tokens is reg_token");
    }
    put(name, source.name, tensor.dtype, tensor.sizes, [file = file_, tensor] { return file.tensor(tensor); });
  }

  void finish() {
    for (const auto& [layer, curves] : curves_) {
      const Source& first = curves.begin()->second;
      if (curves.rbegin()->first + 1 != curves.size()) {
        throw Error(file_in_quotes(state_.file) + ": decays of " + in_quotes(layer + "ai_list") + " are " +
                    std::to_string(curves.size()) + ", but one has number " + std::to_string(curves.rbegin()->first));
      }
      std::vector<TensorRef> parts;
      for (const auto& [curve, source] : curves) {
        parts.push_back(source.tensor);
        if (source.tensor.sizes == first.tensor.sizes && source.tensor.dtype == first.tensor.dtype) continue;
        throw Error(file_in_quotes(state_.file) + ": tensor " + in_quotes(source.name) + " is " +
                    shape_text(source.tensor.sizes) + "; the other curves have " + shape_text(first.tensor.sizes));
      }
      const auto rows = static_cast<std::int64_t>(parts.size());
      put(layer + "violin.beta", first.name, first.tensor.dtype, {rows, count_of(first.tensor.sizes)},
          [file = file_, parts, rows] {
            std::vector<at::Tensor> tensors;
            for (const TensorRef& part : parts) tensors.push_back(file.tensor(part));
            return at::stack(tensors).reshape({rows, -1});
          });
    }
    if (!curves_.empty()) note("attn.ai_list.C, one per curve, are the rows of attn.violin.beta");
    fold_class_position();
  }

 private:
  void note(const std::string& line) {
    if (std::find(state_.renamed.begin(), state_.renamed.end(), line) == state_.renamed.end())
      state_.renamed.push_back(line);
  }

  void put(const std::string& name, const std::string& source, DType dtype, std::vector<std::int64_t> sizes,
           std::function<at::Tensor()> make) {
    if (!names_.insert(name).second) {
      throw Error(file_in_quotes(state_.file) + ": two tensors mean " + in_quotes(name) + ", one of them is " +
                  in_quotes(source));
    }
    state_.entries.push_back({name, source, dtype, std::move(sizes), std::move(make)});
  }

  // DINOv2 has a position for the class token and none for registers; the model here has one for each or for neither.
  void fold_class_position() {
    const auto entry = [&](std::string_view name) {
      return std::find_if(state_.entries.begin(), state_.entries.end(),
                          [&](const StateEntry& candidate) { return candidate.name == name; });
    };
    const auto cls = entry("cls_token"), registers = entry("reg_token"), positions = entry("pos_embed");
    const auto end = state_.entries.end();
    if (cls == end || registers == end || positions == end || registers->source == registers->name) return;
    if (!registers->source.ends_with("register_tokens") || positions->sizes.size() != 3 || positions->sizes[1] < 2 ||
        cls->sizes != std::vector<std::int64_t>{1, 1, positions->sizes[2]}) {
      return;
    }
    cls->make = [token = cls->make, table = positions->make] { return token() + table().narrow(1, 0, 1); };
    positions->make = [table = positions->make] { return table().slice(1, 1); };
    --positions->sizes[1];
    note("the position of the class token is added to cls_token");
  }

  TensorFile file_;
  State& state_;
  std::set<std::string> names_;
  std::map<std::string, std::map<std::size_t, Source>> curves_;  // by layer and curve
};

}  // namespace

const StateEntry* State::find(std::string_view name) const {
  const auto found =
      std::find_if(entries.begin(), entries.end(), [&](const StateEntry& entry) { return entry.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

State translate(const TensorFile& file, std::string file_name, const std::string& branch) {
  State state;
  state.file = std::move(file_name);
  std::vector<Source> sources;
  for (NamedRef& entry : file.list()) {
    std::string name = entry.name;
    sources.push_back({std::move(name), std::move(entry.name), std::move(entry.tensor)});
  }
  unwrap(sources, branch, state);
  Translator translator(file, state);
  for (const Source& source : sources) translator.add(source);
  translator.finish();
  return state;
}

std::string shape_text(const std::vector<std::int64_t>& sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += (text.empty() ? "" : ",") + std::to_string(size);
  return "[" + text + "]";
}

}  // namespace violin::checkpoint
