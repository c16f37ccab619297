// What holds of the curves on every T x H x W.
#include <gtest/gtest.h>

#include <array>

#include "tests/curves/helpers.h"

namespace violin::curves {
namespace {

const std::vector<Curve>& volume_curves() {
  static const std::vector<Curve> curves = parse_curves("z,z_T,snake,snake_T,hilbert,hilbert_T,peano,peano_T,random:3");
  return curves;
}

std::vector<Grid> volumes(std::int64_t low, std::int64_t high) {
  std::vector<Grid> grids;
  for (std::int64_t frames = low; frames <= high; ++frames) {
    for (std::int64_t height = low; height <= high; ++height) {
      for (std::int64_t width = low; width <= high; ++width) grids.push_back({frames, height, width});
    }
  }
  return grids;
}

// Bits of the column lowest, then the row's, then the frame's.
std::uint64_t interleaved(const Grid& grid, std::int64_t cell) {
  const std::array<std::int64_t, 3> position = {cell % grid.width, cell / grid.width % grid.height,
                                                cell / (grid.height * grid.width)};
  std::uint64_t key = 0;
  for (unsigned bit = 0; bit < 20; ++bit) {
    for (unsigned axis = 0; axis < 3; ++axis) {
      key |= (static_cast<std::uint64_t>(position[axis]) >> bit & 1U) << (3 * bit + axis);
    }
  }
  return key;
}

TEST(VolumeCurves, VisitEveryCellOnceOnEveryGridUpTo7x7x7) {
  for (const Grid& grid : volumes(1, 7)) {
    for (const Curve& curve : volume_curves()) {
      const auto found = ranks(curve, grid);
      ASSERT_EQ(found->size(), static_cast<std::size_t>(grid.cells()));
      ASSERT_TRUE(is_permutation(*found)) << curve.name() << " on " << grid.to_string();
    }
  }
}

TEST(VolumeCurves, VisitEveryCellOnceOnLargerGrids) {
  auto grids = some_grids(true, 1, 70, 16);
  grids.push_back({1'000'000, 1, 1});
  grids.push_back({2, 300'000, 2});
  grids.push_back({3, 3, 100'001});
  for (const Grid& grid : grids) {
    for (const Curve& curve : volume_curves()) {
      ASSERT_TRUE(is_permutation(*ranks(curve, grid))) << curve.name() << " on " << grid.to_string();
    }
  }
}

TEST(VolumeCurves, TheTransposedCurveHasItsAxesReversed) {
  for (const Grid& grid : volumes(1, 6)) {
    const Grid reversed = {grid.width, grid.height, grid.frames};
    for (const Curve& curve : parse_curves("z,snake,hilbert,peano")) {
      Curve transposed = curve;
      transposed.transposed = true;
      const auto expected = ranks(curve, reversed);
      const auto found = ranks(transposed, grid);
      for (std::int64_t cell = 0; cell < grid.cells(); ++cell) {
        const std::int64_t t = cell / (grid.height * grid.width);
        const std::int64_t r = cell / grid.width % grid.height;
        const std::int64_t c = cell % grid.width;
        ASSERT_EQ(found->at(static_cast<std::size_t>(cell)),
                  expected->at(static_cast<std::size_t>((c * grid.height + r) * grid.frames + t)))
            << curve.name() << " on " << grid.to_string();
      }
    }
  }
}

TEST(VolumeCurves, OneFrameHasTheCurveOfThePlane) {
  for (const Grid& volume : volumes(1, 9)) {
    if (volume.frames != 1) continue;
    const Grid plane = {0, volume.height, volume.width};
    for (const Curve& curve : volume_curves()) {
      EXPECT_EQ(*ranks(curve, volume), *ranks(curve, plane)) << curve.name() << " on " << plane.to_string();
    }
  }
}

TEST(VolumeCurves, FramesOfOneRowOrColumnHaveTheHilbertCurveOfThePlane) {
  const auto plane = ranks(parse_curve("hilbert"), {0, 6, 9});
  EXPECT_EQ(*ranks(parse_curve("hilbert"), {6, 1, 9}), *plane);
  EXPECT_EQ(*ranks(parse_curve("hilbert"), {6, 9, 1}), *plane);
}

TEST(VolumeCurves, PerFrameRanksAreTheSameInEveryFrame) {
  const Grid grid = {3, 5, 4};
  for (const Curve& curve : parse_curves("violin,z,random:5")) {
    const auto plane = ranks(curve, {0, 5, 4});
    Curve repeated = curve;
    repeated.per_frame = true;
    const auto found = ranks(repeated, grid);
    ASSERT_EQ(found->size(), 60U);
    for (std::size_t cell = 0; cell < found->size(); ++cell) EXPECT_EQ(found->at(cell), plane->at(cell % 20));
    EXPECT_EQ(*ranks(repeated, {0, 5, 4}), *plane) << "a plane is one frame";
  }
}

TEST(VolumeCurves, ZigzagExistsPerFrameOnly) {
  const std::string message = refusal([] { ranks(parse_curve("zigzag_T"), {2, 3, 4}); });
  EXPECT_TRUE(contains(message, "2x3x4")) << message;
  EXPECT_TRUE(contains(message, "use frame:zigzag_T")) << message;
  EXPECT_NO_THROW(ranks(parse_curve("frame:zigzag_T"), {2, 3, 4}));
}

TEST(VolumeSnake, TakesUnitStepsOnly) {
  for (const Grid& grid : volumes(1, 7)) {
    for (const Curve& curve : parse_curves("snake,snake_T")) {
      EXPECT_EQ(count_of_longer_steps(*ranks(curve, grid), grid), 0) << curve.name() << " on " << grid.to_string();
    }
  }
}

TEST(VolumeHilbert, TakesUnitStepsOnlyWhateverTheSides) {
  auto grids = volumes(2, 13);
  for (const Grid& grid : some_grids(true, 2, 64, 40)) grids.push_back(grid);
  grids.push_back({2, 3, 50'001});
  grids.push_back({30'001, 5, 2});
  for (const Grid& grid : grids) {
    const auto found = ranks(parse_curve("hilbert"), grid);
    ASSERT_EQ(count_of_longer_steps(*found, grid), 0) << grid.to_string();
  }
}

TEST(VolumeHilbert, RunsFromTheFirstCellToTheEndOfAnEdge) {
  for (const Grid& grid : volumes(2, 9)) {
    const auto cells = order(*ranks(parse_curve("hilbert"), grid));
    EXPECT_EQ(cells.front(), 0);
    const std::int64_t plane = grid.height * grid.width;
    const std::vector<std::int64_t> ends = {grid.width - 1, plane - grid.width, grid.cells() - plane};
    EXPECT_TRUE(std::ranges::count(ends, cells.back()) > 0) << grid.to_string() << " ends at " << cells.back();
  }
}

TEST(VolumeHilbert, LeavesAnOctantOnlyWhenItIsFinished) {
  const Grid grid = {16, 16, 16};
  const auto found = ranks(parse_curve("hilbert"), grid);
  for (const std::int64_t side : {2, 4, 8}) {
    for (std::int64_t cell = 0; cell < grid.cells(); ++cell) {
      const std::int64_t t = cell / 256 / side * side;
      const std::int64_t r = cell / 16 % 16 / side * side;
      const std::int64_t c = cell % 16 / side * side;
      const std::int64_t octant = side * side * side;
      ASSERT_EQ(found->at(static_cast<std::size_t>(cell)) / octant,
                found->at(static_cast<std::size_t>(t * 256 + r * 16 + c)) / octant);
    }
  }
}

TEST(VolumeMorton, SortsCellsByInterleavedBits) {
  for (const Grid& grid : some_grids(true, 1, 20, 30)) {
    const auto cells = order(*ranks(parse_curve("peano"), grid));
    for (std::size_t i = 1; i < cells.size(); ++i) {
      ASSERT_LT(interleaved(grid, cells[i - 1]), interleaved(grid, cells[i])) << grid.to_string();
    }
  }
}

}  // namespace
}  // namespace violin::curves
