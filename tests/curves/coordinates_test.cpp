#include <gtest/gtest.h>

#include "tests/curves/helpers.h"

namespace violin::curves {
namespace {

TEST(Coordinates, OfOrdinaryCurvesAreTheirRanks) {
  const auto curves = parse_curves("violin");
  const Grid grid = {0, 5, 7};
  const Coordinates found = coordinates(curves, grid);
  EXPECT_EQ(found.curves, 8);
  EXPECT_EQ(found.axes, 1);
  EXPECT_EQ(found.tokens, 35);
  Ranks expected;
  for (const Curve& curve : curves)
    expected.insert(expected.end(), ranks(curve, grid)->begin(), ranks(curve, grid)->end());
  EXPECT_EQ(found.values, expected);
}

TEST(Coordinates, OfManhattanAreRowAndColumn) {
  const Coordinates found = coordinates(parse_curves("manhattan"), {0, 2, 3});
  EXPECT_EQ(found.axes, 2);
  EXPECT_EQ(found.values, (Ranks{0, 0, 0, 1, 1, 1, /**/ 0, 1, 2, 0, 1, 2}));
}

TEST(Coordinates, OfManhattanInAVolumeBeginWithTheFrame) {
  const Coordinates found = coordinates(parse_curves("manhattan"), {2, 1, 3});
  EXPECT_EQ(found.axes, 3);
  EXPECT_EQ(found.values, (Ranks{0, 0, 0, 1, 1, 1, /**/ 0, 0, 0, 0, 0, 0, /**/ 0, 1, 2, 0, 1, 2}));
}

TEST(Coordinates, OfManhattanPerFrameLeaveTheFrameOut) {
  const Coordinates found = coordinates(parse_curves("frame:manhattan"), {2, 1, 3});
  EXPECT_EQ(found.axes, 2);
  EXPECT_EQ(found.values, (Ranks{0, 0, 0, 0, 0, 0, /**/ 0, 1, 2, 0, 1, 2}));
}

TEST(Coordinates, MissingAxesAreZeroWhereCurvesOfBothSortsMeet) {
  const Coordinates found = coordinates(parse_curves("z,manhattan,z_T"), {0, 2, 2});
  EXPECT_EQ(found.curves, 3);
  EXPECT_EQ(found.axes, 2);
  EXPECT_EQ(found.values, (Ranks{0, 1, 2, 3, 0, 0, 0, 0, /**/ 0, 0, 1, 1, 0, 1, 0, 1, /**/ 0, 2, 1, 3, 0, 0, 0, 0}));
}

TEST(Coordinates, NeedACurve) {
  EXPECT_NE(refusal([] { coordinates({}, {0, 2, 2}); }), "");
}

TEST(Coordinates, RanksOfManhattanAreRefused) {
  EXPECT_TRUE(contains(refusal([] { ranks(parse_curve("manhattan"), {0, 2, 2}); }), "use its coordinates"));
}

TEST(Subset, TakesTheVisibleTokensOfEachSample) {
  const Coordinates whole = coordinates(parse_curves("snake,manhattan"), {0, 2, 3});
  // snake: 0 1 2 / 5 4 3
  const Ranks visible = {5, 0, /**/ 1, 4};
  EXPECT_EQ(subset(whole, visible, 2), (Ranks{3, 0, 0, 0, 1, 0, 2, 0, /**/ 1, 4, 0, 0, 0, 1, 1, 1}));
}

TEST(Subset, OfAllTokensIsTheWhole) {
  const Coordinates whole = coordinates(parse_curves("violin"), {0, 3, 4});
  Ranks all(12);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
  EXPECT_EQ(subset(whole, all, 1), whole.values);
}

TEST(Subset, MayBeEmpty) {
  EXPECT_TRUE(subset(coordinates(parse_curves("z"), {0, 3, 4}), {}, 2).empty());
}

TEST(Subset, NamesTheCellThatIsWrong) {
  const Coordinates whole = coordinates(parse_curves("z"), {0, 2, 3});
  const auto message = [&](const Ranks& visible, std::int64_t samples) {
    return refusal([&] { subset(whole, visible, samples); });
  };
  EXPECT_TRUE(contains(message({0, 1, 2, 6}, 2), "sample 1: cell 6 is not one of the grid's 6"));
  EXPECT_TRUE(contains(message({0, -1, 2, 5}, 2), "sample 0: cell -1 is not one of the grid's 6"));
  EXPECT_TRUE(contains(message({0, 1, 2, 4, 5, 4}, 2), "sample 1: cell 4 is named twice"));
  EXPECT_TRUE(contains(message({0, 1, 2}, 2), "3 cells cannot be split into 2 samples"));
  EXPECT_TRUE(contains(message({0, 1, 2}, 0), "must be at least 1"));
  EXPECT_EQ(message({0, 1, 0, 1}, 2), "") << "the same cell in two samples is no mistake";
}

TEST(Subset, RefusesCoordinatesThatContradictThemselves) {
  Coordinates whole = coordinates(parse_curves("z"), {0, 2, 3});
  whole.tokens = 7;
  EXPECT_TRUE(contains(refusal([&] { subset(whole, Ranks{6}, 1); }), "6 values instead of 7"));
}

}  // namespace
}  // namespace violin::curves
