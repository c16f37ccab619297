#include <gtest/gtest.h>

#include "tests/curves/helpers.h"

namespace violin::curves {
namespace {

std::vector<std::string> names_of(const std::vector<Curve>& curves) {
  std::vector<std::string> names;
  names.reserve(curves.size());
  for (const Curve& curve : curves) names.push_back(curve.name());
  return names;
}

TEST(CurveNames, AreReadBackAsWritten) {
  for (const std::string& name : curve_names()) EXPECT_EQ(parse_curve(name).name(), name);
  for (const char* name : {"frame:zigzag", "frame:hilbert_T", "random:7", "frame:random:7", "frame:manhattan"}) {
    EXPECT_EQ(parse_curve(name).name(), name);
  }
  EXPECT_EQ(parse_curve("hilbert_T"), (Curve{.kind = Kind::kHilbert, .transposed = true}));
  EXPECT_EQ(parse_curve("frame:random:18446744073709551615"),
            (Curve{.kind = Kind::kRandom, .per_frame = true, .seed = 18446744073709551615U}));
}

TEST(CurveNames, HaveOneCanonicalForm) {
  EXPECT_EQ(parse_curve("morton").name(), "peano");
  EXPECT_EQ(parse_curve("morton_T").name(), "peano_T");
  EXPECT_EQ(parse_curve("random:0").name(), "random");
  EXPECT_EQ(parse_curve("random:007").name(), "random:7");
}

TEST(CurveNames, NameEveryCurveOnce) {
  EXPECT_EQ(curve_names(), (std::vector<std::string>{"snake", "snake_T", "hilbert", "hilbert_T", "peano", "peano_T",
                                                     "zigzag", "zigzag_T", "z", "z_T", "random", "manhattan"}));
}

TEST(CurveNames, TheNearestIsSuggestedForAnUnknownOne) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"hilbrt", "hilbert"},     {"hilbert_t", "hilbert_T"}, {"Snake", "snake"},
      {"mortn", "morton"},       {"zig-zag", "zigzag"},      {"pean_T", "peano_T"},
      {"manhatan", "manhattan"}, {"ramdom", "random"},       {"frame:snak", "frame:snake"},
  };
  for (const auto& [wrong, right] : cases) {
    const std::string message = refusal([&] { parse_curve(wrong); });
    std::string expected = "unknown curve '";
    expected.append(wrong).append("'; did you mean '").append(right).append("'?");
    EXPECT_TRUE(message.starts_with(expected)) << message;
    EXPECT_TRUE(contains(message, "known: snake, snake_T, hilbert")) << message;
  }
}

TEST(CurveNames, NothingIsSuggestedWhereNothingIsNear) {
  for (const char* name : {"", "0", "frame:", "????"}) {
    const std::string message = refusal([&] { parse_curve(name); });
    EXPECT_TRUE(contains(message, "unknown curve")) << name;
    EXPECT_FALSE(contains(message, "did you mean")) << message;
  }
}

TEST(CurveNames, MessagesStayOnOneShortLine) {
  const std::string message = refusal([] { parse_curve("snake\n" + std::string(100'000, 'x')); });
  EXPECT_FALSE(contains(message, "\n"));
  EXPECT_LT(message.size(), 400U);
}

TEST(CurveNames, RandomAndManhattanHaveNoTranspose) {
  EXPECT_TRUE(contains(refusal([] { parse_curve("random_T"); }), "random has no transpose; write random"));
  EXPECT_TRUE(contains(refusal([] { parse_curve("frame:manhattan_T"); }), "has no transpose; write frame:manhattan"));
  const Grid grid = {0, 2, 2};
  EXPECT_NE(refusal([&] { ranks({.kind = Kind::kRandom, .transposed = true}, grid); }), "");
  const std::vector<Curve> curves = {{.kind = Kind::kManhattan, .transposed = true}};
  EXPECT_NE(refusal([&] { coordinates(curves, grid); }), "");
}

TEST(CurveNames, SeedsAreWholeNumbers) {
  for (const char* name : {"random:", "random:-1", "random:x", "random:1.5", "random:7_T", "random: 7",
                           "random:18446744073709551616", "frame:random:"}) {
    EXPECT_TRUE(contains(refusal([&] { parse_curve(name); }), "the seed must be a whole number")) << name;
  }
}

TEST(CurveSets, TheDefaultIsThePublishedOrder) {
  EXPECT_EQ(names_of(parse_curves("violin")), (std::vector<std::string>{"snake", "snake_T", "hilbert", "hilbert_T",
                                                                        "peano", "peano_T", "zigzag", "zigzag_T"}));
  EXPECT_EQ(names_of(parse_curves("normal")), (std::vector<std::string>{"snake", "hilbert", "peano", "zigzag"}));
  EXPECT_EQ(names_of(parse_curves("transposed")),
            (std::vector<std::string>{"snake_T", "hilbert_T", "peano_T", "zigzag_T"}));
}

TEST(CurveSets, AListIsTakenInItsOrder) {
  EXPECT_EQ(names_of(parse_curves("zigzag_T, morton ,frame:z")),
            (std::vector<std::string>{"zigzag_T", "peano", "frame:z"}));
  EXPECT_EQ(names_of(parse_curves("random:1,random:2")), (std::vector<std::string>{"random:1", "random:2"}));
  EXPECT_EQ(names_of(parse_curves("z,normal")), (std::vector<std::string>{"z", "snake", "hilbert", "peano", "zigzag"}));
  for (const std::string& name : curve_set_names()) EXPECT_FALSE(parse_curves(name).empty());
}

TEST(CurveSets, MistakesAreNamed) {
  EXPECT_TRUE(contains(refusal([] { parse_curves("violn"); }), "did you mean 'violin'?"));
  EXPECT_TRUE(contains(refusal([] { parse_curves("z,hilbrt"); }), "'hilbrt'; did you mean 'hilbert'?"));
  EXPECT_TRUE(contains(refusal([] { parse_curves("peano,z,morton"); }), "peano is named twice"));
  EXPECT_TRUE(contains(refusal([] { parse_curves("violin,snake"); }), "snake is named twice"));
  for (const char* list : {"", " ", "z,", ",z", "z,,snake"}) {
    EXPECT_TRUE(contains(refusal([&] { parse_curves(list); }), "expected a set")) << list;
  }
}

}  // namespace
}  // namespace violin::curves
