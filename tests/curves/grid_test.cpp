#include <gtest/gtest.h>

#include "tests/curves/helpers.h"

namespace violin::curves {
namespace {

TEST(Grid, IsReadFromText) {
  EXPECT_EQ(parse_grid("14x10"), (Grid{0, 14, 10}));
  EXPECT_EQ(parse_grid("8x14x10"), (Grid{8, 14, 10}));
  EXPECT_EQ(parse_grid("1x1"), (Grid{0, 1, 1}));
  EXPECT_EQ(parse_grid("1x1x1"), (Grid{1, 1, 1}));
  EXPECT_EQ(parse_grid("007x2"), (Grid{0, 7, 2}));
  EXPECT_EQ(parse_grid("8192x8192").cells(), kMaxCells);
}

TEST(Grid, IsWrittenAsItIsRead) {
  for (const char* text : {"14x10", "8x14x10", "1x5x5"}) EXPECT_EQ(parse_grid(text).to_string(), text);
}

TEST(Grid, OneFrameIsAVolumeAndAPlaneIsNot) {
  EXPECT_TRUE(parse_grid("1x4x4").is_3d());
  EXPECT_FALSE(parse_grid("4x4").is_3d());
  EXPECT_EQ(parse_grid("1x4x4").cells(), parse_grid("4x4").cells());
}

TEST(Grid, MalformedTextIsRefused) {
  for (const char* text : {"",     "x",    "5",    "3x",  "x3",   "axb",  "3xb",  "1x2x3x4", "3x4x",  "3xx4",
                           " 3x4", "3x4 ", "3 x4", "3X4", "-3x4", "+3x4", "3x-4", "3.5x4",   "0x10x", "3,4"}) {
    const std::string message = refusal([&] { parse_grid(text); });
    EXPECT_TRUE(contains(message, "HxW") || contains(message, "at least 1")) << text << ": " << message;
    EXPECT_TRUE(contains(message, "'" + std::string(text) + "'")) << message;
  }
}

TEST(Grid, SidesOfZeroAreRefused) {
  for (const char* text : {"0x5", "5x0", "0x5x5", "5x0x5", "5x5x0", "00x5"}) {
    EXPECT_TRUE(contains(refusal([&] { parse_grid(text); }), "every side must be at least 1")) << text;
  }
}

TEST(Grid, OverlargeOnesAreRefusedAndTheLimitIsNamed) {
  for (const char* text : {"8193x8192", "67108865x1", "1x67108865", "4x4611686018427387905", "2x9223372036854775807",
                           "500x500x500", "4294967296x4294967296", "9223372036854775807x9223372036854775807",
                           "9223372036854775808x1", "99999999999999999999999999x2", "2x99999999999999999999999999"}) {
    EXPECT_TRUE(contains(refusal([&] { parse_grid(text); }), "the limit is 67108864 cells")) << text;
  }
}

TEST(Grid, IsCheckedWhereverItComesFrom) {
  const Curve curve = parse_curve("z");
  for (const Grid& grid : {Grid{0, 0, 0}, Grid{0, -1, 5}, Grid{-1, 5, 5}, Grid{0, std::int64_t{1} << 40, 1 << 30}}) {
    EXPECT_NE(refusal([&] { ranks(curve, grid); }), "") << grid.to_string();
    EXPECT_NE(refusal([&] { coordinates(std::span(&curve, 1), grid); }), "") << grid.to_string();
    EXPECT_NE(refusal([&] { locality({}, grid); }), "") << grid.to_string();
  }
}

}  // namespace
}  // namespace violin::curves
