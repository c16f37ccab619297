#include <gtest/gtest.h>

#include <cmath>

#include "tests/curves/helpers.h"

namespace violin::curves {
namespace {

Locality of(const std::string& curve, const Grid& grid) {
  return locality(*ranks(parse_curve(curve), grid), grid);
}

TEST(Locality, OfZIsWhatOneCountsByHand) {
  const Locality found = of("z", {0, 3, 4});
  EXPECT_EQ(found.unit_steps, 9);
  EXPECT_EQ(found.diagonal_steps, 0);
  EXPECT_EQ(found.jumps, 2);
  EXPECT_DOUBLE_EQ(found.mean_jump, std::sqrt(10.0));
  EXPECT_DOUBLE_EQ(found.max_step, std::sqrt(10.0));
  EXPECT_DOUBLE_EQ(found.mean_neighbour_distance, (9 * 1 + 8 * 4) / 17.0);
}

TEST(Locality, CountsStepsAcrossEdgesOfCubesAsDiagonal) {
  // 2 x 2 x 2 in Morton order: along the row, to the next row (diagonal), and once through the cube's centre.
  const Locality found = of("peano", {2, 2, 2});
  EXPECT_EQ(found.unit_steps, 4);
  EXPECT_EQ(found.diagonal_steps, 3);
  EXPECT_EQ(found.jumps, 0);
  EXPECT_DOUBLE_EQ(found.max_step, std::sqrt(3.0));
  EXPECT_DOUBLE_EQ(found.mean_neighbour_distance, (1 + 2 + 4) / 3.0);
}

TEST(Locality, AccountsForEveryStep) {
  const Grid grid = {0, 9, 14};
  for (const Curve& curve : parse_curves("violin,z,z_T,random:2")) {
    const Locality found = locality(*ranks(curve, grid), grid);
    EXPECT_EQ(found.unit_steps + found.diagonal_steps + found.jumps, grid.cells() - 1) << curve.name();
    EXPECT_EQ(found.jumps > 0, found.max_step > 1.5) << curve.name();
    EXPECT_GE(found.max_step, found.mean_jump) << curve.name();
  }
}

TEST(Locality, OfASingleCellIsZero) {
  for (const Grid& grid : {Grid{0, 1, 1}, Grid{1, 1, 1}}) {
    const Locality found = of("hilbert", grid);
    EXPECT_EQ(found.unit_steps + found.diagonal_steps + found.jumps, 0);
    EXPECT_EQ(found.mean_jump, 0);
    EXPECT_EQ(found.max_step, 0);
    EXPECT_EQ(found.mean_neighbour_distance, 0);
    EXPECT_EQ(found.distance_correlation, 0);
  }
}

TEST(Locality, CorrelationIsZeroWhereNothingVaries) {
  EXPECT_EQ(of("z", {0, 1, 2}).distance_correlation, 0);
}

TEST(Locality, CorrelationIsOneAlongALine) {
  EXPECT_NEAR(of("snake", {0, 1, 50}).distance_correlation, 1, 1e-12);
  EXPECT_NEAR(of("hilbert", {0, 5000, 1}).distance_correlation, 1, 1e-12);
}

TEST(Locality, TiesHaveTheirMeanRank) {
  // z on 2 x 2: pairs (01) (02) (03) (12) (13) (23) are 1 2 3 1 2 1 apart along the curve, in mid-ranks 2 4.5 6 2 4.5
  // 2, and 1 1 2 2 1 1 apart squared in the grid, in mid-ranks 2.5 2.5 5.5 5.5 2.5 2.5. Less the mean of 3.5, Pearson's
  // correlation of these is 3 / sqrt(15 * 12).
  EXPECT_NEAR(of("z", {0, 2, 2}).distance_correlation, 3 / std::sqrt(15.0 * 12.0), 1e-12);
}

TEST(Locality, ASampleOfPairsEstimatesTheCorrelationOfAll) {
  // 32 x 32 counts all pairs, 33 x 33 a sample; the curves are nearly the same.
  EXPECT_NEAR(of("snake", {0, 32, 32}).distance_correlation, of("snake", {0, 33, 33}).distance_correlation, 0.01);
  EXPECT_NEAR(of("random:1", {0, 200, 200}).distance_correlation, 0, 0.01);
  EXPECT_EQ(of("peano", {0, 50, 50}).distance_correlation, of("peano", {0, 50, 50}).distance_correlation);
}

TEST(Locality, EveryCurveBeatsARandomOrder) {
  const Grid grid = {0, 14, 14};
  const Locality random = of("random:1", grid);
  for (const Curve& curve : parse_curves("violin,z,z_T")) {
    const Locality found = locality(*ranks(curve, grid), grid);
    EXPECT_LT(found.mean_neighbour_distance, random.mean_neighbour_distance / 4) << curve.name();
    EXPECT_GT(found.distance_correlation, random.distance_correlation + 0.4) << curve.name();
  }
}

TEST(Locality, OfRanksThatRepeatOverFramesCountsTheStepsOfOne) {
  const Locality frame = of("hilbert", {0, 12, 15});
  const Locality found = of("frame:hilbert", {4, 12, 15});
  EXPECT_EQ(found.unit_steps, frame.unit_steps);
  EXPECT_EQ(found.diagonal_steps, 1);
  EXPECT_LT(found.mean_neighbour_distance, frame.mean_neighbour_distance) << "the next frame is at distance 0";
}

TEST(Locality, RefusesRanksThatDoNotFit) {
  EXPECT_TRUE(contains(refusal([] { locality(Ranks{0, 1, 2}, {0, 2, 2}); }), "3 ranks do not fit grid 2x2"));
  EXPECT_TRUE(contains(refusal([] { locality(Ranks{0, 1, 1, 2}, {0, 2, 2}); }), "not a permutation"));
}

}  // namespace
}  // namespace violin::curves
