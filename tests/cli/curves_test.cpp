#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/cli/process.h"
#include "tests/temporary_folder.h"
#include "violin/data/image.h"

namespace violin {
namespace {

using nlohmann::json;
using Ranks = std::vector<int>;

std::string text_of(const std::string& path) {
  const Bytes bytes = read_file(path, 1 << 28);
  return {bytes.begin(), bytes.end()};
}

TEST(Curves, PrintsOneJsonDocumentWithTheRanksOfEveryCell) {
  const Outcome outcome = run_violin({"curves", "--grid", "2x3", "--curve", "snake", "--curve", "z_T", "--json"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(outcome.out, "{\"grid\":[2,3],\"curves\":{\"snake\":[0,1,2,5,4,3],\"z_T\":[0,2,4,1,3,5]}}\n");
}

TEST(Curves, TakesTheEightByDefaultInTheirOrder) {
  const Outcome outcome = run_violin({"curves", "--json"});
  const auto document = nlohmann::ordered_json::parse(outcome.out);
  EXPECT_EQ(document["grid"], json({14, 14}));
  std::vector<std::string> names;
  for (const auto& [name, ranks] : document["curves"].items()) {
    names.push_back(name);
    Ranks sorted = ranks.get<Ranks>();
    std::sort(sorted.begin(), sorted.end());
    ASSERT_EQ(sorted.size(), 196U);
    for (int i = 0; i < 196; ++i) EXPECT_EQ(sorted[static_cast<std::size_t>(i)], i);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"snake", "snake_T", "hilbert", "hilbert_T", "peano", "peano_T", "zigzag",
                                             "zigzag_T"}));
}

TEST(Curves, EqualsStoredValues) {
  const json golden = json::parse(text_of(VIOLIN_GOLDEN_DIR "/curves/grid_14x10.json"));
  const json document = json::parse(run_violin({"curves", "--grid", "14x10", "--json"}).out);
  for (const auto& [name, ranks] : document["curves"].items()) EXPECT_EQ(ranks, golden["rank"][name]) << name;
}

TEST(Curves, JoinsSetAndCurvesAndKeepsTheNamesThatWereAskedFor) {
  const Outcome outcome = run_violin({"curves", "--grid", "2x2", "--set", "normal", "--curve", "z", "--curve", "snake",
                                      "--curve", "morton_T", "--json"});
  const auto document = nlohmann::ordered_json::parse(outcome.out);
  std::vector<std::string> names;
  for (const auto& [name, ranks] : document["curves"].items()) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"snake", "hilbert", "peano", "zigzag", "z", "morton_T"}));
}

TEST(Curves, GivesManhattanAnAxisPerDimension) {
  const json flat = json::parse(run_violin({"curves", "--grid", "2x2", "--curve", "manhattan", "--json"}).out);
  EXPECT_EQ(flat["curves"]["manhattan"], json::parse("[[0,0,1,1],[0,1,0,1]]"));
  const json deep = json::parse(run_violin({"curves", "--grid", "2x1x2", "--curve", "manhattan", "--json"}).out);
  EXPECT_EQ(deep["grid"], json({2, 1, 2}));
  EXPECT_EQ(deep["curves"]["manhattan"].size(), 3U);
}

TEST(Curves, DrawsSmallGridsAndGivesStatistics) {
  const Outcome outcome = run_violin({"curves", "--grid", "3x3", "--curve", "snake", "--curve", "manhattan"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_NE(outcome.out.find("●───┐\n┌───┘\n└───○\n"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("correlation"), std::string::npos);
  EXPECT_NE(outcome.out.find("\nmanhattan "), std::string::npos);
}

TEST(Curves, SummarisesLargeGrids) {
  const Outcome outcome = run_violin({"curves", "--grid", "100x200"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out.find("●"), std::string::npos);
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 9);
}

TEST(Curves, DrawsVolumesByDefaultToo) {
  const Outcome outcome = run_violin({"curves", "--grid", "2x4x4"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_NE(outcome.out.find("frame:zigzag_T"), std::string::npos);
}

TEST(Curves, WritesPicturesThatCanBeRead) {
  const TemporaryFolder folder;
  Image photo(60, 40);
  std::fill(photo.pixels.begin(), photo.pixels.end(), 120);
  write_file_atomically(folder.path() / "photo.jpg", encode_png(photo));  // the name does not matter
  for (const std::string mode : {"plain", "flatten"}) {
    std::vector<std::string> arguments = {"curves",
                                          "--grid",
                                          "5x7",
                                          "--image",
                                          folder.file("photo.jpg"),
                                          "--svg",
                                          folder.file("a.svg"),
                                          "--png",
                                          folder.file("a.png"),
                                          "--scale",
                                          "1"};
    if (mode == "flatten") arguments.push_back("--flatten");
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_NE(outcome.out.find("correlation"), std::string::npos);
    EXPECT_NE(outcome.err.find("wrote " + folder.file("a.png")), std::string::npos);
    const std::string svg = text_of(folder.file("a.svg"));
    EXPECT_TRUE(svg.starts_with("<svg "));
    EXPECT_NE(svg.find(">hilbert_T</text>"), std::string::npos);
    EXPECT_NE(svg.find("data:image/png;base64,"), std::string::npos);
    const Image png = load_image(folder.file("a.png"));
    EXPECT_GT(png.width, 300);
  }
  EXPECT_EQ(folder.entries(), 3U);
}

TEST(Curves, ScalesThePng) {
  const TemporaryFolder folder;
  run_violin({"curves", "--grid", "4x4", "--curve", "z", "--png", folder.file("1.png"), "--scale", "1"});
  run_violin({"curves", "--grid", "4x4", "--curve", "z", "--png", folder.file("2.png")});
  EXPECT_EQ(load_image(folder.file("2.png")).width, 2 * load_image(folder.file("1.png")).width);
}

}  // namespace
}  // namespace violin
