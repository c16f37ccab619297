// Wrong input to any verb: one line on stderr, nothing on stdout, exit 1 or 2, and no file.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/cli/process.h"
#include "tests/temporary_folder.h"
#include "violin/data/image.h"

namespace violin {
namespace {

using Arguments = std::vector<std::string>;

void expect_failure(const Arguments& arguments, int code, const std::string& part) {
  const Outcome outcome = run_violin(arguments);
  std::string line = "violin";
  for (const std::string& argument : arguments) line += " " + argument;
  EXPECT_EQ(outcome.code, code) << line;
  EXPECT_EQ(outcome.out, "") << line;
  EXPECT_NE(outcome.err.find(part), std::string::npos) << line << "\n" << outcome.err;
  EXPECT_TRUE(outcome.err.starts_with("violin")) << outcome.err;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
}

TEST(Command, HelpsAndTellsItsVersion) {
  for (const Arguments& arguments : {Arguments{"--help"}, Arguments{"curves", "--help"}, Arguments{"mask", "-h"}}) {
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, 0);
    EXPECT_EQ(outcome.err, "");
    EXPECT_NE(outcome.out.find("Examples:"), std::string::npos);
  }
  const Outcome version = run_violin({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_NE(version.out.find("violin"), std::string::npos);
  EXPECT_NE(version.out.find("torch"), std::string::npos);
}

TEST(Command, ExplainsWrongVerbsAndOptions) {
  expect_failure({}, 2, "violin --help");
  expect_failure({"curve"}, 2, "did you mean 'curves'?");
  expect_failure({"--nonsense"}, 2, "unknown option '--nonsense'");
  expect_failure({"bench", "modl"}, 2, "violin bench: unknown verb 'modl'; did you mean 'model'?");
  expect_failure({"bench", "model", "--bacth"}, 2, "did you mean '--batch'? (see 'violin bench model --help')");
  expect_failure({"bench", "model", "extra"}, 2, "violin bench model: unexpected argument 'extra'");
  expect_failure({"curves", "--crve", "z"}, 2, "did you mean '--curve'?");
  expect_failure({"bench"}, 2, "a verb is missing: attention, data, model");
  expect_failure({"--threads", "2", "eval", "run"}, 2, "'--threads' belongs behind the verb: eval");
  expect_failure({"curves", "extra"}, 2, "unexpected argument 'extra'");
  expect_failure({"curves", "--grid"}, 2, "--grid");
  expect_failure({"curves", "--grid", "4x4", "--grid", "5x5"}, 2, "--grid");
}

TEST(Command, SaysWhatBecameOfAWordInsteadOfWhatIsMissingForIt) {
  expect_failure({"predict", "run", "--nonsense"}, 2, "unknown option '--nonsense'");
  expect_failure({"predict", "run"}, 2, "images is missing");
  expect_failure({"predict", "run", "--"}, 2, "images is missing");
  expect_failure({"curves", "--", "extra"}, 2, "unexpected argument 'extra'");
  const TemporaryFolder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  std::ofstream("-leading.jpg") << "image";
  expect_failure({"predict", "run", "-leading.jpg"}, 2, "the file of this name is './-leading.jpg'");
  std::filesystem::current_path(before);
}

TEST(Command, ChecksArgumentsBeforeItLooksAtImagesOrWeights) {
  const Arguments eval = {"eval", "nowhere", "--data", "nowhere"};
  const auto with = [](Arguments arguments, const Arguments& more) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  expect_failure(with(eval, {"--split", "foo"}), 2, "expected train, val or test");
  expect_failure(with(eval, {"--resolutions", "32,,48"}), 2, "--resolutions");
  expect_failure(with(eval, {"--resolutions", "64x96,foo"}), 2, "'foo' is not N or HxW");
  expect_failure(with(eval, {"--resolutions", "64x96,0"}), 2, "'0' is not N or HxW");
  for (const char* size : {"64x", "x64", "64x96x3", "wide"}) {
    expect_failure(with(eval, {"--img-size", size}), 2, "expected N or HxW");
    expect_failure({"train", "--data", "nowhere", "--img-size", size}, 2, "expected N or HxW");
    expect_failure({"bench", "data", "--data", "nowhere", "--size", size}, 2, "expected N or HxW");
  }
  expect_failure(with(eval, {"--predictions", "none/p.csv"}), 1, "there is no folder 'none'");
  expect_failure(with(eval, {"--confusion", "none/c.csv"}), 1, "there is no folder 'none'");
  expect_failure(with(eval, {"--predictions", "p.csv", "--confusion", "p.csv"}), 2, "the same file");
  expect_failure({"predict", "nowhere", "a.png", "--attention", "looked.gif"}, 2, ".png or .svg");
  const TemporaryFolder folder;
  expect_failure(with(eval, {"--predictions", folder.path().string()}), 1, "it is a folder");
  for (const char* seed : {"-1", "99999999999999999999", "1.5", "x"})
    for (const Arguments& verb : {Arguments{"train"}, Arguments{"bench", "data"}})
      expect_failure(with(verb, {"--data", "nowhere", "--seed", seed}), 2, "expected a whole number from 0");
}

TEST(Command, ExplainsTimesToMeasureForAndThreads) {
  for (const char* seconds : {"0", "-1", "nan", "inf", "1e9", "x"}) {
    for (const Arguments& verb : {Arguments{"attention"}, Arguments{"model"}, Arguments{"data", "--data", "nowhere"}}) {
      Arguments arguments = {"bench"};
      arguments.insert(arguments.end(), verb.begin(), verb.end());
      arguments.insert(arguments.end(), {"--seconds", seconds});
      expect_failure(arguments, 2, "expected a number above 0 and at most 86400");
    }
  }
  expect_failure({"bench", "attention", "--threads", "0"}, 2, "1 to 1024");
  expect_failure({"bench", "model", "--model", "vit_micro", "--config", "c.json"}, 2, "excludes");
  expect_failure({"bench", "model", "--trace", "/dev/null/traces"}, 1, "--trace");
}

TEST(Command, ListsModelsByAPartOfTheirNameAndNamesTheNearest) {
  expect_failure({"models", "deit_smal_patch16"}, 2, "did you mean 'deit_small_patch16_224'?");
  expect_failure({"models", "foo", "--json"}, 2, "unknown model 'foo'");
  const Outcome part = run_violin({"models", "vit_micro"});
  EXPECT_EQ(part.code, 0);
  EXPECT_NE(part.out.find("\nvit_micro_patch4_32 "), std::string::npos) << part.out;
  // No table lists it, and --model takes it.
  const Outcome masked = run_violin({"models", "violin_vit_micro_patch4_32"});
  EXPECT_EQ(masked.code, 0);
  EXPECT_NE(masked.out.find("\nviolin_vit_micro_patch4_32 "), std::string::npos) << masked.out;
}

TEST(Command, ExplainsWrongGrids) {
  for (const std::string grid : {"0x5", "axb", "14", "1x2x3x4", "", "99999999999999999999x2"}) {
    expect_failure({"curves", "--json", "--grid=" + grid}, 2, "grid");
  }
  expect_failure({"mask", "--grid", "0x5"}, 2, "grid");
  expect_failure({"curves", "--grid", "100000x100000"}, 2, "too large");
}

TEST(Command, SuggestsTheNearestCurve) {
  expect_failure({"curves", "--curve", "hilbrt"}, 2, "did you mean 'hilbert'?");
  expect_failure({"mask", "--set", "snake,zigzg"}, 2, "did you mean 'zigzag'?");
  expect_failure({"curves", "--set", ""}, 2, "--set");
  expect_failure({"curves", "--grid", "2x3x4", "--curve", "zigzag"}, 2, "frame:zigzag");
}

TEST(Command, RefusesOptionsThatExcludeEachOther) {
  const TemporaryFolder folder;
  expect_failure({"curves", "--json", "--png", folder.file("a.png")}, 2, "--json");
  expect_failure({"curves", "--json", "--flatten"}, 2, "--json");
  expect_failure({"curves", "--flatten"}, 2, "--png");
  expect_failure({"curves", "--image", "photo.jpg"}, 2, "--png");
  expect_failure({"mask", "--json", "--svg", folder.file("a.svg")}, 2, "--json");
  expect_failure({"curves", "--svg", folder.file("a"), "--png", folder.file("a")}, 2, "same file");
  expect_failure({"curves", "--png", folder.file("a.png"), "--scale", "100"}, 2, "--scale");
  EXPECT_EQ(folder.entries(), 0U);
}

TEST(Command, ExplainsWrongMasks) {
  for (const std::string at : {"0,14", "-1,0", "99999999999999999999,0"}) {
    expect_failure({"mask", "--at=" + at}, 2, "outside of the grid 14x14");
  }
  for (const std::string at : {"1", "1,2,3", "1,2x", ""}) {
    expect_failure({"mask", "--at=" + at}, 2, "ROW,COLUMN");
  }
  expect_failure({"mask", "--grid", "2x3x4", "--at", "1,2"}, 2, "FRAME,ROW,COLUMN");
  for (const std::string gamma : {"0", "1.0001", "nan", "abc"}) {
    expect_failure({"mask", "--gamma=" + gamma}, 2, "--gamma");
  }
}

TEST(Command, ReportsBrokenImagesAndWritesNothing) {
  const TemporaryFolder folder;
  const std::string out = folder.file("out.png");
  const Bytes good = encode_png(Image(20, 20));
  write_file_atomically(folder.path() / "short.png", std::span(good).first(good.size() / 2));
  write_file_atomically(folder.path() / "words.jpg", "these are words");
  write_file_atomically(folder.path() / "empty.png", "");
  for (const std::string name : {"short.png", "words.jpg", "empty.png", "missing.png", "."}) {
    expect_failure({"curves", "--image", folder.file(name), "--png", out}, 1, folder.file(name));
  }
  EXPECT_EQ(folder.entries(), 3U);
}

TEST(Command, ReportsUnwritableOutputAndLeavesNoPartOfIt) {
  const TemporaryFolder folder;
  expect_failure({"curves", "--grid", "3x3", "--svg", folder.file("no/such/folder.svg")}, 1, "cannot write");
  expect_failure({"mask", "--grid", "3x3", "--png", folder.path().string()}, 1, "cannot write");
  expect_failure({"curves", "--grid", "3x3", "--png", ""}, 1, "cannot write");
  EXPECT_EQ(folder.entries(), 0U);
}

TEST(Command, KeepsTheOldFileWhenTheNewOneCannotBeMade) {
  const TemporaryFolder folder;
  write_file_atomically(folder.path() / "old.svg", "old");
  expect_failure({"curves", "--grid", "1024x1024", "--svg", folder.file("old.svg")}, 1, "too large to draw");
  const Bytes bytes = read_file(folder.path() / "old.svg", 100);
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "old");
  EXPECT_EQ(folder.entries(), 1U);
}

TEST(Command, APictureNeverReplacesTheImageThatItShows) {
  const TemporaryFolder folder;
  const std::string image = folder.file("a.png");
  const Bytes before = encode_png(Image(32, 32));
  write_file_atomically(image, before);
  expect_failure({"curves", "--grid", "2x2", "--image", image, "--png", image}, 2, "would replace what is read");
  expect_failure({"predict", "nowhere", image, "--attention", image}, 2, "would replace what is read");
  EXPECT_EQ(read_file(image, 1 << 20), before);
}

TEST(Command, ReportsAFullStdout) {
  if (!std::filesystem::is_character_file("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const Outcome outcome = run_violin({"curves", "--json"}, "/dev/full");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.err.find("standard output"), std::string::npos);
}

TEST(Command, KeepsItsMessageOnOneLineWhateverTheNameHolds) {
  expect_failure({"curves", "--image", "a\nb\x1b[31m.png", "--png", "/nowhere/x.png"}, 1, R"(a\x0ab\x1b[31m.png)");
}

}  // namespace
}  // namespace violin
