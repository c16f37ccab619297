// Files cut off at every length and changed at random: an Error or a valid result, and nothing else. Sanitizer builds
// give this its teeth; the tensors of a file that is accepted are read at both ends.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/checkpoint/craft.h"
#include "tests/checkpoint/touch.h"
#include "tests/temporary_folder.h"
#include "violin/checkpoint/checkpoint.h"

namespace violin::checkpoint {
namespace {

std::vector<std::string> samples() {
  return {golden("checkpoint/protocol_2.pth"), golden("checkpoint/protocol_5.pth"), golden("checkpoint/legacy.pth"),
          golden("checkpoint/tensors.safetensors")};
}

// Whether it was accepted.
bool survives(std::string_view text) {
  // A heap block of exactly this size, so that a step behind its end is seen.
  const std::vector<std::byte> exact(bytes_of(text).begin(), bytes_of(text).end());
  try {
    touch(parse_document(exact, "sample"));
    return true;
  } catch (const Error& error) {
    EXPECT_TRUE(has(error.what(), "'sample'"));
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return false;
  }
}

TEST(Robustness, EveryTruncationIsRefused) {
  for (const std::string& path : samples()) {
    const std::string whole = contents(path);
    EXPECT_TRUE(survives(whole)) << path;
    for (std::size_t length = 0; length < whole.size(); ++length) {
      EXPECT_FALSE(survives(std::string_view(whole).substr(0, length))) << path << " cut at " << length;
    }
  }
}

TEST(Robustness, RandomChangesGiveAnErrorOrAValidFile) {
  std::mt19937 random(20240607);
  for (const std::string& path : samples()) {
    const std::string whole = contents(path);
    int accepted = 0;
    for (int round = 0; round < 3000; ++round) {
      std::string text = whole;
      const unsigned changes = 1 + random() % 4;
      for (unsigned i = 0; i < changes; ++i) {
        const std::size_t at = random() % text.size();
        switch (random() % 5) {
          case 0:
            text[at] = static_cast<char>(random());
            break;
          case 1:
            text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
            break;
          case 2:
            text.erase(at, 1 + random() % 8);
            break;
          case 3:
            text.insert(at, text.substr(random() % text.size(), random() % 16));
            break;
          default:
            for (std::size_t j = at; j < std::min(at + 4, text.size()); ++j) text[j] = '\xff';
        }
      }
      accepted += survives(text) ? 1 : 0;
    }
    EXPECT_LT(accepted, 3000) << path;
  }
}

TEST(Robustness, TensorsOfChangedFilesCanBeUsed) {
  const TemporaryFolder folder;
  std::mt19937 random(7);
  for (const std::string& path : samples()) {
    const std::string whole = contents(path);
    for (int round = 0; round < 100; ++round) {
      std::string text = whole;
      text[random() % text.size()] = static_cast<char>(random());
      put(folder.file("a"), text);
      try {
        for (const auto& [name, tensor] : TensorFile::open(folder.path() / "a").tensors()) tensor.clone();
      } catch (const Error& error) {
        EXPECT_TRUE(has(error.what(), folder.file("a")));
      }
    }
  }
}

}  // namespace
}  // namespace violin::checkpoint
