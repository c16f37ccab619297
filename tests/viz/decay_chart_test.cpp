#include "violin/viz/decay_chart.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/viz/well_formed.h"
#include "violin/error.h"

namespace violin::viz {
namespace {

DecayChart chart(std::size_t layers, std::size_t curves, std::int64_t heads, bool alpha) {
  DecayChart result;
  result.title = "Decay <&>";
  for (std::size_t c = 0; c < curves; ++c) result.curves.push_back("curve" + std::to_string(c));
  for (std::size_t l = 0; l < layers; ++l) result.blocks.push_back(static_cast<std::int64_t>(l));
  result.heads = heads;
  for (std::size_t i = 0; i < layers * curves * static_cast<std::size_t>(heads); ++i)
    result.log_gamma.push_back(-1.0 / static_cast<double>(i + 1));
  if (alpha) result.alpha.assign(layers * static_cast<std::size_t>(heads), -0.5);
  return result;
}

std::vector<Picture> maps(const Scene& scene, const DecayChart& chart) {
  std::vector<Picture> found;
  for (const Shape& shape : scene.shapes) {
    const auto* picture = std::get_if<Picture>(&shape);
    if (picture != nullptr && !picture->smooth && picture->image->width == chart.heads) found.push_back(*picture);
  }
  return found;
}

TEST(DecayChart, HasAPanelPerCurveAndOneForAlphaInsideThePicture) {
  for (const auto& [layers, curves, heads] :
       {std::tuple<std::size_t, std::size_t, std::int64_t>{12, 8, 6}, {1, 1, 1}, {32, 3, 16}, {2, 9, 3}}) {
    const DecayChart input = chart(layers, curves, heads, true);
    const Scene scene = decay_chart(input);
    const std::vector<Picture> panels = maps(scene, input);
    ASSERT_EQ(panels.size(), curves + 1);
    for (const Picture& panel : panels) {
      EXPECT_EQ(panel.image->height, static_cast<std::int64_t>(layers));
      EXPECT_GE(panel.box.x, 0);
      EXPECT_LE(panel.box.x + panel.box.width, scene.width);
      EXPECT_LE(panel.box.y + panel.box.height, scene.height);
    }
    EXPECT_EQ(xml_problem(to_svg(scene)), "");
  }
}

TEST(DecayChart, LongerReachIsLighter) {
  DecayChart input = chart(1, 1, 2, false);
  input.log_gamma = {-0.5, -0.001};
  const auto panels = maps(decay_chart(input), input);
  ASSERT_EQ(panels.size(), 1U);
  const std::uint8_t* shorter = panels[0].image->at(0, 0);
  const std::uint8_t* longer = panels[0].image->at(1, 0);
  EXPECT_GT(longer[0] + longer[1] + longer[2], shorter[0] + shorter[1] + shorter[2]);
}

TEST(DecayChart, DrawsDecaysOfExactlyOneAndNumbersThatAreNone) {
  DecayChart input = chart(2, 1, 1, true);
  input.log_gamma = {0, 0};
  EXPECT_EQ(xml_problem(to_svg(decay_chart(input))), "");
  input.log_gamma = {std::nan(""), -INFINITY};
  EXPECT_EQ(xml_problem(to_svg(decay_chart(input))), "");
}

TEST(DecayChart, RefusesSizesThatDoNotGoTogether) {
  DecayChart input = chart(2, 2, 3, true);
  input.alpha.pop_back();
  EXPECT_THROW(decay_chart(input), Error);
  input = chart(2, 2, 3, true);
  input.log_gamma.pop_back();
  EXPECT_THROW(decay_chart(input), Error);
  EXPECT_THROW(decay_chart(DecayChart{}), Error);
}

}  // namespace
}  // namespace violin::viz
