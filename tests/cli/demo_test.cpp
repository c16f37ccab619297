// violin demo, on images of the test's own.
#include <nlohmann/json.hpp>

#include "tests/cli/process.h"
#include "tests/train/helpers.h"
#include "violin/data/file.h"

namespace violin {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class DemoCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    tests::write_images(path("data/train"), 3, 24, 32);
    tests::write_images(path("data/test"), 3, 4, 32, 100);
  }
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  Outcome demo(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"demo",    "--data", path("data"), "--out", path("tour"), "--epochs", "2",
                                          "--seeds", "3",      "--threads",  "1",     "--workers",  "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_violin(arguments);
  }

  TemporaryFolder folder_;
};

TEST_F(DemoCommand, TrainsEvaluatesPredictsAndReports) {
  // What is no image, or cannot be read, is none of those that are shown.
  write_file_atomically(path("data/test/class_0/z_notes.txt"), std::string("notes"));
  fs::resize_file(path("data/test/class_0/image_103.png"), 0);
  const Outcome outcome = demo();
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* said :
       {"72 images of 3 classes", "vanilla  seed 3: ", "random   seed 3: ", "violin   seed 3: ", "% on 11 images",
        "one in 3 is right by chance", "class_0 (3)", "class_2 (4)", "against vanilla", "Done in"})
    EXPECT_NE(outcome.out.find(said), std::string::npos) << said << outcome.out;
  for (const char* file : {"report.html", "attention.png", "curves.png", "violin-3/best/model.safetensors",
                           "vanilla-3/result.json", "random-3/result.json", "logs/violin-3.log"})
    EXPECT_GT(fs::file_size(path("tour/" + std::string(file))), 0U) << file;
  EXPECT_FALSE(fs::exists(path("tour/logs/violin-3.log.out")));

  // What is there is not replaced unasked.
  const Outcome again = demo();
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("holds a demo already; --force replaces it"), std::string::npos) << again.err;
  const Outcome forced = demo({"--force", "--json"});
  ASSERT_EQ(forced.code, 0) << forced.err;
  const json result = json::parse(forced.out);
  EXPECT_EQ(result.at("groups").size(), 3U);
  EXPECT_EQ(result.at("predictions").size(), 3U);
  EXPECT_EQ(result.at("report"), path("tour/report.html"));
}

TEST_F(DemoCommand, SaysWhatIsWrong) {
  const Outcome nothing = run_violin({"demo", "--data", path("nowhere"), "--out", path("tour")});
  EXPECT_EQ(nothing.code, 1);
  EXPECT_NE(nothing.err.find("no data at"), std::string::npos) << nothing.err;
  const Outcome untested = run_violin({"demo", "--data", path("data/train"), "--out", path("tour")});
  EXPECT_EQ(untested.code, 1);
  EXPECT_NE(untested.err.find("has no test images"), std::string::npos) << untested.err;
  const Outcome inside = run_violin({"demo", "--data", path("data"), "--out", path("data/tour")});
  EXPECT_EQ(inside.code, 1);
  EXPECT_NE(inside.err.find("lies inside of the images' folder"), std::string::npos) << inside.err;
  EXPECT_FALSE(fs::exists(path("data/tour")));
  EXPECT_FALSE(fs::exists(path("tour")));
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{"--epochs", "0"}, {"--seeds", "0,x"}, {"--seeds", "-1"}}) {
    const Outcome outcome = demo(wrong);
    EXPECT_EQ(outcome.code, 2) << wrong[1] << outcome.err;
  }
  // What a verb says of its failure is what the demo says.
  for (const fs::directory_entry& file : fs::recursive_directory_iterator(path("data/train")))
    if (file.is_regular_file()) fs::resize_file(file.path(), 0);
  const Outcome broken = demo();
  EXPECT_EQ(broken.code, 1);
  EXPECT_NE(broken.err.find("all that it said is in '" + path("tour/logs/vanilla-3.log")), std::string::npos)
      << broken.err;
}

}  // namespace
}  // namespace violin
