// JSON as text.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "violin/error.h"

namespace violin::nn {

// JSON with names of files in it: where they are not UTF-8, which JSON does not hold, characters are replaced.
// `Json`: nlohmann::json or ordered_json.
template <class Json>
std::string json_text(const Json& value, int indent = -1) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

// JSON that comes from outside. Nobody nests deeply, and everything that walks a value (dump, copies) recurses. Throws
// Error that begins with `who`.
inline nlohmann::json parse_json(std::string_view text, const std::string& who) {
  constexpr int kMaxDepth = 32;
  const auto limit = [&](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    if (depth > kMaxDepth) throw Error(who + " is nested deeper than " + std::to_string(kMaxDepth) + " levels");
    return true;
  };
  nlohmann::json value = nlohmann::json::parse(text, limit, /*allow_exceptions=*/false);
  if (value.is_discarded()) throw Error(who + " is not JSON");
  return value;
}

// A value as it stands in the file, cut where it is long; of lists in lists only what they are, for dump recurses.
inline std::string shown(const nlohmann::json& value) {
  const bool nested = value.is_structured() &&
                      std::any_of(value.begin(), value.end(), [](const auto& item) { return item.is_structured(); });
  if (nested) return value.is_array() ? "a nested list" : "a nested object";
  const std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

}  // namespace violin::nn
