// A mask built on coordinates is the kernel of a metric: its distances obey the axioms, and gamma to the distance is
// positive definite for each curve and so for every mean of them.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/curves/helpers.h"

namespace violin::curves {
namespace {

using Matrix = std::vector<std::vector<double>>;

std::int64_t distance(const Coordinates& whole, std::int64_t curve, std::int64_t i, std::int64_t j) {
  std::int64_t sum = 0;
  for (std::int64_t axis = 0; axis < whole.axes; ++axis) {
    const std::int64_t line = (curve * whole.axes + axis) * whole.tokens;
    sum += std::abs(std::int64_t{whole.values.at(static_cast<std::size_t>(line + i))} -
                    whole.values.at(static_cast<std::size_t>(line + j)));
  }
  return sum;
}

// The mean over all curves of gamma to the distance.
Matrix kernel(const std::vector<Curve>& curves, const Grid& grid, double gamma) {
  const Coordinates whole = coordinates(curves, grid);
  const auto n = static_cast<std::size_t>(whole.tokens);
  Matrix matrix(n, std::vector<double>(n, 0));
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      for (std::int64_t curve = 0; curve < whole.curves; ++curve) {
        const std::int64_t apart = distance(whole, curve, static_cast<std::int64_t>(i), static_cast<std::int64_t>(j));
        matrix[i][j] += std::pow(gamma, static_cast<double>(apart)) / static_cast<double>(whole.curves);
      }
    }
  }
  return matrix;
}

// By Cholesky's factorisation, with `jitter` added to the diagonal.
bool is_positive_definite(Matrix a, double jitter) {
  for (std::size_t k = 0; k < a.size(); ++k) {
    double pivot = a[k][k] + jitter;
    for (std::size_t m = 0; m < k; ++m) pivot -= a[k][m] * a[k][m];
    if (!(pivot > 0)) return false;
    a[k][k] = std::sqrt(pivot);
    for (std::size_t i = k + 1; i < a.size(); ++i) {
      for (std::size_t m = 0; m < k; ++m) a[i][k] -= a[i][m] * a[k][m];
      a[i][k] /= a[k][k];
    }
  }
  return true;
}

TEST(Metric, DistancesObeyTheAxioms) {
  for (const Grid& grid : {Grid{0, 5, 6}, Grid{2, 3, 4}}) {
    const auto curves =
        parse_curves(grid.is_3d() ? "z,snake_T,hilbert,peano,random:1,manhattan" : "violin,z,random:1,manhattan");
    const Coordinates whole = coordinates(curves, grid);
    for (std::int64_t curve = 0; curve < whole.curves; ++curve) {
      for (std::int64_t i = 0; i < whole.tokens; ++i) {
        for (std::int64_t j = 0; j < whole.tokens; ++j) {
          const std::int64_t apart = distance(whole, curve, i, j);
          ASSERT_EQ(apart, distance(whole, curve, j, i));
          ASSERT_EQ(apart == 0, i == j);
          for (std::int64_t k = 0; k < whole.tokens; ++k) {
            ASSERT_LE(apart, distance(whole, curve, i, k) + distance(whole, curve, k, j));
          }
        }
      }
    }
  }
}

TEST(Metric, OfManhattanIsTheSumOfRowAndColumnDifferences) {
  const Coordinates whole = coordinates(parse_curves("z,manhattan"), {0, 4, 7});
  for (std::int64_t i = 0; i < 28; ++i) {
    for (std::int64_t j = 0; j < 28; ++j) {
      EXPECT_EQ(distance(whole, 1, i, j), std::abs(i / 7 - j / 7) + std::abs(i % 7 - j % 7));
    }
  }
}

TEST(Metric, PerFrameCurvesPutOnePositionOfAllFramesAtDistanceZero) {
  const Coordinates whole = coordinates(parse_curves("frame:hilbert,frame:manhattan"), {3, 2, 4});
  for (std::int64_t curve = 0; curve < 2; ++curve) {
    for (std::int64_t i = 0; i < 24; ++i) {
      for (std::int64_t j = 0; j < 24; ++j) EXPECT_EQ(distance(whole, curve, i, j) == 0, i % 8 == j % 8);
    }
  }
}

TEST(Metric, TheKernelOfEveryCurveIsPositiveDefinite) {
  for (const double gamma : {0.1, 0.5, 0.98, 0.999}) {
    for (const Curve& curve : parse_curves("violin,z,random:1,manhattan")) {
      EXPECT_TRUE(is_positive_definite(kernel({curve}, {0, 4, 4}, gamma), 1e-12)) << curve.name() << " " << gamma;
    }
    EXPECT_TRUE(is_positive_definite(kernel(parse_curves("violin"), {0, 4, 4}, gamma), 1e-12)) << gamma;
    EXPECT_TRUE(is_positive_definite(kernel(parse_curves("hilbert,manhattan"), {2, 3, 3}, gamma), 1e-12)) << gamma;
  }
}

// The test above can fail: a kernel of something that is no such metric is not definite.
TEST(Metric, TheTestOfDefinitenessTellsOtherKernelsApart) {
  EXPECT_FALSE(is_positive_definite({{1, 2}, {2, 1}}, 1e-12));
  Matrix wrapped(4, std::vector<double>(4));  // distances on a ring of 4, where opposite cells are 1 apart only
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < 4; ++j) wrapped[i][j] = i == j ? 1 : (i + j) % 2 == 0 ? 0.1 : 0.9;
  }
  EXPECT_FALSE(is_positive_definite(wrapped, 1e-12));
}

}  // namespace
}  // namespace violin::curves
