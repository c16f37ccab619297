// JSON in messages.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace violin::nn {

// A value as it stands in the file, cut where it is long.
inline std::string shown(const nlohmann::json& value) {
  const std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

}  // namespace violin::nn
