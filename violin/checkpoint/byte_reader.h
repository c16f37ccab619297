// A cursor over bytes of a file: little-endian numbers, every step checked against the end.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "violin/error.h"

namespace violin::checkpoint {

static_assert(std::endian::native == std::endian::little, "tensor files are little-endian and read in place");

using ByteSpan = std::span<const std::byte>;

inline std::string_view as_text(ByteSpan bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class ByteReader {
 public:
  // `what` is named when the bytes end too early; it must outlive the reader.
  ByteReader(ByteSpan bytes, std::string_view what) : bytes_(bytes), what_(what) {}

  std::size_t position() const { return position_; }
  std::size_t remaining() const { return bytes_.size() - position_; }
  ByteSpan rest() const { return bytes_.subspan(position_); }

  ByteSpan take(std::size_t count) {
    if (count > remaining()) {
      throw Error(std::string(what_) + " ends at byte " + std::to_string(bytes_.size()) + ", " + std::to_string(count) +
                  " more are needed at byte " + std::to_string(position_));
    }
    const ByteSpan result = bytes_.subspan(position_, count);
    position_ += count;
    return result;
  }

  template <std::unsigned_integral T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }

 private:
  ByteSpan bytes_;
  std::string_view what_;
  std::size_t position_ = 0;
};

}  // namespace violin::checkpoint
