// eval and predict: which images they take, and what they say about it.
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/cli/process.h"
#include "tests/train/helpers.h"
#include "violin/checkpoint/safetensors.h"
#include "violin/checkpoint/tensor_file.h"
#include "violin/train/predictions.h"

namespace violin {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Evaluating : public ::testing::Test {
 protected:
  void SetUp() override {
    tests::write_images(path("photos"), 3, 10);
    std::ofstream(path("model.json"))
        << R"({"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "class_token": false,
               "global_pool": "avg", "fc_norm": false, "violin": {}})";
  }
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  json train(const std::string& run, const std::string& data, const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {
        "train",        "--data", path(data),  "--config", path("model.json"), "--out", path(run), "--epochs", "1",
        "--batch-size", "8",      "--threads", "1",        "--workers",        "1",     "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return json::parse(outcome.out, nullptr, false);
  }
  // stdout is JSON and nothing else; what was noted goes to notes_.
  json evaluate(const std::string& weights, const std::string& data, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"eval", path(weights), "--data", path(data), "--json", "--threads", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    notes_ = outcome.err;
    return json::parse(outcome.out, nullptr, false);
  }
  bool noted(const std::string& words) const { return notes_.find(words) != std::string::npos; }

  TemporaryFolder folder_;
  std::string notes_;
};

TEST_F(Evaluating, ValIsWhatTheRunHeldOut) {
  const json trained = train("run", "photos", {"--seed", "1", "--held-out", "0.2"});
  const data::SampleSet val = tests::reopened(path("run")).dataset.val;
  ASSERT_EQ(val.size(), 6);
  fs::copy_file(path("run/last/model.safetensors"), path("run/last/copy.safetensors"));
  for (const char* weights :
       {"run", "run/", "run/best", "run/last", "run/best/model.safetensors", "run/last/copy.safetensors"}) {
    const json result = evaluate(weights, "photos", {"--predictions", path("val.csv")});
    EXPECT_EQ(result.at("split"), "val") << weights;
    EXPECT_EQ(result.at("top1"), trained.at("val").at("top1")) << weights;
    EXPECT_NEAR(result.at("loss").get<double>(), trained.at("val").at("loss").get<double>(), 1e-5) << weights;
    EXPECT_TRUE(noted("20% of each class held out (6 images, seed 1)")) << notes_;
    EXPECT_FALSE(noted("was trained on")) << notes_;
    std::set<std::string> names, expected;
    for (const train::Prediction& row : train::read_predictions(path("val.csv"))) names.insert(row.image);
    for (std::int64_t i = 0; i < val.size(); ++i) expected.insert(val.name(i));
    EXPECT_EQ(names, expected) << weights;
  }
  EXPECT_EQ(evaluate("run", "photos", {"--split", "train"}).at("images"), 24);
  EXPECT_TRUE(noted("was trained on 24 of these 24 images")) << notes_;
  fs::rename(path("photos"), path("moved"));  // they stay the same images
  EXPECT_EQ(evaluate("run", "moved").at("images"), 6);
}

TEST_F(Evaluating, ALimitLeavesValAsItWas) {
  train("run", "photos", {"--seed", "3", "--limit", "12"});
  EXPECT_EQ(evaluate("run", "photos").at("images"), 3);
  EXPECT_EQ(evaluate("run", "photos", {"--split", "train"}).at("images"), 12);
}

TEST_F(Evaluating, OtherImagesAreTakenWhole) {
  train("run", "photos", {"--seed", "1"});
  tests::write_images(path("new"), 3, 4, 16, 500);
  const json other = evaluate("run", "new");
  EXPECT_EQ(other.at("split"), "all");
  EXPECT_EQ(other.at("images"), 12);
  EXPECT_TRUE(noted("are not those of the run: nothing is held out")) << notes_;
  EXPECT_FALSE(noted("trained on")) << notes_;
  // The run's images by another name: 27 of them it learned.
  fs::create_directories(path("manifest"));
  std::ofstream manifest(path("manifest/list.csv"));
  manifest << "path,label\n";
  for (const fs::directory_entry& file : fs::recursive_directory_iterator(path("photos")))
    if (file.is_regular_file())
      manifest << file.path().string() << "," << file.path().parent_path().filename().string() << "\n";
  manifest.close();
  EXPECT_EQ(evaluate("run", "manifest/list.csv").at("images"), 30);
  EXPECT_TRUE(noted("was trained on 27 of these 30 images")) << notes_;
  // Copies elsewhere, one of them new.
  fs::copy(path("photos"), path("copies"), fs::copy_options::recursive);
  fs::copy_file(path("new/class_0/image_500.png"), path("copies/class_0/image_500.png"));
  EXPECT_EQ(evaluate("run", "copies").at("images"), 31);
  EXPECT_TRUE(noted("27 of these 31 images have the names of images that the run was trained on")) << notes_;
  // One image more, and nobody knows what the split was.
  fs::copy_file(path("new/class_0/image_500.png"), path("photos/class_0/image_500.png"));
  EXPECT_EQ(evaluate("run", "photos").at("images"), 31);
  EXPECT_TRUE(noted("cannot be told")) << notes_;
}

TEST_F(Evaluating, WeightsAloneHoldNothingOut) {
  train("run", "photos", {});
  fs::copy_file(path("run/best/model.safetensors"), path("plain.safetensors"));
  const json result = evaluate("plain.safetensors", "photos");
  EXPECT_EQ(result.at("split"), "all");
  EXPECT_EQ(result.at("images"), 30);
  EXPECT_FALSE(noted("held out")) << notes_;
  const Outcome none = run_violin({"eval", path("plain.safetensors"), "--data", path("photos"), "--split", "val"});
  EXPECT_EQ(none.code, 1);
  EXPECT_NE(none.err.find("no images in the split 'val'"), std::string::npos) << none.err;
}

TEST_F(Evaluating, PredictionsDoNotDependOnThePicture) {
  train("run", "photos", {});
  tests::write_images(path("many"), 3, 100, 16, 500);
  const Outcome drawn =
      run_violin({"predict", path("run"), path("many"), "--json", "--attention", path("looked.svg"), "--threads", "1"});
  ASSERT_EQ(drawn.code, 0) << drawn.err;
  EXPECT_EQ(json::parse(drawn.out).size(), 300U);
  EXPECT_NE(drawn.err.find("shows the first 292 of 300 images"), std::string::npos) << drawn.err;
  EXPECT_TRUE(fs::exists(path("looked.svg")));
  const Outcome unwritable =
      run_violin({"predict", path("run"), path("photos"), "--json", "--attention", path("nowhere/looked.png")});
  EXPECT_EQ(unwritable.code, 1);
  EXPECT_EQ(json::parse(unwritable.out, nullptr, false).size(), 30U);
}

TEST_F(Evaluating, ABlockIsCheckedBeforeAnythingIsDone) {
  train("run", "photos", {});
  const auto predicted = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"predict", path("run"), path("photos/class_0/image_0.png")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_violin(arguments);
  };
  const Outcome alone = predicted({"--block", "1"});
  EXPECT_EQ(alone.code, 2);
  EXPECT_NE(alone.err.find("add --attention"), std::string::npos) << alone.err;
  const Outcome beyond = predicted({"--block", "99", "--attention", path("looked.png")});
  EXPECT_EQ(beyond.code, 2);
  EXPECT_NE(beyond.err.find("blocks 0 to 1"), std::string::npos) << beyond.err;
  EXPECT_TRUE(beyond.out.empty());
  EXPECT_EQ(predicted({"--block", "0", "--attention", path("looked.png")}).code, 0);
}

TEST_F(Evaluating, FilesOfARunAreNeverReplaced) {
  train("run", "photos", {});
  const auto bytes = [&](const char* name) { return read_file(path(name), 1 << 26); };
  const Bytes config = bytes("run/config.json"), log = bytes("run/log.csv"), best = bytes("run/best/model.safetensors");
  for (const auto& [arguments, code] : std::vector<std::pair<std::vector<std::string>, int>>{
           {{"eval", path("run"), "--data", path("photos"), "--predictions", path("run/config.json")}, 2},
           {{"features", path("run"), "--input", path("photos"), "--out", path("run/log.csv")}, 2},
           {{"convert", path("run/last"), path("run/best/model.safetensors")}, 2},
           {{"report", path("run"), "--out", path("run/config.json")}, 2},
           {{"finetune", "--weights", path("run"), "--data", path("photos"), "--out", path("run"), "--force"}, 1}}) {
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_NE(outcome.err.find("would"), std::string::npos) << outcome.err;
    EXPECT_NE(outcome.err.find("replace"), std::string::npos) << outcome.err;
  }
  EXPECT_EQ(bytes("run/config.json"), config);
  EXPECT_EQ(bytes("run/log.csv"), log);
  EXPECT_EQ(bytes("run/best/model.safetensors"), best);
  EXPECT_EQ(run_violin({"report", path("run"), "--out", path("run/report.html")}).code, 0);
}

TEST_F(Evaluating, OutputsNeverReplaceImagesOrLists) {
  train("run", "photos", {});
  const std::string image = path("photos/class_0/image_0.png"), list = path("list.csv");
  std::ofstream(list) << "path,label\n" << image << ",class_0\n";
  const auto bytes = [&](const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  const std::string pixels = bytes(image), lines = bytes(list);
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"eval", path("run"), "--data", list, "--predictions", list},
           {"eval", path("run"), "--data", path("photos"), "--predictions", image},
           {"eval", path("run"), "--data", path("photos"), "--confusion", image},
           {"features", path("run"), "--input", path("photos/class_0"), "--out", image},
           {"predict", path("run"), path("photos/class_0"), "--attention", image},
           {"report", path("run"), "--out", image},
           {"convert", path("run"), image}}) {
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, 2) << arguments[0] << ": " << outcome.err;
    EXPECT_NE(outcome.err.find("would replace"), std::string::npos) << outcome.err;
  }
  EXPECT_EQ(bytes(image), pixels);
  EXPECT_EQ(bytes(list), lines);
  // Pictures and lists that were written before may be written again.
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(run_violin({"predict", path("run"), image, "--attention", path("seen.png")}).code, 0);
    evaluate("run", "photos", {"--predictions", path("photos/said.csv")});
  }
  const Outcome torch_name = run_violin({"convert", path("run"), path("weights.pth")});
  EXPECT_EQ(torch_name.code, 2);
  EXPECT_FALSE(fs::exists(path("weights.pth")));
}

TEST_F(Evaluating, ImagesOfARunsOwnSplitsMayHaveEqualNames) {
  for (const char* split : {"train", "val"}) tests::write_images(path("split") + "/" + split, 3, 4);
  train("run", "split", {});
  EXPECT_EQ(evaluate("run", "split").at("split"), "val");
  EXPECT_FALSE(noted("trained on")) << notes_;
}

TEST_F(Evaluating, TwoOutputsAreTwoFilesHoweverTheyAreSpelled) {
  train("run", "photos", {});
  fs::create_directories(path("sub"));
  const Outcome outcome = run_violin({"eval", path("run"), "--data", path("photos"), "--predictions", path("p.csv"),
                                      "--confusion", path("sub/../p.csv")});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_NE(outcome.err.find("--predictions and --confusion name the same file"), std::string::npos) << outcome.err;
  EXPECT_FALSE(fs::exists(path("p.csv")));
  EXPECT_EQ(run_violin({"curves", "--svg", path("a.png"), "--png", path("./a.png")}).code, 2);
}

TEST_F(Evaluating, OneResolutionThatIsAskedForIsSaid) {
  train("run", "photos", {});
  const json rows = evaluate("run", "photos", {"--resolutions", "8"}).at("resolutions");
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].at("resolution"), 8);
}

TEST_F(Evaluating, AWrongResolutionCostsNoEvaluation) {
  train("run", "photos", {});
  for (const char* sizes : {"16,3", "16,5000"}) {
    const Outcome outcome = run_violin({"eval", path("run"), "--data", path("photos"), "--resolutions", sizes});
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.err.find("eval 16 px"), std::string::npos) << outcome.err;
  }
}

TEST_F(Evaluating, ASweepEvaluatesASmallSizeAsItDoesAlone) {
  tests::write_images(path("photos"), 3, 10, 48);
  train("run", "photos", {"--img-size", "48"});
  const json sweep = evaluate("run", "photos", {"--resolutions", "48,40,24"}).at("resolutions");
  ASSERT_EQ(sweep.size(), 3U);
  // The larger ones are cropped and a small one is taken as it is, whoever asks for it.
  for (const json& row : sweep) {
    const std::string size = std::to_string(row.at("resolution").get<int>());
    EXPECT_NEAR(row.at("loss").get<double>(), evaluate("run", "photos", {"--img-size", size}).at("loss").get<double>(),
                1e-6)
        << size;
  }
}

TEST_F(Evaluating, SaysWhatOfAResolutionIsNotSeen) {
  train("run", "photos", {});
  const Outcome outcome = run_violin({"eval", path("run"), "--data", path("photos"), "--resolutions", "16,18,16x22"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* said : {"of 18 pixels 16 are whole patches of 4x4", "of 16x22 pixels 16x20 are"})
    EXPECT_NE(outcome.err.find(said), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.err.find("of 16 pixels"), std::string::npos) << outcome.err;
  evaluate("run", "photos", {"--resolutions", "8,16", "--predictions", path("said.csv")});
  EXPECT_TRUE(noted("said.csv' is of the first size (at 8 px)")) << notes_;
}

TEST_F(Evaluating, OfWeightsThatSayNothingASweepIsWhatEachSizeIsAlone) {
  train("run", "photos", {});
  checkpoint::save_safetensors(path("bare.safetensors"),
                               checkpoint::TensorFile::open(path("run/best/model.safetensors")).tensors());
  const json sweep = evaluate("bare.safetensors", "photos", {"--heads", "2", "--resolutions", "72,48,24"});
  for (const json& row : sweep.at("resolutions")) {
    const std::string size = std::to_string(row.at("resolution").get<int>());
    const json alone = evaluate("bare.safetensors", "photos", {"--heads", "2", "--img-size", size});
    EXPECT_NEAR(row.at("loss").get<double>(), alone.at("loss").get<double>(), 1e-5) << size;
  }
}

TEST_F(Evaluating, ABatchMayBeLargerThanAnyNumberOfImages) {
  train("run", "photos", {});
  for (const std::vector<std::string>& verb : {std::vector<std::string>{"eval", path("run"), "--data", path("photos")},
                                               {"predict", path("run"), path("photos")},
                                               {"report", path("run")}}) {
    std::vector<std::string> arguments = verb;
    arguments.insert(arguments.end(), {"--batch", "9223372036854775807", "--threads", "1"});
    EXPECT_EQ(run_violin(arguments).code, 0) << verb.front();
  }
}

TEST_F(Evaluating, NamesSteerNoTerminal) {
  fs::rename(path("photos/class_0"), path("photos/a\x1b[31m\nb"));
  train("run", "photos", {});
  const std::string image = path("photos/a\x1b[31m\nb/image_0.png");
  for (const Outcome& outcome :
       {run_violin({"predict", path("run"), image}),
        run_violin({"eval", path("run"), "--data", path("photos"), "--split", "train", "--per-class"})}) {
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ((outcome.out + outcome.err).find('\x1b'), std::string::npos);
    EXPECT_NE(outcome.out.find(R"(a\x1b[31m\x0ab)"), std::string::npos) << outcome.out;
  }
}

TEST_F(Evaluating, WeightsForRectanglesAreGivenRectangles) {
  train("run", "photos", {});
  const std::string wide = path("wide.safetensors"), image = path("photos/class_0/image_0.png");
  ASSERT_EQ(run_violin({"convert", path("run"), wide, "--img-size", "16x32"}).code, 0);
  fs::copy_file(path("run/best/model.safetensors"), path("square.safetensors"));
  // Stored in the weights or asked for, it comes to the same.
  const json stored = evaluate("wide.safetensors", "photos"),
             asked = evaluate("square.safetensors", "photos", {"--img-size", "16x32"}),
             sweep = evaluate("square.safetensors", "photos", {"--resolutions", "16x32,16"});
  EXPECT_EQ(stored.at("images"), 30);
  EXPECT_EQ(stored.at("loss"), asked.at("loss"));
  EXPECT_NEAR(sweep.at("loss").get<double>(), asked.at("loss").get<double>(), 1e-5);
  EXPECT_EQ(sweep.at("resolutions")[0].at("resolution"), json({16, 32}));
  EXPECT_EQ(sweep.at("resolutions")[1].at("resolution"), 16);
  EXPECT_NE(sweep.at("resolutions")[1].at("loss"), asked.at("loss"));
  // One number would be a square.
  const Outcome one = run_violin({"eval", wide, "--data", path("photos"), "--resolutions", "32x64,32"});
  EXPECT_EQ(one.code, 2);
  EXPECT_NE(one.err.find("16x32, so say both sides: 32x64 instead of 32"), std::string::npos) << one.err;
  EXPECT_EQ(one.err.find("eval 32x64"), std::string::npos) << one.err;
  const Outcome features =
      run_violin({"features", wide, "--input", image, "--out", path("out.safetensors"), "--blocks", "0", "--json"});
  ASSERT_EQ(features.code, 0) << features.err;
  EXPECT_EQ(json::parse(features.out).at("tensors").at("blocks.0"), json({1, 4 * 8, 16}));
  EXPECT_EQ(run_violin({"predict", wide, image, "--img-size", "32"}).code, 0);
}

TEST_F(Evaluating, WorkersDecodeInTheGivenOrder) {
  train("run", "photos", {});
  std::ofstream(path("photos/class_1/broken.png")) << "\x89PNG\r\n\x1a\nrubbish";
  std::string out;
  for (const char* workers : {"0", "1", "5"}) {
    const Outcome outcome = run_violin({"predict", path("run"), path("photos"), "--workers", workers});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_NE(outcome.err.find("skipped 1 bad image\n"), std::string::npos) << outcome.err;
    const std::size_t last = outcome.err.find("predict 30/31 images");
    EXPECT_NE(last, std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.err.find("predict 30/31 images", last + 1), std::string::npos) << outcome.err;
    if (out.empty()) out = outcome.out;
    EXPECT_EQ(outcome.out, out) << workers;
  }
  const Outcome fatal = run_violin({"predict", path("run"), path("photos"), "--on-bad-image", "fatal"});
  EXPECT_EQ(fatal.code, 1);
  EXPECT_NE(fatal.err.find("broken.png"), std::string::npos) << fatal.err;
}

}  // namespace
}  // namespace violin
