#include "violin/data/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "tests/temporary_folder.h"
#include "violin/error.h"

namespace violin {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  const Bytes bytes = read_file(path, 1 << 20);
  return {bytes.begin(), bytes.end()};
}

TEST(WriteFileAtomically, MakesAndReplacesFilesAndLeavesNothingElse) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "a.txt";
  write_file_atomically(path, "first");
  EXPECT_EQ(text_of(path), "first");
  write_file_atomically(path, "second, longer");
  EXPECT_EQ(text_of(path), "second, longer");
  write_file_atomically(path, "");
  EXPECT_EQ(text_of(path), "");
  EXPECT_EQ(folder.entries(), 1U);
}

TEST(WriteFileAtomically, KeepsLinksAndPermissions) {
  const TemporaryFolder folder;
  write_file_atomically(folder.path() / "real", "old");
  chmod(folder.file("real").c_str(), 0640);
  fs::create_symlink("real", folder.path() / "link");
  write_file_atomically(folder.path() / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder.path() / "link"));
  EXPECT_EQ(text_of(folder.path() / "real"), "new");
  struct stat status = {};
  ASSERT_EQ(stat(folder.file("real").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640U);
}

TEST(WriteFileAtomically, LeavesNothingBehindWhenItFails) {
  const TemporaryFolder folder;
  EXPECT_THROW(write_file_atomically(folder.path() / "missing" / "a", "x"), Error);
  fs::create_directory(folder.path() / "taken");
  EXPECT_THROW(write_file_atomically(folder.path() / "taken", "x"), Error);
  EXPECT_EQ(folder.entries(), 1U);
  EXPECT_TRUE(fs::is_empty(folder.path() / "taken"));
}

TEST(WriteFileAtomically, WritesDevicesInPlaceAndReportsAFullOne) {
  if (!fs::is_character_file("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  write_file_atomically("/dev/null", "x");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_THROW(write_file_atomically("/dev/full", "x"), Error);
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
}

TEST(ReadFile, NamesTheFileThatItCannotRead) {
  const TemporaryFolder folder;
  for (const fs::path& path : {folder.path() / "missing.bin", folder.path()}) {
    try {
      read_file(path, 10);
      FAIL() << path;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos) << error.what();
    }
  }
}

TEST(ReadFile, RefusesMoreThanTheLimitAlsoOfEndlessFiles) {
  const TemporaryFolder folder;
  write_file_atomically(folder.path() / "ten", "0123456789");
  EXPECT_EQ(read_file(folder.path() / "ten", 10).size(), 10U);
  EXPECT_THROW(read_file(folder.path() / "ten", 9), Error);
  EXPECT_THROW(read_file("/dev/zero", 100000), Error);
}

}  // namespace
}  // namespace violin
