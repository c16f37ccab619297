#include "violin/data/dataset.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "tests/data/pictures.h"
#include "tests/temporary_folder.h"
#include "violin/error.h"

namespace violin::data {
namespace {

namespace fs = std::filesystem;

std::set<std::string> paths(const SampleSet& set) {
  std::set<std::string> result;
  for (const Sample& sample : set.samples()) result.insert(sample.name());
  return result;
}

std::string opening_error(const fs::path& path) {
  return error_of([&] { open_dataset(path); });
}

TEST(ImageFolder, ReadsSplitsClassesAndNestedFiles) {
  const TemporaryFolder folder;
  const fs::path root = folder.path();
  write_classes(root / "train", {"dog", "cat", "Ant"}, {3, 2, 1});
  write_classes(root / "val", {"dog"}, {2});
  write_classes(root / "test", {"cat"}, {4});
  write_image(root / "train/cat/deep/er/9.png", noise(5, 6, 99));
  write_text(root / "train/cat/.hidden.png", "x");
  write_text(root / "train/.cache/a.png", "x");
  write_text(root / "train/cat/notes.txt", "not an image");
  fs::rename(root / "train/dog/0.png", root / "train/dog/no_extension");

  const Dataset dataset = open_dataset(root);
  EXPECT_EQ(dataset.layout, Layout::kSplitFolders);
  EXPECT_EQ(dataset.classes, (std::vector<std::string>{"Ant", "cat", "dog"}));
  EXPECT_EQ(dataset.train.class_counts(), (std::vector<std::int64_t>{1, 3, 3}));
  EXPECT_EQ(dataset.val.class_counts(), (std::vector<std::int64_t>{0, 0, 2}));
  EXPECT_EQ(dataset.test.class_counts(), (std::vector<std::int64_t>{0, 4, 0}));
  EXPECT_FALSE(dataset.held_out);
  EXPECT_EQ(dataset.evaluated_name(), "test");
  ASSERT_EQ(dataset.notes.size(), 1u);
  EXPECT_TRUE(contains(dataset.notes[0], "notes.txt")) << dataset.notes[0];
  EXPECT_TRUE(paths(dataset.train).contains((root / "train/dog/no_extension").string()));
  for (std::int64_t i = 0; i < dataset.train.size(); ++i) {
    if (dataset.train[i].path.ends_with("er/9.png")) {
      EXPECT_EQ(dataset.train.decode(i), noise(5, 6, 99));
    }
  }
}

TEST(ImageFolder, WithoutValHoldsOutAStratifiedShareAndSaysSo) {
  const TemporaryFolder folder;
  write_classes(folder.path() / "train", {"a", "b", "c"}, {40, 20, 1});
  const Dataset dataset = open_dataset(folder.path(), {.held_out = 0.2, .seed = 3});
  EXPECT_TRUE(dataset.held_out);
  EXPECT_EQ(dataset.val.class_counts(), (std::vector<std::int64_t>{8, 4, 0}));
  EXPECT_EQ(dataset.train.class_counts(), (std::vector<std::int64_t>{32, 16, 1}));
  for (const std::string& path : paths(dataset.val)) EXPECT_FALSE(paths(dataset.train).contains(path));
  ASSERT_EQ(dataset.notes.size(), 1u);
  EXPECT_TRUE(contains(dataset.notes[0], "20% of each class held out (12 images, seed 3)")) << dataset.notes[0];
  EXPECT_EQ(dataset.evaluated_name(), "val");

  const Dataset again = open_dataset(folder.path(), {.held_out = 0.2, .seed = 3});
  const Dataset other = open_dataset(folder.path(), {.held_out = 0.2, .seed = 4});
  EXPECT_EQ(paths(again.val), paths(dataset.val));
  EXPECT_NE(paths(other.val), paths(dataset.val));
  EXPECT_EQ(again.fingerprint(), dataset.fingerprint());
  EXPECT_NE(other.fingerprint(), dataset.fingerprint());
  EXPECT_EQ(open_dataset(folder.path(), {.held_out = 0}).train.size(), 61);
  EXPECT_THROW(open_dataset(folder.path(), {.held_out = 1}), Error);
}

TEST(ImageFolder, TakesOneFolderOfClasses) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "b"}, {10, 10});
  const Dataset dataset = open_dataset(folder.path());
  EXPECT_EQ(dataset.layout, Layout::kClassFolders);
  EXPECT_EQ(dataset.train.size(), 18);
  EXPECT_EQ(dataset.val.size(), 2);
  EXPECT_EQ(dataset.evaluated_name(), "all");
  EXPECT_EQ(dataset.evaluated().size(), 20);
}

TEST(ImageFolder, AClassMayBeCalledTrain) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"streetcar", "test", "train"}, {10, 10, 10});
  const Dataset dataset = open_dataset(folder.path());
  EXPECT_EQ(dataset.layout, Layout::kClassFolders);
  EXPECT_EQ(dataset.classes, (std::vector<std::string>{"streetcar", "test", "train"}));
  // Also within a split, and a split stays one beside other folders.
  const TemporaryFolder splits;
  write_classes(splits.path() / "train", {"streetcar", "train"}, {4, 4});
  write_classes(splits.path() / "cache", {"x"}, {1});
  EXPECT_EQ(open_dataset(splits.path()).layout, Layout::kSplitFolders);
}

TEST(ImageFolder, SplitsMayBeCapitalised) {
  const std::vector<std::array<const char*, 3>> spellings = {
      {"Train", "Val", "Test"}, {"TRAINING", "Validation", "testing"}, {"training", "VALID", "Testing"}};
  for (const auto& [train, val, test] : spellings) {
    const TemporaryFolder folder;
    write_classes(folder.path() / train, {"a", "b"}, {3, 3});
    write_classes(folder.path() / val, {"a", "b"}, {2, 2});
    write_classes(folder.path() / test, {"a", "b"}, {1, 1});
    const Dataset dataset = open_dataset(folder.path());
    EXPECT_EQ(dataset.layout, Layout::kSplitFolders) << train;
    EXPECT_EQ(dataset.classes, (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(dataset.train.size(), 6);
    EXPECT_EQ(dataset.val.size(), 4);
    EXPECT_EQ(dataset.test.size(), 2);
    EXPECT_TRUE(dataset.notes.empty());
  }
  const TemporaryFolder twice;
  write_classes(twice.path() / "train", {"a", "b"}, {1, 1});
  write_classes(twice.path() / "Train", {"a", "b"}, {1, 1});
  EXPECT_TRUE(contains(opening_error(twice.path()), "two folders for train, 'Train' and 'train': keep one"))
      << opening_error(twice.path());
  // A manifest spells them as people do, too.
  write_text(twice.path() / "list.csv", "path,label,split\nTrain/a/0.png,a,Train\nTrain/b/0.png,b,TEST\n");
  EXPECT_TRUE(contains(opening_error(twice.path() / "list.csv"), "class 'b' does not occur in train"));
}

TEST(ImageFolder, FoldersBesideSplitsAreNamed) {
  const TemporaryFolder folder;
  write_classes(folder.path() / "Train", {"a", "b"}, {3, 3});
  write_classes(folder.path() / "holdout", {"a", "b"}, {3, 3});
  write_image(folder.path() / "val/1.png", noise(2, 2, 1));  // not sorted into classes: no split
  const Dataset dataset = open_dataset(folder.path(), {.held_out = 0});
  EXPECT_EQ(dataset.train.size(), 6);
  EXPECT_TRUE(dataset.val.empty());
  ASSERT_EQ(dataset.notes.size(), 1u);
  EXPECT_TRUE(contains(dataset.notes[0], "left out: 'holdout', 'val'")) << dataset.notes[0];
}

TEST(ImageFolder, WithoutTrainThereIsOnlySomethingToEvaluate) {
  const TemporaryFolder folder;
  write_classes(folder.path() / "val", {"b", "a"}, {2, 3});
  const Dataset dataset = open_dataset(folder.path());
  EXPECT_TRUE(dataset.train.empty());
  EXPECT_EQ(dataset.classes, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(dataset.evaluated().size(), 5);
}

TEST(ImageFolder, FingerprintFollowsContentNotPlace) {
  const TemporaryFolder one, two;
  write_classes(one.path() / "x", {"a", "b"}, {3, 3});
  write_classes(two.path() / "a longer name", {"a", "b"}, {3, 3});
  EXPECT_EQ(open_dataset(one.path() / "x").fingerprint(), open_dataset(two.path() / "a longer name").fingerprint());
  const std::string before = open_dataset(one.path() / "x").fingerprint();
  fs::rename(one.path() / "x/a/0.png", one.path() / "x/b/7.png");
  EXPECT_NE(open_dataset(one.path() / "x").fingerprint(), before);
}

TEST(ImageFolder, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  const fs::path root = folder.path();
  EXPECT_TRUE(contains(opening_error(root / "nowhere"), "no data at"));
  EXPECT_TRUE(contains(opening_error(root), "has no images"));
  write_image(root / "1.png", noise(2, 2, 1));
  EXPECT_TRUE(contains(opening_error(root), "no class folders"));
  write_classes(root / "train", {"a", "b"}, {1, 1});
  fs::create_directories(root / "train/empty");
  EXPECT_TRUE(contains(opening_error(root), "train/empty' has no images")) << opening_error(root);
  fs::remove(root / "train/empty");
  write_classes(root / "val", {"c"}, {1});
  EXPECT_TRUE(contains(opening_error(root), "class 'c'")) << opening_error(root);
  fs::remove_all(root / "val");
  write_classes(root / "val", {"a"}, {1});
  write_classes(root / "validation", {"a"}, {1});
  EXPECT_TRUE(contains(opening_error(root), "two folders for val, 'val' and 'validation'"));
  EXPECT_TRUE(contains(opening_error(root / "1.png"), "is an image"));
}

TEST(ImageFolder, ALinkThatLeadsBackIsReported) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "b"}, {1, 1});
  fs::create_directory_symlink(folder.path(), folder.path() / "a/back");
  EXPECT_FALSE(opening_error(folder.path()).empty());
}

TEST(ImageFolder, FormatsThatAreNotReadAreNamed) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"cat"}, {2});
  write_text(folder.path() / "dog/1.heic", "ftypheic");
  write_text(folder.path() / "dog/2.gif", "GIF89a");
  const std::string error = opening_error(folder.path());
  EXPECT_TRUE(contains(error, "dog' has no images but 2 other files, the first '")) << error;
  EXPECT_TRUE(contains(error, "dog/1.heic' (JPEG")) << error;
  const std::string alone = error_of([&] { open_images({folder.path() / "dog"}); });
  EXPECT_TRUE(contains(alone, "no images in") && contains(alone, "2 other files")) << alone;
  const std::string unsorted = opening_error(folder.path() / "dog");
  EXPECT_TRUE(contains(unsorted, "2 other files")) << unsorted;
}

TEST(ImageFolder, PipesAreLeftOutAndLinksFollowed) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "b"}, {2, 2});
  ASSERT_EQ(::mkfifo(folder.file("a/pipe").c_str(), 0600), 0);
  ASSERT_EQ(::mkfifo(folder.file("a/pipe.png").c_str(), 0600), 0);
  fs::create_symlink(folder.path() / "a/0.png", folder.path() / "b/linked.png");
  fs::create_symlink("/dev/zero", folder.path() / "b/zero.png");
  const Dataset dataset = open_dataset(folder.path(), {.held_out = 0});
  EXPECT_EQ(dataset.train.class_counts(), (std::vector<std::int64_t>{2, 3}));
  ASSERT_EQ(dataset.notes.size(), 1u);
  EXPECT_TRUE(contains(dataset.notes[0], "3 files")) << dataset.notes[0];
  EXPECT_EQ(open_images({folder.path() / "a"}).size(), 2);
}

TEST(ImageFolder, NamesThatAreNotUtf8AreRefused) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "caf\xe9"}, {2, 2});
  EXPECT_TRUE(contains(opening_error(folder.path()), "/caf\\xe9' is not UTF-8: rename it"))
      << opening_error(folder.path());
  write_text(folder.path() / "list.csv", "path,label\na/0.png,x\na/1.png,caf\xe9\n");
  EXPECT_TRUE(contains(opening_error(folder.path() / "list.csv"), "line 3: label 'caf\\xe9' is not UTF-8"));
  fs::rename(folder.path() / "caf\xe9", folder.path() / "caf\xc3\xa9");
  EXPECT_EQ(open_dataset(folder.path()).classes.size(), 2u);
}

TEST(ImageFolder, BrokenImagesAreNamedWhenDecoded) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a"}, {1});
  const Bytes whole = read_file(folder.path() / "a/0.png", 1 << 20);
  write_file_atomically(folder.path() / "a/cut.png", std::span(whole).first(whole.size() / 2));
  write_text(folder.path() / "a/page.jpg", "<html>");
  const SampleSet set = open_dataset(folder.path(), {.held_out = 0}).train;
  ASSERT_EQ(set.size(), 3);
  EXPECT_NO_THROW(set.decode(0));
  EXPECT_TRUE(contains(error_of([&] { set.decode(1); }), "a/cut.png"));
  EXPECT_TRUE(contains(error_of([&] { set.decode(2); }), "a/page.jpg"));
}

TEST(OpenImages, TakesFilesAndFolders) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"b", "a"}, {2, 1});
  const SampleSet set = open_images({folder.path() / "b/1.png", folder.path()});
  ASSERT_EQ(set.size(), 4);
  EXPECT_TRUE(set[0].path.ends_with("b/1.png"));
  EXPECT_TRUE(set[1].path.ends_with("a/0.png"));
  EXPECT_THROW(open_images({folder.path() / "c"}), Error);
}

TEST(ImageFolder, ImagesBesideTheClassesAreCounted) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "b"}, {2, 2});
  write_text(folder.path() / "README.txt", "not an image");
  EXPECT_TRUE(open_dataset(folder.path(), {.held_out = 0}).notes.empty());
  write_image(folder.path() / "stray.png", noise(2, 2, 1));
  const Dataset one = open_dataset(folder.path(), {.held_out = 0});
  ASSERT_EQ(one.notes.size(), 1u);
  EXPECT_TRUE(contains(one.notes[0], "1 image beside the class folders left out, the first '")) << one.notes[0];
  EXPECT_TRUE(contains(one.notes[0], "/stray.png'")) << one.notes[0];
  // In each split, and beside the splits.
  const TemporaryFolder splits;
  write_classes(splits.path() / "train", {"a", "b"}, {2, 2});
  write_classes(splits.path() / "val", {"a", "b"}, {2, 2});
  for (const char* name : {"0.png", "train/1.png", "val/2.png"}) write_image(splits.path() / name, noise(2, 2, 1));
  const Dataset three = open_dataset(splits.path());
  EXPECT_EQ(three.train.size(), 4);
  ASSERT_EQ(three.notes.size(), 1u);
  EXPECT_TRUE(contains(three.notes[0], "3 images beside")) << three.notes[0];
}

TEST(SampleSet, LimitsKeepTheSharesOfClasses) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "b", "c"}, {60, 30, 3}, 1);
  const SampleSet all = open_dataset(folder.path(), {.held_out = 0}).train;
  EXPECT_EQ(all.limited(31, 0).class_counts(), (std::vector<std::int64_t>{20, 10, 1}));
  EXPECT_EQ(all.limited(3, 0).class_counts(), (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_EQ(all.limited(0, 0).size(), 93);
  EXPECT_EQ(all.limited(500, 0).size(), 93);
  EXPECT_THROW(all.limited(-1, 0), Error);
  for (std::int64_t count = 1; count <= 93; ++count) {
    const SampleSet part = all.limited(count, 7);
    ASSERT_EQ(part.size(), count);
    ASSERT_EQ(std::ssize(paths(part)), count);
  }
  EXPECT_EQ(paths(all.limited(20, 1)), paths(all.limited(20, 1)));
  EXPECT_NE(paths(all.limited(20, 1)), paths(all.limited(20, 2)));
}

TEST(SampleSet, SplitAndJoinGiveEverythingBack) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "b"}, {10, 5}, 1);
  const SampleSet all = open_dataset(folder.path(), {.held_out = 0}).train;
  const auto [rest, share] = all.split(0.2, 9);
  EXPECT_EQ(share.class_counts(), (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(paths(rest.joined(share)), paths(all));
  EXPECT_EQ(rest.joined(share).size(), 15);
}

TEST(ClassWeights, AverageToOneOverTheImages) {
  const std::vector<std::int64_t> counts = {90, 9, 0, 1};
  const std::vector<double> weights = class_weights(counts);
  double sum = 0;
  for (std::size_t c = 0; c < counts.size(); ++c) sum += weights[c] * static_cast<double>(counts[c]);
  EXPECT_NEAR(sum / 100, 1, 1e-12);
  EXPECT_NEAR(weights[0] * 90, weights[3] * 1, 1e-9);
  EXPECT_EQ(weights[2], 0);
}

// Records whose pixels tell their number.
Bytes cifar_records(int count, int label_bytes, int classes) {
  Bytes bytes;
  for (int i = 0; i < count; ++i) {
    for (int k = 0; k < label_bytes; ++k)
      bytes.push_back(static_cast<std::uint8_t>(k + 1 == label_bytes ? i % classes : 3));
    for (int p = 0; p < 3072; ++p) bytes.push_back(static_cast<std::uint8_t>(p / 1024 * 50 + i + p % 7));
  }
  return bytes;
}

TEST(Cifar, ReadsTheFilesOfCifar10) {
  const TemporaryFolder folder;
  const fs::path root = folder.path() / "cifar-10-batches-bin";
  fs::create_directories(root);
  write_file_atomically(root / "data_batch_1.bin", cifar_records(20, 1, 10));
  write_file_atomically(root / "data_batch_2.bin", cifar_records(30, 1, 10));
  write_file_atomically(root / "test_batch.bin", cifar_records(10, 1, 10));
  write_text(root / "batches.meta.txt", "z\ny\nx\nw\nv\nu\nt\ns\nr\nq\n\n");
  const Dataset dataset = open_dataset(folder.path(), {.held_out = 0.2});
  EXPECT_EQ(dataset.layout, Layout::kCifar10);
  EXPECT_EQ(dataset.classes.front(), "z");  // as in the file: labels are numbers already
  EXPECT_NE(dataset.notes.front().find("data_batch_3.bin, data_batch_4.bin, data_batch_5.bin"), std::string::npos);
  EXPECT_EQ(dataset.train.size(), 40);
  EXPECT_EQ(dataset.val.size(), 10);
  EXPECT_EQ(dataset.test.size(), 10);
  const Image image = dataset.test.decode(4);
  EXPECT_EQ(image.width, 32);
  EXPECT_EQ(image.at(8, 0)[0], 4 + 1);
  EXPECT_EQ(image.at(8, 0)[2], 100 + 4 + (2048 + 8) % 7);
  EXPECT_EQ(dataset.test[4].label, 4);
  EXPECT_TRUE(dataset.test[4].name().ends_with("test_batch.bin[4]"));
}

TEST(Cifar, ReadsTheFilesOfCifar100) {
  const TemporaryFolder folder;
  write_file_atomically(folder.path() / "train.bin", cifar_records(200, 2, 100));
  const Dataset dataset = open_dataset(folder.path(), {.held_out = 0});
  EXPECT_EQ(dataset.layout, Layout::kCifar100);
  EXPECT_EQ(dataset.classes.size(), 100u);
  EXPECT_EQ(dataset.train[150].label, 50);
  ASSERT_EQ(dataset.notes.size(), 1u);
  EXPECT_TRUE(contains(dataset.notes[0], "fine_label_names.txt"));
}

TEST(Cifar, NamesTheBrokenFile) {
  const TemporaryFolder folder;
  Bytes bytes = cifar_records(4, 1, 10);
  bytes.pop_back();
  write_file_atomically(folder.path() / "data_batch_1.bin", bytes);
  EXPECT_TRUE(contains(opening_error(folder.path()), "data_batch_1.bin' has 12291 bytes"));
  bytes.push_back(0);
  bytes[3073] = 10;
  write_file_atomically(folder.path() / "data_batch_1.bin", bytes);
  EXPECT_TRUE(contains(opening_error(folder.path()), "label 10 in record 1"));
  write_file_atomically(folder.path() / "data_batch_1.bin", Bytes());
  EXPECT_FALSE(opening_error(folder.path()).empty());
  write_file_atomically(folder.path() / "data_batch_1.bin", cifar_records(4, 1, 10));
  write_text(folder.path() / "batches.meta.txt", "only\nthree\nnames\n");
  EXPECT_TRUE(contains(opening_error(folder.path()), "names 3 classes"));
}

TEST(Manifest, ReadsCsvWithQuotes) {
  const TemporaryFolder folder;
  for (const char* name : {"a.png", "b, c.png", "say \"d\".png", "e.png"})
    write_image(folder.path() / name, noise(2, 2, 1));
  write_text(folder.path() / "list.csv",
             "\xef\xbb\xbfsplit,path,note,label\r\n"
             "train,a.png,\"two\nlines\",cat\r\n"
             "\r\n"
             "val,\"b, c.png\",,\"cat\"\r\n"
             ",\"say \"\"d\"\".png\",x, dog \r\n"
             "test,e.png,,dog");
  const Dataset dataset = open_dataset(folder.path() / "list.csv");
  EXPECT_EQ(dataset.layout, Layout::kManifest);
  EXPECT_EQ(dataset.classes, (std::vector<std::string>{"cat", "dog"}));
  ASSERT_EQ(dataset.train.size(), 2);
  EXPECT_EQ(dataset.train[1].label, 1);
  EXPECT_NO_THROW(dataset.train.decode(1));
  EXPECT_EQ(dataset.val.size(), 1);
  EXPECT_EQ(dataset.test[0].label, 1);
}

TEST(Manifest, ReadsJsonLinesAndOrdersNumbersAsNumbers) {
  const TemporaryFolder folder;
  std::string text;
  for (const std::string label : {"10", "2", "\"1\""}) {
    const std::string name = "in/" + std::to_string(text.size()) + ".png";
    write_image(folder.path() / name, noise(2, 2, 1));
    text += "{\"path\": \"" + name + "\", \"label\": " + label + ", \"split\": \" train\"}\n";
  }
  write_text(folder.path() / "list.jsonl", text + "\n");
  const Dataset dataset = open_dataset(folder.path() / "list.jsonl", {.held_out = 0});
  EXPECT_EQ(dataset.classes, (std::vector<std::string>{"1", "2", "10"}));
  EXPECT_EQ(dataset.train.labels(), (std::vector<std::int64_t>{2, 1, 0}));
}

TEST(Manifest, NamesFollowFromTheFilesNotFromHowItIsCalled) {
  const TemporaryFolder folder;
  write_image(folder.path() / "in/a.png", noise(2, 2, 1));
  write_image(folder.path() / "b.png", noise(2, 2, 2));
  const fs::path relative = folder.path() / "relative.csv", absolute = folder.path() / "absolute.csv";
  write_text(relative, "path,label\n./in/a.png,x\nb.png,y\n");
  write_text(absolute, "path,label\n" + (folder.path() / "./in/a.png").string() + ",x\n" +
                           (folder.path() / "b.png").string() + ",y\n");
  for (const fs::path& list : {relative, absolute}) {
    for (const fs::path& called : {list, fs::proximate(list), list.parent_path() / "in/.." / list.filename()}) {
      const Dataset dataset = open_dataset(called);
      EXPECT_EQ(dataset.train.name(0), "./in/a.png") << called;
      EXPECT_EQ(dataset.train.name(1), "b.png") << called;
      EXPECT_EQ(dataset.fingerprint(), "67f357988b7c383c") << called;  // what runs have stored
      EXPECT_NO_THROW(dataset.train.decode(1));
    }
  }
}

TEST(Manifest, AFolderWhoseNameOnlyBeginsTheSameIsElsewhere) {
  const TemporaryFolder folder;
  write_image(folder.path() / "set_too/a.png", noise(2, 2, 1));
  const fs::path image = folder.path() / "set_too/a.png";
  write_text(folder.path() / "set/list.csv", "path,label\n" + image.string() + ",x\n");
  EXPECT_EQ(open_dataset(folder.path() / "set/list.csv").train.name(0), image.string());
}

TEST(Manifest, CopiesOfAnImageStayTogether) {
  const TemporaryFolder folder;
  std::string text = "path,label\n";
  for (int i = 0; i < 20; ++i) {
    const std::string name = std::to_string(i) + ".png";
    write_image(folder.path() / name, noise(2, 2, 1));
    for (const char* spelling : {"", "./", "../"}) {
      const std::string above = *spelling == '.' && spelling[1] == '.' ? folder.path().filename().string() + "/" : "";
      text += spelling + above + name + (i % 2 == 0 ? ",x\n" : ",y\n");
    }
  }
  write_text(folder.path() / "list.csv", text);
  const Dataset dataset = open_dataset(folder.path() / "list.csv", {.held_out = 0.2});
  EXPECT_EQ(dataset.train.size(), 48);
  EXPECT_EQ(dataset.val.class_counts(), (std::vector<std::int64_t>{6, 6}));
  for (const std::string& path : paths(dataset.val)) EXPECT_FALSE(paths(dataset.train).contains(path)) << path;
  ASSERT_EQ(dataset.notes.size(), 2u);
  EXPECT_TRUE(contains(dataset.notes[0], "40 rows of '")) << dataset.notes[0];
  EXPECT_TRUE(contains(dataset.notes[0], "repeat images")) << dataset.notes[0];
}

TEST(Manifest, AnImageHasOneLabelAndOneSplit) {
  const TemporaryFolder folder;
  write_image(folder.path() / "a.png", noise(2, 2, 1));
  write_image(folder.path() / "b.png", noise(2, 2, 2));
  const fs::path list = folder.path() / "list.csv";
  write_text(list, "path,label\na.png,x\nb.png,y\n./a.png,y\n");
  EXPECT_TRUE(contains(opening_error(list), "line 4: './a.png' has label 'y', but 'x' on line 2: keep one"))
      << opening_error(list);
  write_text(list, "path,label,split\na.png,x,train\nb.png,x,val\na.png,x,test\n");
  EXPECT_TRUE(contains(opening_error(list), "line 4: 'a.png' is in test, but in train on line 2: keep one"))
      << opening_error(list);
}

TEST(Manifest, QuotesMayFollowBlanksAndLinesEndInAnyWay) {
  const TemporaryFolder folder;
  for (const char* name : {"a.png", "b.png", "c.png"}) write_image(folder.path() / name, noise(2, 2, 1));
  const fs::path list = folder.path() / "list.csv";
  write_text(list, "path, \"label\"\na.png, \"cat\"\nb.png,\t\"a, \"\"b\"\"\"\n");
  EXPECT_EQ(open_dataset(list).classes, (std::vector<std::string>{"a, \"b\"", "cat"}));
  write_text(list, "path,label\ra.png,\"cat\"\r\rb.png,dog\rc.png,\r");
  EXPECT_TRUE(contains(opening_error(list), "line 5: label is missing")) << opening_error(list);
  write_text(list, "path,label\ra.png,\"cat\"\r\nb.png,dog\nc.png,cat\r");
  EXPECT_EQ(open_dataset(list, {.held_out = 0}).train.labels(), (std::vector<std::int64_t>{0, 1, 0}));
}

TEST(Manifest, NamesTheLineThatIsWrong) {
  const TemporaryFolder folder;
  write_image(folder.path() / "a.png", noise(2, 2, 1));
  const fs::path list = folder.path() / "list.csv";
  const auto error = [&](const std::string& text) {
    write_text(list, text);
    return opening_error(list);
  };
  EXPECT_TRUE(contains(error(""), "is empty"));
  EXPECT_TRUE(contains(error("file,class\n"), "path and label"));
  EXPECT_TRUE(contains(error("path,label\n"), "lists no images"));
  EXPECT_TRUE(contains(error("path,label\na.png,x\na.png,\n"), "line 3: label is missing"));
  EXPECT_TRUE(contains(error("path,label\na.png,x\n,y\n"), "line 3: path is missing"));
  EXPECT_TRUE(contains(error("path,label\na.png,x,y\n"), "line 2: 3 fields instead of 2"));
  EXPECT_TRUE(contains(error("path,label\n\"a.png,x\n"), "quote is not closed"));
  EXPECT_TRUE(contains(error("path,label\n\"a.png\"b,x\n"), "closing quote"));
  EXPECT_TRUE(contains(error("path,label,split\na.png,x,later\n"), "split 'later'"));
  EXPECT_TRUE(contains(error("path,label,label\na.png,x,y\n"), "names the column label twice"));
  EXPECT_TRUE(contains(error("path,label,split\na.png,x,train\na.png,y,val\n"), "line 3: class 'y'"));
  EXPECT_TRUE(contains(error("path,label\nb.png,x\n"), "line 2: no file"));
  EXPECT_TRUE(contains(error("{\"path\": \"a.png\"}\n"), "line 1: label is missing"));
  EXPECT_TRUE(contains(error("{\"path\": \"a.png\", \"label\": 1}\n{\"path\": [1], \"label\": 1}\n"), "line 2"));
  EXPECT_TRUE(contains(error("{\"path\": \"a.png\", \"label\": 1}\n{broken\n"), "line 2: not a JSON object"));
  EXPECT_TRUE(
      contains(error("\n [{\"path\": \"a.png\", \"label\": 1}]\n"), "is a JSON list; write one object per line"));
  EXPECT_TRUE(contains(error(std::string("path,label\na.png\0,x\n", 20)), "not a text file"));
}

}  // namespace
}  // namespace violin::data
