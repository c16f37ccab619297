// Ranks and steps of the eight published curves against stored values, on squares and rectangles.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "violin/curves/curves.h"

namespace violin::curves {
namespace {

std::vector<nlohmann::json> golden_grids() {
  std::vector<nlohmann::json> grids;
  for (const auto& file : std::filesystem::directory_iterator(std::string(VIOLIN_GOLDEN_DIR) + "/curves")) {
    std::ifstream stream(file.path());
    grids.push_back(nlohmann::json::parse(stream));
  }
  return grids;
}

TEST(GoldenCurves, RanksAreEqual) {
  const auto goldens = golden_grids();
  ASSERT_EQ(goldens.size(), 17U);
  for (const auto& golden : goldens) {
    const Grid grid = {0, golden.at("height"), golden.at("width")};
    ASSERT_EQ(golden.at("rank").size(), 8U);
    for (const auto& [name, expected] : golden.at("rank").items()) {
      EXPECT_EQ(*ranks(parse_curve(name), grid), expected.get<Ranks>()) << name << " on " << grid.to_string();
    }
  }
}

TEST(GoldenCurves, StepsAreEqual) {
  for (const auto& golden : golden_grids()) {
    const Grid grid = {0, golden.at("height"), golden.at("width")};
    for (const auto& [name, expected] : golden.at("steps").items()) {
      const Locality found = locality(*ranks(parse_curve(name), grid), grid);
      EXPECT_EQ(found.unit_steps, expected.at("unit")) << name << " on " << grid.to_string();
      EXPECT_EQ(found.diagonal_steps, expected.at("diagonal")) << name << " on " << grid.to_string();
      EXPECT_EQ(found.jumps, expected.at("longer")) << name << " on " << grid.to_string();
    }
  }
}

}  // namespace
}  // namespace violin::curves
