// Words of options and files, and JSON: whatever the text, an Error of one line or a value that can be written again.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/require.h"
#include "violin/curves/curves.h"
#include "violin/data/augment.h"
#include "violin/data/transforms.h"
#include "violin/error.h"
#include "violin/nn/json_text.h"
#include "violin/size.h"

namespace violin {
namespace {

void check_grid(std::string_view text) {
  const curves::Grid grid = curves::parse_grid(text);
  require(grid.cells() >= 1 && grid.cells() <= curves::kMaxCells);
  require(curves::parse_grid(grid.to_string()) == grid);
}

void check_curves(std::string_view text) {
  for (const curves::Curve& curve : curves::parse_curves(text)) require(curves::parse_curve(curve.name()) == curve);
}

void check_size(std::string_view text) {
  const auto size = parse_size(text);
  require(!size || (parse_size(to_string(*size)) == size && parse_size(short_text(*size)) == size));
}

void check_augmentation(std::string_view text) {
  const data::RandAugmentOptions options = data::parse_rand_augment(text);
  Image image(5, 4);
  for (std::size_t i = 0; i < image.pixels.size(); ++i) image.pixels[i] = static_cast<std::uint8_t>(i * 4);
  data::Random random(text.size(), data::Purpose::kAugment);
  data::rand_augment(image, options, random);
  require(image.width == 5 && image.height == 4 && image.pixels.size() == 60);
}

void check_statistics(std::string_view text) {
  const data::Normalisation values = data::parse_statistics(text);
  for (std::size_t c = 0; c < 3; ++c) {
    require(values.mean[c] >= 0 && values.mean[c] <= 1 && values.deviation[c] > 0 && values.deviation[c] <= 1);
  }
}

void check_json(std::string_view text) {
  const nlohmann::json value = nn::parse_json(text, "input");
  require(nn::parse_json(nn::json_text(value, 2), "again") == value);
  require(nn::shown(value).size() <= 60);
}

}  // namespace
}  // namespace violin

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace violin;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const auto check : {check_grid, check_curves, check_size, check_augmentation, check_statistics, check_json})
    attempt([&] { check(text); });
  return 0;
}
