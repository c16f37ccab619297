// What holds of the curves on every H x W.
#include <gtest/gtest.h>

#include <array>

#include "tests/curves/helpers.h"

namespace violin::curves {
namespace {

const std::vector<Curve>& plane_curves() {
  static const std::vector<Curve> curves = parse_curves("violin,z,z_T,random,random:7");
  return curves;
}

std::vector<Grid> grids_up_to(std::int64_t side) {
  std::vector<Grid> grids;
  for (std::int64_t height = 1; height <= side; ++height) {
    for (std::int64_t width = 1; width <= side; ++width) grids.push_back({0, height, width});
  }
  return grids;
}

// Bit 2i of the number is bit i of the column, bit 2i+1 bit i of the row.
std::uint64_t interleaved(std::int64_t row, std::int64_t column) {
  std::uint64_t key = 0;
  for (unsigned bit = 0; bit < 20; ++bit) {
    key |= (static_cast<std::uint64_t>(column) >> bit & 1U) << (2 * bit);
    key |= (static_cast<std::uint64_t>(row) >> bit & 1U) << (2 * bit + 1);
  }
  return key;
}

TEST(PlaneCurves, VisitEveryCellOnceOnEveryGridUpTo40x40) {
  for (const Grid& grid : grids_up_to(40)) {
    for (const Curve& curve : plane_curves()) {
      const auto found = ranks(curve, grid);
      ASSERT_EQ(found->size(), static_cast<std::size_t>(grid.cells()));
      ASSERT_TRUE(is_permutation(*found)) << curve.name() << " on " << grid.to_string();
    }
  }
}

TEST(PlaneCurves, VisitEveryCellOnceOnLargerGrids) {
  for (const Grid& grid : some_grids(false, 41, 700, 12)) {
    for (const Curve& curve : plane_curves()) {
      ASSERT_TRUE(is_permutation(*ranks(curve, grid))) << curve.name() << " on " << grid.to_string();
    }
  }
}

TEST(PlaneCurves, VisitEveryCellOnceOnStripsOfAMillion) {
  const std::int64_t million = 1'000'000;
  for (const Grid& grid : {Grid{0, 1, million}, Grid{0, million, 1}, Grid{0, 2, million}, Grid{0, million, 3}}) {
    for (const Curve& curve : plane_curves()) {
      ASSERT_TRUE(is_permutation(*ranks(curve, grid))) << curve.name() << " on " << grid.to_string();
    }
  }
}

TEST(PlaneCurves, OnASingleLineEveryCurveButRandomFollowsIt) {
  for (const Grid& grid : {Grid{0, 1, 1000}, Grid{0, 1000, 1}}) {
    for (const Curve& curve : parse_curves("violin,z,z_T")) {
      const auto found = ranks(curve, grid);
      EXPECT_TRUE(std::ranges::is_sorted(*found)) << curve.name() << " on " << grid.to_string();
    }
  }
}

TEST(PlaneCurves, TheTransposedCurveIsTheCurveOfTheTransposedGrid) {
  for (const Grid& grid : grids_up_to(20)) {
    const Grid flipped = {0, grid.width, grid.height};
    for (const Curve& curve : parse_curves("normal,z")) {
      Curve transposed = curve;
      transposed.transposed = true;
      const auto expected = ranks(curve, flipped);
      const auto found = ranks(transposed, grid);
      for (std::int64_t r = 0; r < grid.height; ++r) {
        for (std::int64_t c = 0; c < grid.width; ++c) {
          ASSERT_EQ(found->at(static_cast<std::size_t>(r * grid.width + c)),
                    expected->at(static_cast<std::size_t>(c * grid.height + r)))
              << curve.name() << " on " << grid.to_string();
        }
      }
    }
  }
}

TEST(PlaneCurves, AllBeginAtTheFirstCell) {
  for (const Grid& grid : grids_up_to(12)) {
    for (const Curve& curve : parse_curves("violin,z,z_T")) EXPECT_EQ(ranks(curve, grid)->front(), 0) << curve.name();
  }
}

TEST(Z, IsTheRowMajorNumber) {
  const auto found = ranks(parse_curve("z"), {0, 7, 5});
  for (std::size_t cell = 0; cell < found->size(); ++cell) EXPECT_EQ(found->at(cell), static_cast<std::int32_t>(cell));
}

TEST(Snake, TakesUnitStepsOnly) {
  for (const Grid& grid : grids_up_to(24)) {
    for (const Curve& curve : parse_curves("snake,snake_T")) {
      EXPECT_EQ(count_of_longer_steps(*ranks(curve, grid), grid), 0) << curve.name() << " on " << grid.to_string();
    }
  }
}

TEST(Hilbert, TakesUnitStepsExceptTheOneDiagonalThatParityForces) {
  auto grids = grids_up_to(40);
  for (const Grid& grid : some_grids(false, 41, 300, 24)) grids.push_back(grid);
  for (const Grid& grid : grids) {
    const std::int64_t longer = std::max(grid.height, grid.width);
    const std::int64_t shorter = std::min(grid.height, grid.width);
    const bool forced = longer % 2 == 1 && shorter % 2 == 0 && shorter > 2;
    for (const Curve& curve : parse_curves("hilbert,hilbert_T")) {
      const auto found = ranks(curve, grid);
      ASSERT_EQ(count_of_longer_steps(*found, grid), forced ? 1 : 0) << curve.name() << " on " << grid.to_string();
    }
  }
  for (const Grid& grid : {Grid{0, 12, 15}, Grid{0, 35, 4}, Grid{0, 100, 101}}) {
    const Locality found = locality(*ranks(parse_curve("hilbert"), grid), grid);
    EXPECT_EQ(found.diagonal_steps, 1) << grid.to_string();
    EXPECT_EQ(found.jumps, 0) << grid.to_string();
  }
}

TEST(Hilbert, EqualsItsTransposeOnEveryRectangleAndOnNoLargerSquare) {
  for (const Grid& grid : grids_up_to(20)) {
    const bool equal = *ranks(parse_curve("hilbert"), grid) == *ranks(parse_curve("hilbert_T"), grid);
    EXPECT_EQ(equal, grid.height != grid.width || grid.height == 1) << grid.to_string();
  }
}

TEST(Hilbert, LeavesAQuadrantOnlyWhenItIsFinished) {
  const Grid grid = {0, 64, 64};
  const auto found = ranks(parse_curve("hilbert"), grid);
  for (const std::int64_t side : {2, 4, 8, 16, 32}) {
    for (std::int64_t r = 0; r < 64; ++r) {
      for (std::int64_t c = 0; c < 64; ++c) {
        const std::int64_t corner = r / side * side * 64 + c / side * side;
        ASSERT_EQ(found->at(static_cast<std::size_t>(r * 64 + c)) / (side * side),
                  found->at(static_cast<std::size_t>(corner)) / (side * side));
      }
    }
  }
}

TEST(Morton, SortsCellsByInterleavedBits) {
  auto grids = some_grids(false, 1, 90, 30);
  grids.push_back({0, 1, 1000});
  grids.push_back({0, 513, 2});
  for (const Grid& grid : grids) {
    const auto cells = order(*ranks(parse_curve("morton"), grid));
    for (std::size_t i = 1; i < cells.size(); ++i) {
      ASSERT_LT(interleaved(cells[i - 1] / grid.width, cells[i - 1] % grid.width),
                interleaved(cells[i] / grid.width, cells[i] % grid.width))
          << grid.to_string();
    }
  }
}

TEST(Zigzag, FinishesAnAntiDiagonalBeforeTheNextAndStaysInTouch) {
  for (const Grid& grid : grids_up_to(16)) {
    const auto cells = order(*ranks(parse_curve("zigzag"), grid));
    for (std::size_t i = 1; i < cells.size(); ++i) {
      const std::int64_t before = cells[i - 1] / grid.width + cells[i - 1] % grid.width;
      const std::int64_t after = cells[i] / grid.width + cells[i] % grid.width;
      ASSERT_TRUE(after == before || after == before + 1) << grid.to_string();
    }
    EXPECT_EQ(locality(*ranks(parse_curve("zigzag"), grid), grid).jumps, 0) << grid.to_string();
  }
}

// Computed by another implementation of the same generator.
TEST(RandomCurve, IsTheSameOnEveryPlatform) {
  const Grid grid = {0, 3, 5};
  EXPECT_EQ(*ranks(parse_curve("random"), grid), (Ranks{12, 10, 1, 9, 2, 5, 13, 4, 6, 3, 8, 11, 0, 14, 7}));
  EXPECT_EQ(*ranks(parse_curve("random:7"), grid), (Ranks{13, 1, 9, 3, 10, 14, 11, 5, 0, 7, 8, 12, 4, 6, 2}));
  EXPECT_EQ(*ranks(parse_curve("random:18446744073709551615"), grid),
            (Ranks{5, 1, 12, 3, 2, 11, 4, 10, 9, 8, 0, 6, 13, 14, 7}));
}

TEST(RandomCurve, PutsEveryCellAtEveryPlaceEquallyOften) {
  std::array<std::array<int, 5>, 5> count = {};
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
    const auto found = ranks({.kind = Kind::kRandom, .seed = seed}, {0, 1, 5});
    for (std::size_t cell = 0; cell < 5; ++cell) ++count[cell][static_cast<std::size_t>(found->at(cell))];
  }
  for (const auto& cell : count) {
    for (const int times : cell) EXPECT_NEAR(times, 1000, 150);  // five standard deviations
  }
}

TEST(Order, IsTheInverseOfTheRanks) {
  for (const Curve& curve : plane_curves()) {
    const auto found = ranks(curve, {0, 13, 9});
    const auto cells = order(*found);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      EXPECT_EQ(found->at(static_cast<std::size_t>(cells[i])), static_cast<std::int32_t>(i)) << curve.name();
    }
    EXPECT_EQ(order(cells), *found) << curve.name();
  }
}

TEST(Order, RefusesWhatIsNoPermutation) {
  EXPECT_TRUE(contains(refusal([] { order(Ranks{0, 2, 2}); }), "2 of cell 2 is taken already"));
  EXPECT_TRUE(contains(refusal([] { order(Ranks{0, 3, 1}); }), "3 of cell 1 is out of range"));
  EXPECT_TRUE(contains(refusal([] { order(Ranks{0, -1, 1}); }), "-1 of cell 1 is out of range"));
}

}  // namespace
}  // namespace violin::curves
