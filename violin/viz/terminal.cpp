#include "violin/viz/terminal.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "violin/viz/color.h"
#include "violin/viz/grid_plot.h"

namespace violin::viz {
namespace {

using curves::Curve;
using curves::Grid;

constexpr std::int64_t kFrameGap = 3;
constexpr std::int64_t kBlockGap = 4;

// The nearest of xterm's 6 x 6 x 6 colours.
int xterm_color(Color color) {
  const auto level = [](std::uint8_t value) { return value < 48 ? 0 : value < 115 ? 1 : (value - 35) / 40; };
  return 16 + 36 * level(color.red) + 6 * level(color.green) + level(color.blue);
}

std::string spaces(std::int64_t count) {
  return std::string(static_cast<std::size_t>(std::max<std::int64_t>(count, 0)), ' ');
}

// A raster of single characters, each with the colour of a place along the curve.
class Characters {
 public:
  Characters(std::int64_t width, std::int64_t height)
      : width_(width), cells_(static_cast<std::size_t>(width * height)) {}

  void set(std::int64_t x, std::int64_t y, std::string_view glyph, double position) {
    cells_[static_cast<std::size_t>(y * width_ + x)] = {glyph, position};
  }

  TextBlock block(bool color) const {
    TextBlock block{.lines = {}, .width = width_};
    for (std::size_t start = 0; start < cells_.size(); start += static_cast<std::size_t>(width_)) {
      std::string line;
      int current = -1;
      for (std::size_t i = start; i < start + static_cast<std::size_t>(width_); ++i) {
        // Lighter than in pictures: most terminals are dark.
        const int wanted = xterm_color(mix(position_color(cells_[i].position), kPaper, 0.25));
        if (color && cells_[i].glyph != " " && wanted != current) {
          line += "\x1b[38;5;" + std::to_string(wanted) + "m";
          current = wanted;
        }
        line += cells_[i].glyph;
      }
      block.lines.push_back(current < 0 ? line : line + "\x1b[0m");
    }
    return block;
  }

 private:
  struct Cell {
    std::string_view glyph = " ";
    double position = 0;
  };
  std::int64_t width_;
  std::vector<Cell> cells_;
};

enum Side : unsigned { kUp = 1, kDown = 2, kLeft = 4, kRight = 8, kRising = 16, kFalling = 32 };

// The side on which a path leaves a cell for the next one; 0 for a jump.
unsigned side_towards(std::int64_t rows, std::int64_t columns) {
  if (rows == 0 && std::abs(columns) == 1) return columns > 0 ? kRight : kLeft;
  if (columns == 0 && std::abs(rows) == 1) return rows > 0 ? kDown : kUp;
  if (std::abs(rows) == 1 && std::abs(columns) == 1) return rows == columns ? kFalling : kRising;
  return 0;
}

std::string_view glyph_for(unsigned sides) {
  if ((sides & kRising) != 0) return "╱";
  if ((sides & kFalling) != 0) return "╲";
  switch (sides) {
    case kLeft | kRight:
      return "─";
    case kUp | kDown:
      return "│";
    case kDown | kRight:
      return "┌";
    case kDown | kLeft:
      return "┐";
    case kUp | kRight:
      return "└";
    case kUp | kLeft:
      return "┘";
    case kRight:
      return "╶";
    case kLeft:
      return "╴";
    case kUp:
      return "╵";
    case kDown:
      return "╷";
    default:
      return "·";
  }
}

struct Place {
  std::int64_t frame, row, column;
};

Place place_of(std::int32_t cell, const Grid& grid) {
  return {cell / (grid.height * grid.width), cell / grid.width % grid.height, cell % grid.width};
}

unsigned side_between(std::int32_t from, std::int32_t to, const Grid& grid) {
  const Place a = place_of(from, grid);
  const Place b = place_of(to, grid);
  return a.frame == b.frame ? side_towards(b.row - a.row, b.column - a.column) : 0;
}

std::int64_t frames_of(const Grid& grid) {
  return grid.is_3d() ? grid.frames : 1;
}

void draw_path(const std::vector<std::int32_t>& path, const Grid& grid, Characters& out) {
  const auto last = static_cast<double>(std::max<std::size_t>(path.size() - 1, 1));
  for (std::size_t k = 0; k < path.size(); ++k) {
    const Place place = place_of(path[k], grid);
    const std::int64_t x = place.frame * (2 * grid.width - 1 + kFrameGap) + 2 * place.column;
    const double position = static_cast<double>(k) / last;
    const unsigned back = k > 0 ? side_between(path[k], path[k - 1], grid) : 0;
    const unsigned ahead = k + 1 < path.size() ? side_between(path[k], path[k + 1], grid) : 0;
    const bool first = k == 0;
    const bool end = k + 1 == path.size();
    out.set(x, place.row, first ? "●" : end ? "○" : glyph_for(back | ahead), position);
    if (((back | ahead) & kRight) != 0) out.set(x + 1, place.row, "─", position);
  }
}

TextBlock rank_table(std::span<const std::int32_t> ranks, const Grid& grid) {
  const auto digits = static_cast<std::int64_t>(std::to_string(ranks.size() - 1).size());
  TextBlock block;
  for (std::int64_t r = 0; r < grid.height; ++r) {
    std::string line;
    for (std::int64_t t = 0; t < frames_of(grid); ++t) {
      if (t > 0) line += spaces(kFrameGap - 1);
      for (std::int64_t c = 0; c < grid.width; ++c) {
        const std::string number =
            std::to_string(ranks[static_cast<std::size_t>((t * grid.height + r) * grid.width + c)]);
        const bool leading = t == 0 && c == 0;
        line += spaces(digits + (leading ? 0 : 1) - static_cast<std::int64_t>(number.size())) + number;
      }
    }
    block.lines.push_back(std::move(line));
  }
  block.width = columns_of(block.lines.front());
  return block;
}

}  // namespace

TextBlock path_block(const Curve& curve, const Grid& grid, bool color) {
  const std::vector<std::vector<std::int32_t>> paths = paths_of(curve, grid);
  std::size_t steps = 0;
  std::size_t jumps = 0;
  for (const std::vector<std::int32_t>& path : paths) {
    for (std::size_t k = 0; k + 1 < path.size(); ++k) {
      ++steps;
      if (side_between(path[k], path[k + 1], grid) == 0) ++jumps;
    }
  }
  if (paths.empty()) return {};
  if (2 * jumps > steps) return rank_table(*curves::ranks(curve, grid), grid);
  const std::int64_t frames = frames_of(grid);
  Characters characters(frames * (2 * grid.width - 1) + (frames - 1) * kFrameGap, grid.height);
  for (const std::vector<std::int32_t>& path : paths) draw_path(path, grid, characters);
  return characters.block(color);
}

TextBlock heat_block(std::span<const double> values, const Grid& grid, std::int64_t reference, bool color) {
  constexpr std::array<std::string_view, 5> kShades = {"  ", "░░", "▒▒", "▓▓", "██"};
  TextBlock block{.lines = {}, .width = frames_of(grid) * (2 * grid.width + kFrameGap) - kFrameGap};
  for (std::int64_t r = 0; r < grid.height; ++r) {
    std::string line;
    for (std::int64_t t = 0; t < frames_of(grid); ++t) {
      if (t > 0) line += (color ? "\x1b[0m" : "") + spaces(kFrameGap);
      for (std::int64_t c = 0; c < grid.width; ++c) {
        const std::int64_t cell = (t * grid.height + r) * grid.width + c;
        const double value = std::clamp(values[static_cast<std::size_t>(cell)], 0.0, 1.0);
        const auto shade = static_cast<std::size_t>(std::lround(value * (kShades.size() - 1)));
        if (color) line += "\x1b[30;48;5;" + std::to_string(xterm_color(mask_color(value))) + "m";
        line += cell == reference ? "[]" : color ? "  " : kShades[shade];
      }
    }
    block.lines.push_back(color ? line + "\x1b[0m" : line);
  }
  return block;
}

std::string side_by_side(std::span<const TextBlock> blocks, std::span<const std::string> titles,
                         std::int64_t max_width) {
  std::string out;
  for (std::size_t first = 0, last = 0; first < blocks.size(); first = last) {
    const auto width_of = [&](std::size_t i) { return std::max(blocks[i].width, columns_of(titles[i])); };
    std::int64_t used = 0;
    while (last < blocks.size() && (last == first || used + kBlockGap + width_of(last) <= max_width)) {
      used += width_of(last) + (last == first ? 0 : kBlockGap);
      ++last;
    }
    std::size_t height = 0;
    for (std::size_t i = first; i < last; ++i) height = std::max(height, blocks[i].lines.size());
    const auto add_line = [&](const auto& text_of) {
      for (std::size_t i = first; i < last; ++i) {
        const auto [text, columns] = text_of(i);
        out += text;
        if (i + 1 < last) out += spaces(width_of(i) - columns + kBlockGap);
      }
      out += '\n';
    };
    using Piece = std::pair<std::string_view, std::int64_t>;
    add_line([&](std::size_t i) { return Piece{titles[i], columns_of(titles[i])}; });
    for (std::size_t y = 0; y < height; ++y) {
      add_line([&](std::size_t i) {
        return y < blocks[i].lines.size() ? Piece{blocks[i].lines[y], blocks[i].width} : Piece{"", 0};
      });
    }
    out += '\n';
  }
  return out;
}

// UTF-8's continuation bytes take none.
std::int64_t columns_of(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

std::string table(std::span<const std::vector<std::string>> rows) {
  std::vector<std::int64_t> widths;
  for (const std::vector<std::string>& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], columns_of(row[c]));
  }
  std::string out;
  for (const std::vector<std::string>& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string padding = spaces(widths[c] - columns_of(row[c]));
      if (c == 0) {
        out += row[c] + padding;
      } else {
        out += "  " + padding + row[c];
      }
    }
    out += '\n';
  }
  return out;
}

}  // namespace violin::viz
