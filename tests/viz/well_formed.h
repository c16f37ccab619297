// Whether a text is well-formed XML, as far as our SVG goes: tags closed in order, attributes quoted, entities known.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

namespace violin::viz {

// Empty when it is; else what is wrong.
inline std::string xml_problem(std::string_view text) {
  std::vector<std::string> open;
  const auto entities_known = [](std::string_view part) {
    for (std::size_t at = 0; (at = part.find('&', at)) != std::string_view::npos; ++at) {
      const std::string_view rest = part.substr(at);
      const auto is = [&](std::string_view entity) { return rest.starts_with(entity); };
      if (!is("&amp;") && !is("&lt;") && !is("&gt;") && !is("&quot;")) return false;
    }
    return true;
  };
  while (!text.empty()) {
    const std::size_t start = std::min(text.find('<'), text.size());
    const std::string_view words = text.substr(0, start);
    if (words.find('>') != std::string_view::npos || !entities_known(words)) return "bad text: " + std::string(words);
    if (std::any_of(words.begin(), words.end(),
                    [](char c) { return static_cast<unsigned char>(c) < 32 && c != '\n'; })) {
      return "control character";
    }
    if (start == text.size()) break;
    const std::size_t end = text.find('>', start);
    if (end == std::string_view::npos) return "tag without end";
    std::string_view tag = text.substr(start + 1, end - start - 1);
    text.remove_prefix(end + 1);
    if (tag.starts_with('/')) {
      if (open.empty() || open.back() != tag.substr(1)) return "unexpected </" + std::string(tag.substr(1)) + ">";
      open.pop_back();
      continue;
    }
    const bool closed = tag.ends_with('/');
    if (closed) tag.remove_suffix(1);
    const std::size_t name_end = std::min(tag.find(' '), tag.size());
    const std::string name(tag.substr(0, name_end));
    tag.remove_prefix(name_end);
    std::vector<std::string> attributes;
    while (!tag.empty()) {
      const std::size_t equals = tag.find("=\"");
      const std::size_t quote = equals == std::string_view::npos ? equals : tag.find('"', equals + 2);
      if (tag[0] != ' ' || quote == std::string_view::npos)
        return "bad attribute in <" + name + ">:" + std::string(tag);
      attributes.emplace_back(tag.substr(1, equals - 1));
      const std::string_view value = tag.substr(equals + 2, quote - equals - 2);
      if (value.find('<') != std::string_view::npos || !entities_known(value)) return "bad value in <" + name + ">";
      tag.remove_prefix(quote + 1);
    }
    std::sort(attributes.begin(), attributes.end());
    if (std::adjacent_find(attributes.begin(), attributes.end()) != attributes.end())
      return "attribute twice in <" + name + ">";
    if (!closed) open.push_back(name);
  }
  return open.empty() ? "" : "<" + open.back() + "> is not closed";
}

inline std::size_t count(std::string_view text, std::string_view part) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; at += part.size()) ++found;
  return found;
}

}  // namespace violin::viz
