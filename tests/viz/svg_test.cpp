#include <gtest/gtest.h>

#include <string>

#include "tests/viz/well_formed.h"
#include "violin/viz/scene.h"

namespace violin::viz {
namespace {

Bytes from_base64(std::string_view text) {
  const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  Bytes bytes;
  std::uint32_t bits = 0;
  int have = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = bits << 6 | static_cast<std::uint32_t>(letters.find(c));
    have += 6;
    if (have >= 8) bytes.push_back(static_cast<std::uint8_t>(bits >> (have -= 8)));
  }
  return bytes;
}

// Every PNG in the text, decoded.
std::vector<Image> embedded_images(const std::string& svg) {
  constexpr std::string_view kPrefix = "data:image/png;base64,";
  std::vector<Image> images;
  for (std::size_t at = 0; (at = svg.find(kPrefix, at)) != std::string::npos;) {
    at += kPrefix.size();
    images.push_back(decode_image(from_base64(std::string_view(svg).substr(at, svg.find('"', at) - at)), "embedded"));
  }
  return images;
}

Scene scene_of(std::vector<Shape> shapes) {
  return {.width = 100, .height = 50, .title = "A <title> & more", .shapes = std::move(shapes)};
}

TEST(WellFormedCheck, SeesWhatIsWrong) {
  EXPECT_EQ(xml_problem("<a b=\"c\"><d/>x &amp; y</a>"), "");
  for (const char* bad : {"<a>", "<a></b>", "<a b=c/>", "a & b", "<a b=\"1\" b=\"2\"/>", "<a b=\"<\"/>", "</a>"}) {
    EXPECT_NE(xml_problem(bad), "") << bad;
  }
}

TEST(Svg, IsWellFormedAndEscapesText) {
  const std::string svg =
      to_svg(scene_of({Text{.baseline = {1.005, 2}, .text = "<b> & \"γ\"\x02", .size = 12, .bold = true},
                       Polyline{{{0, 0}, {1, 1}, {2, 0}}, {rgb(1), rgb(2)}, 1}, Polyline{{{0, 0}}, {rgb(1)}, 1},
                       Rectangle{.box = {1, 2, 3, 4}, .stroke = kInk, .stroke_width = 1, .radius = 2},
                       Dot{.center = {5, 5}, .radius = 2, .fill = kInk.with_alpha(0.5)}}));
  EXPECT_EQ(xml_problem(svg), "");
  EXPECT_NE(svg.find("&lt;b&gt; &amp; &quot;γ&quot; <"), std::string::npos);
  EXPECT_NE(svg.find("<title>A &lt;title&gt; &amp; more</title>"), std::string::npos);
  EXPECT_NE(svg.find("fill-opacity=\"0.5\""), std::string::npos);
}

TEST(Svg, HasABackgroundAndNothingFromOutside) {
  const std::string svg = to_svg(scene_of({Picture{.box = {0, 0, 2, 2}, .image = std::make_shared<Image>(2, 2)}}));
  EXPECT_NE(svg.find("<rect x=\"0\" y=\"0\" width=\"100\" height=\"50\" fill=\"#ffffff\"/>"), std::string::npos);
  EXPECT_EQ(count(svg, "http"), 1U);  // the name space
  EXPECT_EQ(count(svg, "href"), count(svg, "href=\"data:") + count(svg, "href=\"#"));
}

TEST(Svg, RunsOfOneColourAreOneLine) {
  const Polyline line = {{{0, 0}, {1, 0}, {2, 0}, {3, 0}}, {rgb(1), rgb(1), rgb(2)}, 1};
  EXPECT_EQ(count(to_svg(scene_of({line})), "<polyline"), 2U);
}

TEST(Svg, EmbedsImagesAsTheyAre) {
  auto image = std::make_shared<Image>(5, 3);
  for (std::size_t i = 0; i < image->pixels.size(); ++i) image->pixels[i] = static_cast<std::uint8_t>(i * 5);
  const auto images = embedded_images(to_svg(scene_of({Picture{.box = {0, 0, 5, 3}, .image = image}})));
  ASSERT_EQ(images.size(), 1U);
  EXPECT_EQ(images[0], *image);
}

TEST(Svg, HoldsASharedImageOnce) {
  auto image = std::make_shared<Image>(5, 3);
  auto other = std::make_shared<Image>(4, 4);
  const std::string svg =
      to_svg(scene_of({Picture{.box = {0, 0, 5, 3}, .image = image}, Picture{.box = {10, 0, 50, 30}, .image = image},
                       Picture{.box = {0, 20, 4, 4}, .image = other}}));
  EXPECT_EQ(xml_problem(svg), "");
  EXPECT_EQ(embedded_images(svg).size(), 2U);
  EXPECT_EQ(count(svg, "<use "), 2U);
  EXPECT_NE(svg.find("translate(10 0) scale(50 30)"), std::string::npos);
}

}  // namespace
}  // namespace violin::viz
