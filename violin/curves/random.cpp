// random: a uniformly drawn permutation, the control for every claim about locality. It depends on the seed and the
// number of cells only, and is the same on every platform.
#include "violin/curves/random.h"

#include <numeric>
#include <utility>
#include <vector>

#include "violin/curves/walk.h"

namespace violin::curves {

void walk_random(std::int64_t cells, std::uint64_t seed, Walk& walk) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(cells));
  std::iota(order.begin(), order.end(), 0);
  Random random(seed);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[random.below(static_cast<std::uint32_t>(i))]);
  }
  for (const std::int32_t cell : order) walk.visit(cell);
}

}  // namespace violin::curves
