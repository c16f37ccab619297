#include "violin/text.h"

#include <gtest/gtest.h>

#include <vector>

namespace violin {
namespace {

TEST(Text, WhatComesFromOutsideStaysOnOneLineAndSteersNoTerminal) {
  EXPECT_EQ(printable("naïve 猫 🐈"), "naïve 猫 🐈");
  EXPECT_EQ(printable("a\nb\x1b[2J\x7f"), "a\\x0ab\\x1b[2J\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");           // a control character in two bytes
  EXPECT_EQ(printable("caf\xe9"), "caf\\xe9");              // Latin-1
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // half of a pair
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(printable("\xe7\x8c"), "\\xe7\\x8c");  // cut in the middle
}

TEST(Text, LongWordsAreCutBetweenCharacters) {
  EXPECT_EQ(printable("abcdef", 6), "abcdef");
  EXPECT_EQ(printable("abcdefg", 6), "abcdef...");
  EXPECT_EQ(printable("猫猫猫", 4), "猫猫...");
  EXPECT_EQ(in_quotes(std::string(500, 'x')), "'" + std::string(120, 'x') + "...'");
  EXPECT_EQ(file_in_quotes(std::string(500, 'x')), "'" + std::string(500, 'x') + "'");
}

TEST(Text, KnowsUtf8) {
  EXPECT_TRUE(is_utf8(""));
  EXPECT_TRUE(is_utf8("é猫🐈"));
  for (const char* wrong : {"\xe9", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\xe7\x8c"})
    EXPECT_FALSE(is_utf8(wrong)) << printable(wrong);
}

TEST(Text, CountsAndSuggests) {
  EXPECT_EQ(counted(0, "image"), "0 images");
  EXPECT_EQ(counted(1, "image"), "1 image");
  EXPECT_EQ(counted(2, "image"), "2 images");
  const std::vector<std::string> words = {"snake", "hilbert", "zigzag"};
  EXPECT_EQ(joined(words), "snake, hilbert, zigzag");
  EXPECT_EQ(nearest_word("HILBET", words), "hilbert");
  EXPECT_EQ(nearest_word("", words), "");
  EXPECT_EQ(nearest_word("???", words), "");
  EXPECT_EQ(did_you_mean("zigzog", words, "."), "; did you mean 'zigzag'?");
  EXPECT_EQ(did_you_mean("???", words), "");
  EXPECT_EQ(did_you_mean("???", words, "."), ".");
}

}  // namespace
}  // namespace violin
