#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/cli/process.h"
#include "tests/temporary_folder.h"
#include "violin/data/image.h"

namespace violin {
namespace {

using nlohmann::json;

TEST(Mask, PrintsTheDecayAroundEachCell) {
  const Outcome outcome =
      run_violin({"mask", "--grid", "2x3", "--set", "snake,z", "--gamma", "0.5", "--at", "0,2", "--json"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  const json document = json::parse(outcome.out);
  EXPECT_EQ(document["grid"], json({2, 3}));
  ASSERT_EQ(document["masks"].size(), 1U);
  const json& mask = document["masks"][0];
  EXPECT_EQ(mask["gamma"], 0.5);
  EXPECT_EQ(mask["at"], json({0, 2}));
  const std::vector<int> snake = {2, 1, 0, 1, 2, 3};  // steps from the corner
  const std::vector<int> z = {2, 1, 0, 1, 2, 3};
  const std::vector<int> snake_by_cell = {snake[0], snake[1], snake[2], 3, 2, 1};
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_NEAR(mask["curves"]["snake"][i].get<double>(), std::pow(0.5, snake_by_cell[i]), 1e-12) << i;
    EXPECT_NEAR(mask["curves"]["z"][i].get<double>(), std::pow(0.5, z[i]), 1e-12) << i;
    EXPECT_NEAR(mask["mean"][i].get<double>(), (std::pow(0.5, snake_by_cell[i]) + std::pow(0.5, z[i])) / 2, 1e-12) << i;
  }
}

TEST(Mask, SweepsGammasAndTakesCornersAndMiddleByDefault) {
  const Outcome outcome = run_violin({"mask", "--grid", "4x6", "--gamma", "0.9", "--gamma", "1", "--json"});
  const json document = json::parse(outcome.out);
  ASSERT_EQ(document["masks"].size(), 6U);
  EXPECT_EQ(document["masks"][0]["at"], json({0, 0}));
  EXPECT_EQ(document["masks"][1]["at"], json({2, 3}));
  EXPECT_EQ(document["masks"][2]["at"], json({3, 5}));
  EXPECT_EQ(document["masks"][0]["curves"].size(), 8U);
  for (const json& value : document["masks"][3]["mean"]) EXPECT_EQ(value, 1.0);
  EXPECT_EQ(json::parse(run_violin({"mask", "--grid", "1x1", "--json"}).out)["masks"].size(), 1U);
}

TEST(Mask, CountsFramesFirst) {
  const Outcome outcome =
      run_violin({"mask", "--grid", "2x3x4", "--curve", "z", "--at", "1,2,3", "--gamma", "0.9", "--json"});
  const json mask = json::parse(outcome.out)["masks"][0];
  EXPECT_EQ(mask["at"], json({1, 2, 3}));
  EXPECT_EQ(mask["curves"]["z"][23], 1.0);
  EXPECT_NEAR(mask["curves"]["z"][0].get<double>(), std::pow(0.9, 23), 1e-12);
}

TEST(Mask, ShowsHeatMapsAndNumbersInTheTerminal) {
  const Outcome outcome = run_violin({"mask", "--grid", "4x4", "--curve", "hilbert", "--at", "1,1", "--gamma", "0.7"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_NE(outcome.out.find("gamma 0.7, around 1,1\n"), std::string::npos);
  EXPECT_NE(outcome.out.find("[]"), std::string::npos);
  EXPECT_NE(outcome.out.find("▓▓"), std::string::npos);
  EXPECT_EQ(outcome.out.find('\x1b'), std::string::npos);
  EXPECT_EQ(run_violin({"mask", "--grid", "60x60", "--at", "1,1"}).out.find("[]"), std::string::npos);
}

TEST(Mask, WritesPicturesThatCanBeRead) {
  const TemporaryFolder folder;
  const Outcome outcome =
      run_violin({"mask", "--grid", "14x14", "--set", "violin", "--gamma", "0.98", "--at", "0,0", "--at", "7,7", "--at",
                  "13,13", "--png", folder.file("mask.png"), "--svg", folder.file("mask.svg")});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_GT(load_image(folder.file("mask.png")).width, 1000);
  EXPECT_EQ(folder.entries(), 2U);
}

}  // namespace
}  // namespace violin
