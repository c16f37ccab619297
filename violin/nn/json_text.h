// JSON as text.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace violin::nn {

// JSON with names of files in it: where they are not UTF-8, which JSON does not hold, characters are replaced.
// `Json`: nlohmann::json or ordered_json.
template <class Json>
std::string json_text(const Json& value, int indent = -1) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

// A value as it stands in the file, cut where it is long.
inline std::string shown(const nlohmann::json& value) {
  const std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

}  // namespace violin::nn
