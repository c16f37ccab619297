#include "violin/viz/report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <regex>

#include "violin/viz/html.h"

namespace violin::viz {
namespace {

constexpr const char* kHostile = "<script>alert('1')</script>\"><img src=x onerror=alert(2)>&amp;";

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

Image noise(std::int64_t side, unsigned seed) {
  std::mt19937 random(seed);
  Image image(side, side);
  for (std::uint8_t& value : image.pixels) value = static_cast<std::uint8_t>(random());
  return image;
}

Prediction prediction(const std::string& name, bool right, std::int64_t side, unsigned seed) {
  return {noise(side, seed), {2, 2, {0, 0.5F, 0.25F, 1}}, name, name, name, right ? name : "other", 0.75, right};
}

RunReport run(const std::string& name, std::uint64_t seed, bool masked, unsigned pictures = 2, std::int64_t side = 8) {
  RunReport result;
  result.score = {name,
                  masked ? "masked" : "plain",
                  seed,
                  40.0 + static_cast<double>(seed),
                  41.0 + masked,
                  300,
                  1000,
                  masked ? 9 : 0,
                  123};
  result.facts = {{"model", name}};
  result.options = {{"seed", std::to_string(seed)}, {"lr", masked ? "0.001" : "0.002"}};
  for (int epoch = 1; epoch <= 3; ++epoch)
    result.epochs.push_back({static_cast<double>(epoch), 0.1 / epoch, 2.0 / epoch, 2.5 / epoch, 10.0 * epoch});
  if (masked) {
    DecayChart chart;
    chart.title = name;
    chart.curves = {"snake"};
    chart.blocks = {0, 1};
    chart.heads = 2;
    chart.log_gamma = {-0.1, -0.2, -0.3, -0.4};
    chart.alpha = {1, 1.5, -0.5, 1};
    result.decay = chart;
    result.means = MaskMeans{{0, 1}, 2, {0.1, 0.2, 0.3, 0.4}};
    result.masks = Scene{100, 100, "masks", kPaper, {Text{{1, 1}, "m"}}};
  }
  result.classes = {name, "other"};
  result.confusion = {{5, 2}, {0, 7}};
  result.predicted = "14 images of test";
  for (unsigned i = 0; i < pictures; ++i) {
    const std::string image = name + std::to_string(i);
    result.best.push_back(prediction(image, true, side, 1000 * static_cast<unsigned>(seed) + i));
    result.worst.push_back(prediction(image, false, side, 1000 * static_cast<unsigned>(seed) + 500 + i));
    result.shared.push_back(prediction("shared" + std::to_string(i), true, side, i));
  }
  return result;
}

// Every element is closed by the one that it belongs to.
void expect_balanced(const std::string& html) {
  std::vector<std::string> open;
  const std::regex tag("<(/?)([a-z0-9]+)([^>]*)>");
  for (std::sregex_iterator at(html.begin(), html.end(), tag), end; at != end; ++at) {
    const std::string name = (*at)[2], rest = (*at)[3];
    if (name == "meta" || name == "img" || name == "source" || rest.ends_with("/")) continue;
    if ((*at)[1] == "") {
      open.push_back(name);
    } else {
      ASSERT_FALSE(open.empty()) << "</" << name << "> closes nothing";
      ASSERT_EQ(open.back(), name);
      open.pop_back();
    }
  }
  EXPECT_TRUE(open.empty()) << open.back();
}

// What a browser would fetch: nothing but data in the page.
void expect_self_contained(const std::string& html) {
  for (const char* part : {"http:", "https:", "<script", "<link", "<iframe", "@import", "onerror=alert(2)>"})
    EXPECT_EQ(html.find(part), std::string::npos) << part;
  EXPECT_EQ(count(html, "src=\""), count(html, "src=\"data:"));
  EXPECT_EQ(count(html, "srcset=\""), count(html, "srcset=\"data:"));
  EXPECT_EQ(count(html, "url("), count(html, "url(data:"));
  EXPECT_NE(html.find("default-src 'none'"), std::string::npos);
}

TEST(Html, EscapesWhatCouldLeaveTextOrAttribute) {
  EXPECT_EQ(escape_html("a<b>&\"c'\x01 ü"), "a&lt;b&gt;&amp;&quot;c&#39; ü");
}

TEST(Html, Base64PadsToWholeGroups) {
  const auto encoded = [](std::string_view text) { return base64(Bytes(text.begin(), text.end())); };
  EXPECT_EQ(encoded(""), "");
  EXPECT_EQ(encoded("f"), "Zg==");
  EXPECT_EQ(encoded("fo"), "Zm8=");
  EXPECT_EQ(encoded("foobar"), "Zm9vYmFy");
}

TEST(Html, TicksAreRoundAndInside) {
  EXPECT_EQ(ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(ticks(1, 3, 6, 1), (std::vector<double>{1, 2, 3}));  // no half epochs
  EXPECT_EQ(ticks(7, 7, 5), (std::vector<double>{7}));
  for (const auto& [low, high] : {std::pair(-0.31, 0.27), std::pair(1.42, 2.28), std::pair(1e-5, 9.7e-4)}) {
    const std::vector<double> found = ticks(low, high, 5);
    EXPECT_GE(found.size(), 3U);
    EXPECT_LE(found.size(), 7U);
    EXPECT_GE(found.front(), low - 1e-12);
    EXPECT_LE(found.back(), high + 1e-12);
  }
}

TEST(Html, ChartsLeaveOutWhatIsNotANumberAndThinLongSeries) {
  LineChart chart{"Loss", "", "epoch", {{"train", {1, 2, 3}, {2, std::nan(""), 1}, 0, false}}, false, true};
  const std::string html = line_chart(chart);
  EXPECT_EQ(html.find("nan"), std::string::npos);
  EXPECT_EQ(count(html, "<polyline"), 1U);
  chart.series[0] = {"train", {1}, {2}, 0, false};
  EXPECT_NE(line_chart(chart).find("<circle"), std::string::npos);
  chart.series.clear();
  EXPECT_NE(line_chart(chart).find("Nothing was logged"), std::string::npos);
  Series longer{"train", {}, {}, 0, false};
  for (int i = 0; i < 100000; ++i) longer.x.push_back(i), longer.y.push_back(std::sin(i));
  chart.series = {longer};
  EXPECT_LT(line_chart(chart).size(), 20000U);
}

TEST(Html, PicturesAreHeldOnceAndWithinTheBudget) {
  Pictures pictures(6000);
  const std::string first = pictures.background(noise(16, 1));
  EXPECT_FALSE(first.empty());
  EXPECT_EQ(pictures.background(noise(16, 1)), first);
  EXPECT_NE(pictures.background(noise(16, 2)), first);
  for (unsigned i = 3; i < 30; ++i) pictures.background(noise(16, i));
  EXPECT_GT(pictures.left_out(), 0U);
  EXPECT_LE(pictures.styles().size(), 6000U);
  EXPECT_EQ(pictures.background(noise(16, 1)), first);  // what is there stays available
}

TEST(Html, ADarkSceneHasNoInkOfTheLightOne) {
  const Scene scene = {10, 10, "", kPaper, {Text{{0, 0}, "a"}, Rectangle{.box = {}, .fill = kPanel}}};
  const Scene dark = darkened(scene);
  EXPECT_NE(dark.background, kPaper);
  EXPECT_NE(std::get<Text>(dark.shapes[0]).color, kInk);
  EXPECT_NE(std::get<Rectangle>(dark.shapes[1]).fill, kPanel);
}

TEST(Spread, IsTheSampleDeviation) {
  EXPECT_EQ(spread({}).count, 0U);
  EXPECT_EQ(to_string(spread({})), "–");
  EXPECT_EQ(spread({4}).mean, 4);
  EXPECT_FALSE(spread({4}).deviation);
  const Spread three = spread({1, 2, 6});
  EXPECT_DOUBLE_EQ(three.mean, 3);
  EXPECT_DOUBLE_EQ(*three.deviation, std::sqrt(7.0));
  EXPECT_EQ(to_string(spread({1, 2}), true), "+1.50 ± 0.71");
}

TEST(Compare, GroupsSeedsAndTakesDifferencesSeedBySeed) {
  std::vector<RunScore> runs;
  const auto add = [&](const std::string& name, const std::string& group, std::uint64_t seed, double test, int mask) {
    runs.push_back({name, group, seed, test + 1, test, 1000, 500, mask, 100});
  };
  add("violin-10", "a", 10, 52, 9);
  add("vanilla-11", "b", 11, 60, 0);
  add("violin-11", "a", 11, 61, 9);
  add("vanilla-10", "b", 10, 50, 0);
  add("vanilla-12", "b", 12, 99, 0);  // a seed that only one of them has
  const std::vector<RunGroup> groups = compare(runs);
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].name, "violin");
  EXPECT_EQ(groups[1].name, "vanilla");
  EXPECT_TRUE(groups[1].reference);  // the only one without a mask
  EXPECT_EQ(groups[0].difference.count, 2U);
  EXPECT_DOUBLE_EQ(groups[0].difference.mean, 1.5);
  EXPECT_DOUBLE_EQ(groups[0].test.mean, 56.5);
  EXPECT_DOUBLE_EQ(groups[0].val.mean, 57.5);
}

TEST(Compare, RunsWithTheSameSeedCountAsOne) {
  std::vector<RunScore> runs;
  for (const auto& [seed, test] : {std::pair(1, 50.0), std::pair(2, 60.0), std::pair(2, 62.0)})
    runs.push_back({"violin", "a", static_cast<std::uint64_t>(seed), test, test, 1000, 500, 9, 100});
  for (const auto& [seed, test] : {std::pair(1, 49.0), std::pair(2, 58.0)})
    runs.push_back({"vanilla", "b", static_cast<std::uint64_t>(seed), test, test, 1000, 500, 0, 100});
  const std::vector<RunGroup> groups = compare(runs);
  EXPECT_EQ(groups[0].members.size(), 3U);
  EXPECT_EQ(groups[0].seeds, 2U);
  EXPECT_EQ(groups[0].test.count, 2U);
  EXPECT_DOUBLE_EQ(groups[0].test.mean, 55.5);
  EXPECT_EQ(groups[0].difference.count, 2U);
  EXPECT_DOUBLE_EQ(groups[0].difference.mean, 2);
}

TEST(Compare, TakesNoDifferenceBetweenOtherImages) {
  std::vector<RunScore> runs(2);
  runs[0] = {"violin", "a", 0, 50, 50, 1000, 500, 9, 100, "val", "test"};
  runs[1] = {"vanilla", "b", 0, 49, 49, 1000, 500, 0, 100, "other val", "test"};
  EXPECT_EQ(compare(runs)[0].difference.count, 1U);  // on test, which is the same
  runs[1].test_set = "other test";
  RunGroup ours = compare(runs)[0];
  EXPECT_TRUE(ours.other_images);
  EXPECT_EQ(ours.difference.count, 0U);
  EXPECT_NE(verdict(ours, compare(runs)[1], 1000).find("other test images"), std::string::npos);
  runs[0].test_top1.reset();
  ours = compare(runs)[0];
  EXPECT_NE(verdict(ours, compare(runs)[1], 1000).find("other validation images"), std::string::npos);
  runs[1].seed = 1;  // held out by another seed: nothing is compared anyway
  EXPECT_FALSE(compare(runs)[0].other_images);
}

TEST(AttentionSheet, HasAPictureUpToItsLimit) {
  const std::size_t limit = attention_sheet_limit(2);
  const auto pixels = [](std::size_t count) {
    const Scene scene = attention_sheet(std::vector<AttentionEntry>(count, {Image(2, 2), {1, 1, {0.5F}}, "", ""}));
    return 4 * scene.width * scene.height;
  };
  EXPECT_LE(pixels(limit), static_cast<double>(kMaxPixels));
  EXPECT_GT(pixels(limit + 1), static_cast<double>(kMaxPixels));
}

TEST(AttentionSheet, PicturesKeepTheProportionsOfTheImage) {
  for (const auto& [width, height] : {std::pair{96, 64}, {64, 96}, {12, 4}, {32, 32}}) {
    const std::vector<AttentionEntry> entries = {{Image(width, height), {2, 3, std::vector<float>(6)}, "", ""}};
    const Scene scene = attention_sheet(entries);
    int pictures = 0;
    for (const Shape& shape : scene.shapes) {
      const auto* picture = std::get_if<Picture>(&shape);
      if (picture == nullptr) continue;
      ++pictures;
      EXPECT_NEAR(picture->box.width / picture->box.height, static_cast<double>(width) / height, 1e-9);
      const Image& image = *picture->image;  // of whole pixels
      EXPECT_NEAR(image.width * height, image.height * width, std::max(width, height));
      EXPECT_LE(picture->box.x + picture->box.width, scene.width);
      EXPECT_LE(picture->box.y + picture->box.height, scene.height);
    }
    EXPECT_EQ(pictures, 2);
  }
}

TEST(Compare, NamesOfGroupsStayDistinct) {
  std::vector<RunScore> runs(4);
  runs[0].name = "run-0", runs[0].group = "a";
  runs[1].name = "run-1", runs[1].group = "a";
  runs[2].name = "run-2", runs[2].group = "b";
  runs[3].name = "run-3", runs[3].group = "b";
  const std::vector<RunGroup> groups = compare(runs);
  EXPECT_EQ(groups[0].name, "run-0, run-1");
  EXPECT_EQ(groups[1].name, "run-2, run-3");
}

TEST(Compare, SaysWhatTheSeedsCanTell) {
  RunGroup ours, reference;
  ours.name = "violin", reference.name = "vanilla", ours.on_test = true;
  const auto say = [&](const std::vector<double>& differences) {
    ours.difference = spread(differences);
    return verdict(ours, reference, 300);
  };
  EXPECT_NE(say({}).find("no seed in common"), std::string::npos);
  EXPECT_NE(say({3}).find("one seed"), std::string::npos);
  EXPECT_NE(say({1, 3}).find("do not tell"), std::string::npos);
  EXPECT_NE(say({0.3, 0.3}).find("do not tell"), std::string::npos);  // one image each: equal by chance
  EXPECT_NE(say({3, 3.2, 2.9, 3.1}).find("a gain"), std::string::npos);
  EXPECT_NE(say({-3, -3.2, -2.9, -3.1}).find("a loss"), std::string::npos);
}

TEST(Report, OneRunHasEverySection) {
  Report report{"a run", "footer", {run("r", 0, true)}, {Scene{10, 10, "curves", kPaper, {}}}};
  report.runs[0].notes = {"a note"};
  const std::string html = report_html(report);
  for (const char* part :
       {"Configuration", "All options", ">Loss<", ">Right on validation<", ">Learning rate<", "What the mask learned",
        "α, by head", "γ and α as numbers", "The mask around three patches", "Surest and right", "Surest and wrong",
        "Confusion", "The curves", "a note", "footer", "prefers-color-scheme:dark", "name=\"viewport\""})
    EXPECT_NE(html.find(part), std::string::npos) << part;
  expect_balanced(html);
  expect_self_contained(html);
}

TEST(Report, SeveralRunsAreCompared) {
  Report report{"runs", "", {run("violin-0", 0, true), run("violin-1", 1, true), run("vanilla-0", 0, false)}, {}};
  report.notes = {"a note about all"};
  const std::string html = report_html(report);
  for (const char* part : {"Side by side", "against vanilla-0", "42.00 ± 0.00%", "+1.00", "Options that differ",
                           "What the masks learned", "The same images", "Run by run", "images/s", "a note about all"})
    EXPECT_NE(html.find(part), std::string::npos) << part;
  // A column each beside the shared images.
  EXPECT_NE(html.find("<tr><th></th><td>violin-0</td><td>violin-1</td><td>vanilla-0</td></tr>"), std::string::npos);
  expect_balanced(html);
  expect_self_contained(html);
}

TEST(Report, ARunWithoutAnythingIsStillAPage) {
  RunReport empty;
  empty.score.name = "empty";
  for (const std::size_t runs : {1U, 2U}) {
    const std::string html = report_html({"t", "f", std::vector<RunReport>(runs, empty), {}});
    expect_balanced(html);
    EXPECT_NE(html.find("Nothing was logged"), std::string::npos);
  }
}

TEST(Report, HostileNamesAreText) {
  for (const bool many : {false, true}) {
    Report report{kHostile, kHostile, {run(kHostile, 0, true)}, {}};
    if (many) report.runs.push_back(run(std::string(kHostile) + "2", 0, false));
    for (RunReport& each : report.runs) {
      each.facts = each.options = {{kHostile, kHostile}};
      each.notes = {kHostile};
      each.predicted = kHostile;
      each.decay = report.runs[0].decay;
      each.decay->curves = {kHostile};
      for (Prediction& p : each.shared) p.label = p.guess = kHostile;
    }
    const std::string html = report_html(report);
    expect_self_contained(html);
    expect_balanced(html);
    EXPECT_GT(count(html, "&lt;script&gt;"), 5U);
  }
}

TEST(Report, StaysBelowFiveMegabytes) {
  Report report{"many", "", {}, {}};
  for (std::uint64_t i = 0; i < 12; ++i) {
    report.runs.push_back(run("run-" + std::to_string(i), i, i % 2 == 0, 8, 112));
    RunReport& last = report.runs.back();
    last.classes.assign(30, "a class with a name of some length");
    last.confusion.assign(30, std::vector<std::int64_t>(30, 7));
  }
  const std::string html = report_html(report);
  EXPECT_LT(html.size(), 5'000'000U);
  EXPECT_GT(html.size(), 3'000'000U);
  EXPECT_NE(html.find("pictures were left out"), std::string::npos);
  expect_balanced(html);
}

}  // namespace
}  // namespace violin::viz
