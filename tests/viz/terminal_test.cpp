#include "violin/viz/terminal.h"

#include <gtest/gtest.h>

#include <string>

namespace violin::viz {
namespace {

using curves::Grid;
using curves::parse_curve;
using Lines = std::vector<std::string>;

TEST(PathBlock, DrawsUnitStepsAsBoxLines) {
  EXPECT_EQ(path_block(parse_curve("snake"), {0, 3, 3}, false).lines, (Lines{"●───┐", "┌───┘", "└───○"}));
  EXPECT_EQ(path_block(parse_curve("snake_T"), {0, 3, 3}, false).lines, (Lines{"● ┌─┐", "│ │ │", "└─┘ ○"}));
  EXPECT_EQ(path_block(parse_curve("hilbert"), {0, 2, 2}, false).lines, (Lines{"● ○", "└─┘"}));
}

TEST(PathBlock, ShowsJumpsAsGapsAndDiagonalsAsSlashes) {
  EXPECT_EQ(path_block(parse_curve("z"), {0, 2, 4}, false).lines, (Lines{"●─────╴", "╶─────○"}));
  EXPECT_EQ(path_block(parse_curve("zigzag"), {0, 3, 3}, false).lines, (Lines{"● ╱─╱", "╱ ╱ ╱", "╱─╱ ○"}));
}

TEST(PathBlock, HasOneCell) {
  EXPECT_EQ(path_block(parse_curve("z"), {0, 1, 1}, false).lines, Lines{"●"});
}

TEST(PathBlock, PutsFramesSideBySide) {
  EXPECT_EQ(path_block(parse_curve("frame:snake"), {2, 2, 2}, false).lines, (Lines{"●─┐   ●─┐", "○─┘   ○─┘"}));
}

TEST(PathBlock, FallsBackToRanksWhereThereIsNoPathToSee) {
  const Grid grid = {0, 4, 4};
  const TextBlock block = path_block(parse_curve("random"), grid, false);
  ASSERT_EQ(block.lines.size(), 4U);
  EXPECT_EQ(block.width, 11);
  std::string first;
  const auto ranks = curves::ranks(parse_curve("random"), grid);
  for (std::size_t c = 0; c < 4; ++c) {
    const std::string number = std::to_string(ranks->at(c));
    first += std::string(2 - number.size() + (c > 0 ? 1 : 0), ' ') + number;
  }
  EXPECT_EQ(block.lines[0], first);
  EXPECT_TRUE(path_block(parse_curve("manhattan"), grid, false).lines.empty());
}

TEST(PathBlock, ColoursOnlyWhenAsked) {
  const TextBlock plain = path_block(parse_curve("hilbert"), {0, 8, 8}, false);
  const TextBlock colored = path_block(parse_curve("hilbert"), {0, 8, 8}, true);
  EXPECT_EQ(plain.width, colored.width);
  for (const std::string& line : plain.lines) EXPECT_EQ(line.find('\x1b'), std::string::npos);
  for (const std::string& line : colored.lines) {
    EXPECT_NE(line.find("\x1b[38;5;"), std::string::npos);
    EXPECT_TRUE(line.ends_with("\x1b[0m"));
  }
}

TEST(HeatBlock, ShadesValuesAndMarksTheReference) {
  const std::vector<double> values = {1, 0.75, 0.5, 0.25, 0, 0.9};
  EXPECT_EQ(heat_block(values, {0, 2, 3}, 0, false).lines, (Lines{"[]▓▓▒▒", "░░  ██"}));
  const TextBlock frames = heat_block(values, {3, 1, 2}, 5, false);
  EXPECT_EQ(frames.lines, Lines{"██▓▓   ▒▒░░     []"});
  EXPECT_EQ(frames.width, 18);
}

TEST(SideBySide, BreaksWhereTheScreenEnds) {
  const std::vector<TextBlock> blocks = {{{"aa", "aa"}, 2}, {{"b"}, 1}, {{"cccc"}, 4}};
  const Lines titles = {"A", "long", "C"};
  EXPECT_EQ(side_by_side(blocks, titles, 80), "A     long    C\naa    b       cccc\naa            \n\n");
  EXPECT_EQ(side_by_side(blocks, titles, 10), "A     long\naa    b\naa    \n\nC\ncccc\n\n");
  EXPECT_EQ(side_by_side(blocks, titles, 1), "A\naa\naa\n\nlong\nb\n\nC\ncccc\n\n");
}

TEST(Table, AlignsNumbersToTheRight) {
  const std::vector<Lines> rows = {{"curve", "n"}, {"γ", "100"}};
  EXPECT_EQ(table(rows), "curve    n\nγ      100\n");
}

}  // namespace
}  // namespace violin::viz
