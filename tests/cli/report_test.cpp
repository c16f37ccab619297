// violin report, as a user runs it.
#include <nlohmann/json.hpp>

#include "tests/cli/process.h"
#include "tests/train/helpers.h"
#include "violin/data/file.h"

namespace violin {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kHostileClass = "<img src=x onerror=alert(1)>";

std::string text_of(const fs::path& path) {
  const Bytes bytes = read_file(path, 16 << 20);
  return {bytes.begin(), bytes.end()};
}

class ReportCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    tests::write_images(path("data/train"), 3, 8);
    tests::write_images(path("data/test"), 3, 2, 16, 100);
    for (const char* part : {"data/train", "data/test"}) fs::rename(path(part) / "class_1", path(part) / kHostileClass);
    write_file_atomically(path("model.json"),
                          std::string(R"({"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2,
                              "class_token": false, "global_pool": "avg", "fc_norm": false, "violin": {}})"));
  }
  fs::path path(const std::string& name) const { return folder_.path() / name; }
  void train(const std::string& run, const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"train",
                                          "--data",
                                          path("data").string(),
                                          "--config",
                                          path("model.json").string(),
                                          "--out",
                                          path(run).string(),
                                          "--epochs",
                                          "2",
                                          "--batch-size",
                                          "7",
                                          "--threads",
                                          "1",
                                          "--workers",
                                          "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = run_violin(arguments);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  static void expect_harmless(const std::string& html) {
    EXPECT_LT(html.size(), 5'000'000U);
    for (const char* part : {"http:", "https:", "<script", "<link", kHostileClass})
      EXPECT_EQ(html.find(part), std::string::npos) << part;
    EXPECT_NE(html.find("&lt;img src=x"), std::string::npos);
  }
  TemporaryFolder folder_;
};

TEST_F(ReportCommand, WritesThePageOfARunIntoIt) {
  train("run", {});
  const Outcome written = run_violin({"report", path("run").string(), "--json"});
  ASSERT_EQ(written.code, 0) << written.err;
  const json result = json::parse(written.out);
  EXPECT_EQ(result.at("report"), path("run/report.html").string());
  EXPECT_EQ(result.at("bytes"), fs::file_size(path("run/report.html")));
  const std::string html = text_of(path("run/report.html"));
  expect_harmless(html);
  for (const char* part : {"Configuration", "Learning rate", "What the mask learned", "The mask around three patches",
                           "Confusion", "The curves", "On 6 images of test"})
    EXPECT_NE(html.find(part), std::string::npos) << part;

  // An unfinished run whose images are gone still has a page, which says so.
  fs::remove(path("run/result.json"));
  fs::rename(path("data"), path("elsewhere"));
  ASSERT_EQ(run_violin({"report", path("run").string(), "--out", path("other.html").string()}).code, 0);
  const std::string partial = text_of(path("other.html"));
  EXPECT_NE(partial.find("has not finished"), std::string::npos);
  EXPECT_NE(partial.find("No predictions"), std::string::npos);
  EXPECT_EQ(partial.find("Surest and right"), std::string::npos);
}

TEST_F(ReportCommand, ComparesRunsOverSeeds) {
  for (const char* seed : {"0", "1"}) {
    train(std::string("violin-") + seed, {"--seed", seed});
    train(std::string("vanilla-") + seed, {"--seed", seed, "--no-violin"});
  }
  const std::vector<std::string> runs = {path("violin-0").string(), path("vanilla-0").string(),
                                         path("violin-1").string(), path("vanilla-1").string()};
  std::vector<std::string> arguments = {"report", "--out", path("compare.html").string(), "--json"};
  arguments.insert(arguments.end(), runs.begin(), runs.end());
  const Outcome written = run_violin(arguments);
  ASSERT_EQ(written.code, 0) << written.err;
  const json groups = json::parse(written.out).at("groups");
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].at("name"), "violin");
  EXPECT_EQ(groups[0].at("test_top1").at("seeds"), 2);
  EXPECT_EQ(groups[0].at("difference").at("seeds"), 2);
  EXPECT_EQ(groups[1].at("name"), "vanilla");
  EXPECT_TRUE(groups[1].at("reference").get<bool>());
  EXPECT_NEAR(groups[0].at("difference").at("mean").get<double>(),
              groups[0].at("test_top1").at("mean").get<double>() - groups[1].at("test_top1").at("mean").get<double>(),
              1e-9);
  const std::string html = text_of(path("compare.html"));
  expect_harmless(html);
  for (const char* part : {"Side by side", "against vanilla", "The same images", "What the masks learned"})
    EXPECT_NE(html.find(part), std::string::npos) << part;
}

TEST_F(ReportCommand, NamesAFolderThatIsNoRun) {
  const Outcome failed = run_violin({"report", path("data").string()});
  EXPECT_EQ(failed.code, 1);
  EXPECT_NE(failed.err.find("holds no run"), std::string::npos) << failed.err;
  EXPECT_EQ(run_violin({"report"}).code, 2);
}

}  // namespace
}  // namespace violin
