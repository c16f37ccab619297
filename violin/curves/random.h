// A small generator whose numbers are the same on every platform, which those of <random>'s distributions are not.
#pragma once

#include <cstdint>

namespace violin::curves {

// SplitMix64: a counter in steps of the golden ratio, its bits mixed.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15U;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
  }

  // Uniform over 0 .. bound-1, bound > 0: the upper half of a 32 x 32 bit product. The 2^32 mod bound smallest lower
  // halves are rejected, after which each result stands for equally many draws.
  std::uint32_t below(std::uint32_t bound) {
    const std::uint32_t surplus = (0U - bound) % bound;
    for (;;) {
      const std::uint64_t product = (next() >> 32) * bound;
      if (static_cast<std::uint32_t>(product) >= surplus) return static_cast<std::uint32_t>(product >> 32);
    }
  }

 private:
  std::uint64_t state_;
};

}  // namespace violin::curves
