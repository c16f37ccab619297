#include "violin/checkpoint/zip.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/craft.h"

namespace violin::checkpoint {
namespace {

std::string zip_error(const std::string& archive) {
  return error_of([&] { read_zip(bytes_of(archive)); });
}

class Zip : public ::testing::TestWithParam<bool> {
 protected:
  static ZipOptions options() { return {.zip64 = GetParam()}; }
};

TEST_P(Zip, GivesEveryEntryInOrder) {
  const std::string archive = zip({{"m/b", "second"}, {"m/a", ""}, {"m/c/d", "deep"}}, options());
  const auto entries = read_zip(bytes_of(archive));
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(entries[0].name, "m/b");
  EXPECT_EQ(as_text(entries[0].bytes), "second");
  EXPECT_EQ(entries[1].bytes.size(), 0U);
  EXPECT_EQ(as_text(entries[2].bytes), "deep");
}

TEST_P(Zip, EntriesOutsideTheArchiveAreNamed) {
  EXPECT_TRUE(has(zip_error(zip({{"m/a", "x"}, {"m/far", "x", 0, 0, 1000}}, options())), "'m/far'"));
  EXPECT_TRUE(has(zip_error(zip({{"m/a", "x"}, {"m/long", "x", 0, 0, 0, 1000}}, options())), "'m/long'"));
  EXPECT_TRUE(has(zip_error(zip({{"m/neg", "x", 0, 0, -1}, {"m/b", "x"}}, options())), "'m/neg'"));
  EXPECT_TRUE(has(zip_error(zip({{"m/neg", "x", 0, 0, 0, -2}, {"m/b", "x"}}, options())), "'m/neg'"));
}

TEST_P(Zip, OverlappingEntriesAreNamed) {
  // The bytes of the first, as long as it says, run into the second.
  EXPECT_TRUE(has(zip_error(zip({{"m/a", "x", 0, 0, 0, 5}, {"m/b", "yyyyyyyy"}}, options())), "'m/b' overlaps 'm/a'"));
}

TEST_P(Zip, DirectoryMustBeWhereTheEndRecordSays) {
  ZipOptions wrong = options();
  wrong.directory_shift = -3;
  EXPECT_TRUE(has(zip_error(zip({{"m/a", "x"}}, wrong)), "directory"));
  wrong = options();
  wrong.entries_shift = 1;
  EXPECT_TRUE(has(zip_error(zip({{"m/a", "x"}}, wrong)), "announces 2 entries"));
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, Zip, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Zip64" : "Zip32"; });

TEST(ZipNames, ThatLeadOutAreRefused) {
  for (const char* name : {"../evil", "m/../../evil", "/etc/passwd", "m\\..\\evil", "C:/evil", "..", "m/.."}) {
    EXPECT_TRUE(has(zip_error(zip({{name, "x"}})), "leads out")) << name;
  }
  EXPECT_TRUE(has(zip_error(zip({{std::string("a\0b", 3), "x"}})), "leads out"));
  EXPECT_EQ(read_zip(bytes_of(zip({{"m/..a/b..", "x"}}))).size(), 1U);
}

TEST(ZipNames, ThatOccurTwiceOrDifferAreRefused) {
  EXPECT_TRUE(has(zip_error(zip({{"m/a", "x"}, {"m/a", "y"}})), "'m/a' occurs twice"));
  EXPECT_TRUE(has(zip_error(zip({{"m/a", "x", 0, 0, 0, 0, "m/b"}})), "'m/a'"));
}

TEST(ZipEntries, EncryptedAreRefusedAndCompressedAreMarked) {
  EXPECT_TRUE(has(zip_error(zip({{"m/a", "x", 0, 1}})), "encrypted"));
  EXPECT_TRUE(read_zip(bytes_of(zip({{"m/a", "x", 8}}))).front().compressed);
  EXPECT_TRUE(has(parse_error(zip({{"m/data.pkl", "x", 8}})), "'m/data.pkl' is compressed"));
}

TEST(ZipEnd, ACutOffFileIsSaidToBe) {
  const std::string archive = zip({{"m/a", "x"}});
  EXPECT_TRUE(has(zip_error(archive.substr(0, archive.size() - 1)), "cut off"));
  EXPECT_TRUE(has(zip_error("PK\x03\x04"), "cut off"));
}

}  // namespace
}  // namespace violin::checkpoint
