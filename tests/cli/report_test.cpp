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
    write_data("data");
    write_file_atomically(path("model.json"),
                          std::string(R"({"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2,
                              "class_token": false, "global_pool": "avg", "fc_norm": false, "violin": {}})"));
  }
  fs::path path(const std::string& name) const { return folder_.path() / name; }
  // Images of another size are other images with the same names.
  void write_data(const std::string& name, std::int64_t size = 16) const {
    tests::write_images(path(name) / "train", 3, 8, size);
    tests::write_images(path(name) / "test", 3, 2, size, 100);
    for (const char* part : {"train", "test"})
      fs::rename(path(name) / part / "class_1", path(name) / part / kHostileClass);
  }
  void train(const std::string& run, const std::vector<std::string>& more, const std::string& data = "data") const {
    std::vector<std::string> arguments = {"train",
                                          "--data",
                                          path(data).string(),
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
  // The groups of a report on these runs; what was noted goes to notes_.
  json compare(const std::vector<std::string>& runs) {
    std::vector<std::string> arguments = {"report",    "--out", path("compare.html").string(), "--json", "--no-images",
                                          "--threads", "1"};
    for (const std::string& run : runs) arguments.push_back(path(run).string());
    const Outcome written = run_violin(arguments);
    EXPECT_EQ(written.code, 0) << written.err;
    notes_ = written.err;
    return json::parse(written.out).at("groups");
  }
  static void expect_harmless(const std::string& html) {
    EXPECT_LT(html.size(), 5'000'000U);
    for (const char* part : {"http:", "https:", "<script", "<link", kHostileClass})
      EXPECT_EQ(html.find(part), std::string::npos) << part;
    EXPECT_NE(html.find("&lt;img src=x"), std::string::npos);
  }
  TemporaryFolder folder_;
  std::string notes_;
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

TEST_F(ReportCommand, OtherImagesAreNoOtherSeed) {
  write_data("larger", 20);
  train("run-0", {"--seed", "0"});
  train("run-1", {"--seed", "1"}, "larger");
  const json groups = compare({"run-0", "run-1"});
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].at("seeds"), 1);
  EXPECT_FALSE(groups[0].at("other_images").get<bool>());
  EXPECT_TRUE(groups[1].at("other_images").get<bool>());
  EXPECT_TRUE(groups[1].at("difference").is_null());
  EXPECT_NE(notes_.find("measured on other test images"), std::string::npos) << notes_;
  EXPECT_NE(text_of(path("compare.html")).find("measured on other test images"), std::string::npos);
}

TEST_F(ReportCommand, OtherWeightsToStartFromAreNoOtherSeed) {
  train("run-0", {"--seed", "0"});
  train("run-1", {"--seed", "1"});
  train("again-0", {"--seed", "0", "--weights", path("run-0").string()});
  train("again-1", {"--seed", "1", "--weights", path("run-1").string()});
  train("again-2", {"--seed", "2", "--weights", path("run-1").string()});
  const json groups = compare({"again-0", "again-1", "again-2"});
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].at("seeds"), 1);
  EXPECT_EQ(groups[1].at("seeds"), 2);
}

TEST_F(ReportCommand, WhatASeedHeldOutIsNoOtherData) {
  tests::write_images(path("flat"), 3, 8);
  for (const char* seed : {"0", "1"}) train(std::string("run-") + seed, {"--seed", seed}, "flat");
  const auto seeds = [&] {
    const json groups = compare({"run-0", "run-1"});
    return groups.size() == 1 ? groups[0].at("seeds").get<int>() : 0;
  };
  EXPECT_EQ(seeds(), 2);
  fs::rename(path("flat"), path("elsewhere"));  // then their path says it
  EXPECT_EQ(seeds(), 2);
  EXPECT_NE(text_of(path("compare.html")).find("told from others by their path alone"), std::string::npos);
}

TEST_F(ReportCommand, RatesThatASearchChoseMakeNoOtherConfiguration) {
  train("a", {"--seed", "0", "--lr", "1e-3"});
  train("b", {"--seed", "1", "--lr", "5e-4"});
  EXPECT_EQ(compare({"a", "b"}).size(), 2U);
  for (const char* run : {"a", "b"}) {
    json config = json::parse(text_of(path(run) / "config.json"));
    config["lr_search"] = true;
    write_file_atomically(path(run) / "config.json", config.dump());
  }
  const json groups = compare({"a", "b"});
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups.at(0).at("seeds"), 2);
}

TEST_F(ReportCommand, StatisticsThatWereMeasuredMakeNoOtherConfiguration) {
  for (const char* seed : {"0", "1"}) train(std::string("measured-") + seed, {"--seed", seed, "--statistics", "data"});
  train("given", {"--seed", "2", "--statistics", "0.5,0.5,0.5:0.2,0.2,0.2"});
  // Of more images than are measured, each seed measures others.
  const fs::path config = path("measured-1/config.json");
  json other = json::parse(text_of(config));
  other.at("preprocessing").at("mean") = {0.4, 0.5, 0.6};
  other.at("preprocessing").at("std") = {0.1, 0.2, 0.3};
  write_file_atomically(config, other.dump());
  const json groups = compare({"measured-0", "measured-1", "given"});
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups.at(0).at("seeds"), 2);
  EXPECT_EQ(groups.at(1).at("seeds"), 1);
}

TEST_F(ReportCommand, ARunCountsOnce) {
  train("run-0", {"--seed", "0"});
  train("run-1", {"--seed", "1"});
  json groups = compare({"run-0", "run-1", "run-0/"});
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups[0].at("runs").size(), 2U);
  EXPECT_NE(notes_.find("given twice and counts once"), std::string::npos) << notes_;
  fs::copy(path("run-1"), path("run-2"), fs::copy_options::recursive);
  groups = compare({"run-0", "run-1", "run-2"});
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups[0].at("runs").size(), 3U);
  EXPECT_EQ(groups[0].at("seeds"), 2);
  EXPECT_EQ(groups[0].at("test_top1").at("seeds"), 2);
  EXPECT_NE(notes_.find("3 runs have 2 different seeds"), std::string::npos) << notes_;
}

TEST_F(ReportCommand, UnreadableImagesLeaveAPage) {
  train("run", {});
  std::vector<fs::path> images;
  for (const fs::directory_entry& file : fs::recursive_directory_iterator(path("data/test")))
    if (file.is_regular_file()) images.push_back(file.path());
  ASSERT_EQ(images.size(), 6U);
  const auto page = [&] {
    const Outcome written = run_violin({"report", path("run").string()});
    EXPECT_EQ(written.code, 0) << written.err;
    notes_ = written.err;
    return text_of(path("run/report.html"));
  };
  fs::resize_file(images[0], 0);
  const std::string some = page();
  EXPECT_NE(some.find("1 image of test could not be read"), std::string::npos);
  EXPECT_NE(notes_.find("skipped 1 bad image\n"), std::string::npos) << notes_;
  EXPECT_NE(some.find("On 5 images of test"), std::string::npos);
  for (const fs::path& image : images) fs::resize_file(image, 0);
  const std::string none = page();
  for (const auto& [said, reason] : {std::pair{&none, "No predictions: none of"}, {&notes_, "no predictions: none of"}})
    EXPECT_NE(said->find(std::string(reason) + " the 6 images of test could be read"), std::string::npos) << *said;
  EXPECT_NE(none.find("Learning rate"), std::string::npos);
}

TEST_F(ReportCommand, NamesAFolderThatIsNoRun) {
  const Outcome failed = run_violin({"report", path("data").string()});
  EXPECT_EQ(failed.code, 1);
  EXPECT_NE(failed.err.find("holds no run"), std::string::npos) << failed.err;
  EXPECT_EQ(run_violin({"report"}).code, 2);
}

}  // namespace
}  // namespace violin
