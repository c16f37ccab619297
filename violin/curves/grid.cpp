#include <array>
#include <charconv>
#include <string>
#include <system_error>

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::curves {
namespace {

const std::string& limit_text() {
  static const std::string text = "the limit is " + std::to_string(kMaxCells) + " cells";
  return text;
}

}  // namespace

std::string Grid::to_string() const {
  const std::string plane = std::to_string(height) + "x" + std::to_string(width);
  return is_3d() ? std::to_string(frames) + "x" + plane : plane;
}

void check_grid(const Grid& grid) {
  const std::array<std::int64_t, 3> sides = {grid.is_3d() ? grid.frames : 1, grid.height, grid.width};
  std::int64_t cells = 1;
  for (const std::int64_t side : sides) {
    if (side < 1) throw Error("grid " + grid.to_string() + ": every side must be at least 1");
  }
  for (const std::int64_t side : sides) {
    // Both factors are at most 2^26 here, so the product cannot overflow.
    if (side > kMaxCells || side * cells > kMaxCells) {
      throw Error("grid " + grid.to_string() + " is too large: " + limit_text());
    }
    cells *= side;
  }
}

Grid parse_grid(std::string_view text) {
  const auto malformed = [&] {
    return Error("grid " + in_quotes(text) + " is not of the form HxW or TxHxW, such as 14x10 or 8x14x10");
  };
  std::array<std::int64_t, 3> sides = {};
  std::size_t count = 0;
  const char* at = text.data();
  const char* const end = at + text.size();
  for (;;) {
    if (count == sides.size() || at == end || *at < '0' || *at > '9') throw malformed();
    const auto [after, problem] = std::from_chars(at, end, sides[count]);
    if (problem == std::errc::result_out_of_range) {
      throw Error("grid " + in_quotes(text) + " is too large: " + limit_text());
    }
    if (sides[count] == 0) throw Error("grid " + in_quotes(text) + ": every side must be at least 1");
    ++count;
    at = after;
    if (at == end) break;
    if (*at != 'x') throw malformed();
    ++at;
  }
  if (count < 2) throw malformed();
  const Grid grid = count == 2 ? Grid{0, sides[0], sides[1]} : Grid{sides[0], sides[1], sides[2]};
  check_grid(grid);
  return grid;
}

}  // namespace violin::curves
