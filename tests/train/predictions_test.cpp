// Two models compared image by image.
#include "violin/train/predictions.h"

#include "tests/temporary_folder.h"
#include "tests/train/helpers.h"
#include "violin/data/file.h"

namespace violin::tests {
namespace {

std::vector<train::Prediction> rows(const std::string& right) {  // '1' where the model is right
  std::vector<train::Prediction> result;
  for (std::size_t i = 0; i < right.size(); ++i)
    result.push_back({"image, " + std::to_string(i), "a \"cat\"", right[i] == '1' ? "a \"cat\"" : "dog", 0.5});
  return result;
}

TEST(Predictions, ComparisonCountsAndTests) {
  const train::Comparison same = train::compare(rows("1100"), rows("1100"));
  EXPECT_EQ(same.both, 2);
  EXPECT_EQ(same.neither, 2);
  EXPECT_EQ(same.p, 1);
  // 10 against 2 disagreements: 2 (1 + 12 + 66) / 4096
  const train::Comparison uneven = train::compare(rows("111111111100111"), rows("000000000011111"));
  EXPECT_EQ(uneven.both, 3);
  EXPECT_EQ(uneven.only_first, 10);
  EXPECT_EQ(uneven.only_second, 2);
  EXPECT_NEAR(uneven.p, 158.0 / 4096, 1e-12);
  // As even as can be: never above 1.
  EXPECT_EQ(train::compare(rows("10"), rows("01")).p, 1);
  // Many images: 5,000 against 5,300 is z = 2.946 with the correction, p = 0.0032.
  const train::Comparison many = train::compare(rows(std::string(5000, '1') + std::string(5300, '0')),
                                                rows(std::string(5000, '0') + std::string(5300, '1')));
  EXPECT_NEAR(many.p, 0.0032, 1e-4);
}

TEST(Predictions, AnImageMayBeListedTwice) {
  const auto repeated = [](std::vector<train::Prediction> rows) {
    rows[2].image = rows[0].image;
    return rows;
  };
  const train::Comparison twice = train::compare(repeated(rows("1100")), repeated(rows("1010")));
  EXPECT_EQ(twice.both, 1);
  EXPECT_EQ(twice.only_first, 1);
  EXPECT_EQ(twice.only_second, 1);
  EXPECT_EQ(twice.neither, 1);
  EXPECT_THROW(train::compare(repeated(rows("1100")), rows("1100")), Error);
  EXPECT_THROW(train::compare(rows("1100"), repeated(rows("1100"))), Error);
}

TEST(Predictions, FilesRoundTripAndMistakesAreNamed) {
  const TemporaryFolder folder;
  const std::filesystem::path file = folder.path() / "predictions.csv";
  write_file_atomically(file, train::to_csv(rows("101")));
  const std::vector<train::Prediction> back = train::read_predictions(file);
  ASSERT_EQ(back.size(), 3U);
  EXPECT_EQ(back[2].image, "image, 2");
  EXPECT_EQ(back[2].label, "a \"cat\"");
  EXPECT_TRUE(back[0].right());
  EXPECT_FALSE(back[1].right());
  write_file_atomically(file, "\xef\xbb\xbf" + train::to_csv(rows("101")));  // as spreadsheets save it
  EXPECT_EQ(train::read_predictions(file).size(), 3U);
  EXPECT_THROW(train::compare(rows("101"), rows("10")), Error);
  std::vector<train::Prediction> others = rows("101");
  others[1].image = "elsewhere";
  EXPECT_THROW(train::compare(rows("101"), others), Error);
  write_file_atomically(file, std::string_view("path,label\n"));
  EXPECT_THROW(train::read_predictions(file), Error);
  write_file_atomically(file, std::string_view("image,label,predicted,probability\na,b\n"));
  EXPECT_THROW(train::read_predictions(file), Error);
}

}  // namespace
}  // namespace violin::tests
