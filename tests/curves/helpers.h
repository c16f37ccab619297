// What the tests of the curves share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "violin/curves/curves.h"
#include "violin/error.h"

namespace violin::curves {

inline bool is_permutation(std::span<const std::int32_t> ranks) {
  std::vector<bool> taken(ranks.size(), false);
  for (const std::int32_t rank : ranks) {
    if (rank < 0 || static_cast<std::size_t>(rank) >= taken.size() || taken[static_cast<std::size_t>(rank)])
      return false;
    taken[static_cast<std::size_t>(rank)] = true;
  }
  return true;
}

// What the library says when it refuses; empty if it does not.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::int64_t count_of_longer_steps(std::span<const std::int32_t> ranks, const Grid& grid) {
  const auto cells = order(ranks);
  const std::int64_t plane = grid.height * grid.width;
  std::int64_t count = 0;
  for (std::size_t i = 1; i < cells.size(); ++i) {
    const std::int64_t a = cells[i - 1];
    const std::int64_t b = cells[i];
    const std::int64_t length = std::abs(a / plane - b / plane) +
                                std::abs(a % plane / grid.width - b % plane / grid.width) +
                                std::abs(a % grid.width - b % grid.width);
    if (length != 1) ++count;
  }
  return count;
}

// `count` grids with sides from `low` to `high`, always the same ones.
inline std::vector<Grid> some_grids(bool is_3d, std::int64_t low, std::int64_t high, int count) {
  std::mt19937 bits(20);
  const auto side = [&] {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint32_t>(high - low + 1));
  };
  std::vector<Grid> grids;
  for (int i = 0; i < count; ++i) {
    const std::int64_t frames = is_3d ? side() : 0;
    const std::int64_t height = side();
    grids.push_back({frames, height, side()});
  }
  return grids;
}

}  // namespace violin::curves
