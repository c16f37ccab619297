// Height and width: of an image or a patch in pixels, of a grid in patches.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace violin {

struct Size {
  std::int64_t height = 0;
  std::int64_t width = 0;

  static constexpr Size square(std::int64_t side) { return {side, side}; }
  constexpr bool is_square() const { return height == width; }
  constexpr std::int64_t shorter() const { return std::min(height, width); }
  constexpr std::int64_t longer() const { return std::max(height, width); }
  constexpr std::int64_t area() const { return height * width; }
  friend bool operator==(const Size&, const Size&) = default;
};

// "224x224"
inline std::string to_string(const Size& size) {
  return std::to_string(size.height) + "x" + std::to_string(size.width);
}

// As people write it: "224" for a square, otherwise "160x224".
inline std::string short_text(const Size& size) {
  return size.is_square() ? std::to_string(size.height) : to_string(size);
}

// "224" or "160x224"; nothing for any other text. Which sizes make sense is for the caller to say.
inline std::optional<Size> parse_size(std::string_view text) {
  const auto number = [](std::string_view digits) -> std::optional<std::int64_t> {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < 0) return std::nullopt;
    return value;
  };
  const std::size_t times = text.find('x');
  const auto height = number(text.substr(0, times));
  const auto width = times == std::string_view::npos ? height : number(text.substr(times + 1));
  if (!height || !width) return std::nullopt;
  return Size{*height, *width};
}

}  // namespace violin
