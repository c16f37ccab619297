// The one place that knows what curves are called.
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <system_error>

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::curves {
namespace {

constexpr std::string_view kFramePrefix = "frame:";
constexpr std::string_view kSeedPrefix = "random:";
constexpr std::string_view kTransposedSuffix = "_T";

struct Family {
  Kind kind;
  std::string_view name;
  bool has_transpose;
};

constexpr std::array<Family, 7> kFamilies = {{
    {Kind::kSnake, "snake", true},
    {Kind::kHilbert, "hilbert", true},
    {Kind::kMorton, "peano", true},
    {Kind::kZigzag, "zigzag", true},
    {Kind::kZ, "z", true},
    {Kind::kRandom, "random", false},
    {Kind::kManhattan, "manhattan", false},
}};

constexpr std::array<Kind, 4> kPublished = {Kind::kSnake, Kind::kHilbert, Kind::kMorton, Kind::kZigzag};

const Family* find_family(std::string_view name) {
  if (name == "morton") name = "peano";
  const auto* found = std::ranges::find(kFamilies, name, &Family::name);
  return found == kFamilies.end() ? nullptr : found;
}

std::uint64_t parse_seed(std::string_view text, std::string_view name) {
  std::uint64_t seed = 0;
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto [after, problem] = std::from_chars(begin, end, seed);
  if (text.empty() || problem != std::errc{} || after != end) {
    throw Error("curve " + in_quotes(name) + ": the seed must be a whole number from 0 to 18446744073709551615");
  }
  return seed;
}

// Nothing for a name that does not exist; throws for one that nearly does.
std::optional<Curve> find_curve(std::string_view name) {
  Curve curve;
  std::string_view base = name;
  if (base.starts_with(kFramePrefix)) {
    curve.per_frame = true;
    base.remove_prefix(kFramePrefix.size());
  }
  if (base.starts_with(kSeedPrefix)) {
    curve.kind = Kind::kRandom;
    curve.seed = parse_seed(base.substr(kSeedPrefix.size()), name);
    return curve;
  }
  if (base.ends_with(kTransposedSuffix)) {
    curve.transposed = true;
    base.remove_suffix(kTransposedSuffix.size());
  }
  const Family* family = find_family(base);
  if (family == nullptr) return std::nullopt;
  if (curve.transposed && !family->has_transpose) {
    throw Error("curve " + in_quotes(name) + ": " + std::string(family->name) + " has no transpose; write " +
                std::string(name.substr(0, name.size() - kTransposedSuffix.size())));
  }
  curve.kind = family->kind;
  return curve;
}

// Every plain name with the aliases.
std::vector<std::string> accepted_names() {
  std::vector<std::string> names = curve_names();
  names.insert(names.end(), {"morton", "morton_T"});
  return names;
}

// "unknown curve 'x'; did you mean 'y'? known: ..."
Error unknown(std::string_view what, std::string_view name, std::span<const std::string> candidates) {
  std::string_view base = name;
  std::string prefix;
  if (base.starts_with(kFramePrefix)) {
    prefix = kFramePrefix;
    base.remove_prefix(kFramePrefix.size());
  }
  const std::string nearest = nearest_word(base, candidates);
  std::string message = "unknown " + std::string(what) + " " + in_quotes(name) + "; ";
  if (!nearest.empty()) message += "did you mean '" + prefix + nearest + "'? ";
  return Error(message + "known: " + joined(candidates));
}

std::optional<std::vector<Curve>> find_set(std::string_view name) {
  const bool all = name == "violin";
  if (!all && name != "normal" && name != "transposed") return std::nullopt;
  std::vector<Curve> curves;
  for (const Kind kind : kPublished) {
    if (all || name == "normal") curves.push_back({.kind = kind});
    if (all || name == "transposed") curves.push_back({.kind = kind, .transposed = true});
  }
  return curves;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

}  // namespace

std::string Curve::name() const {
  const auto* family = std::ranges::find(kFamilies, kind, &Family::kind);
  std::string text(per_frame ? kFramePrefix : "");
  text += family->name;
  if (transposed) text += kTransposedSuffix;
  if (kind == Kind::kRandom && seed != 0) text += ":" + std::to_string(seed);
  return text;
}

const std::vector<std::string>& curve_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Family& family : kFamilies) {
      list.emplace_back(family.name);
      if (family.has_transpose) list.push_back(std::string(family.name) + std::string(kTransposedSuffix));
    }
    return list;
  }();
  return names;
}

const std::vector<std::string>& curve_set_names() {
  static const std::vector<std::string> names = {"violin", "normal", "transposed"};
  return names;
}

Curve parse_curve(std::string_view name) {
  if (const auto curve = find_curve(name)) return *curve;
  throw unknown("curve", name, accepted_names());
}

std::vector<Curve> parse_curves(std::string_view set_or_list) {
  std::vector<Curve> curves;
  const auto add = [&](const Curve& curve) {
    if (std::ranges::find(curves, curve) != curves.end()) {
      throw Error("curves " + in_quotes(set_or_list) + ": " + curve.name() + " is named twice");
    }
    curves.push_back(curve);
  };
  for (std::string_view left = set_or_list;;) {
    const std::size_t comma = left.find(',');
    const std::string_view item = trimmed(left.substr(0, comma));
    if (item.empty()) {
      throw Error("curves " + in_quotes(set_or_list) + ": expected a set (" + joined(curve_set_names()) +
                  ") or curve names separated by commas");
    }
    if (const auto set = find_set(item)) {
      std::ranges::for_each(*set, add);
    } else if (const auto curve = find_curve(item)) {
      add(*curve);
    } else {
      std::vector<std::string> known = accepted_names();
      known.insert(known.end(), curve_set_names().begin(), curve_set_names().end());
      throw unknown("curve or set", item, known);
    }
    if (comma == std::string_view::npos) return curves;
    left.remove_prefix(comma + 1);
  }
}

}  // namespace violin::curves
