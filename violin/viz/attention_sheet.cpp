#include "violin/viz/attention_sheet.h"

#include <algorithm>
#include <cmath>

#include "violin/viz/resample.h"

namespace violin::viz {
namespace {

constexpr double kMargin = 28;
constexpr double kGap = 20;
constexpr double kSide = 132;    // of an image, its longer one
constexpr double kCaption = 40;  // below it
constexpr double kPair = 2 * kSide + 4;
constexpr std::size_t kColumns = 4;  // pairs to a row

double width_of(std::size_t columns) {
  return 2 * kMargin + static_cast<double>(columns) * (kPair + kGap) - kGap;
}

// What the longer side of an image is multiplied by to have this length.
double factor(const Image& image, double longer) {
  return longer / static_cast<double>(std::max(image.width, image.height));
}

std::string cut(const std::string& text, std::size_t limit) {
  if (text.size() <= limit) return text;
  std::size_t end = limit - 1;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // whole characters only
  return text.substr(0, end) + "…";
}

}  // namespace

Image overlay(const Image& image, const HeatMap& map) {
  Image heat(map.width, map.height);
  for (std::int64_t y = 0; y < map.height; ++y)
    for (std::int64_t x = 0; x < map.width; ++x)
      set_pixel(heat, x, y, mask_color(map.values[static_cast<std::size_t>(y * map.width + x)]));
  const Image stretched = resize(heat, image.width, image.height);
  Image result(image.width, image.height);
  constexpr int kHeat = 140;  // of 256
  for (std::size_t i = 0; i < result.pixels.size(); ++i)
    result.pixels[i] = static_cast<std::uint8_t>((image.pixels[i] * (256 - kHeat) + stretched.pixels[i] * kHeat) >> 8);
  return result;
}

std::size_t attention_sheet_limit(double scale) {
  const double height = static_cast<double>(kMaxPixels) / std::ceil(width_of(kColumns) * scale) / scale;
  return static_cast<std::size_t>((height - 2 * kMargin + kGap) / (kSide + kCaption + kGap)) * kColumns;
}

Scene attention_sheet(std::span<const AttentionEntry> entries) {
  Scene scene;
  const std::size_t columns = std::clamp<std::size_t>(entries.size(), 1, kColumns);
  const std::size_t rows = (entries.size() + columns - 1) / columns;
  double tallest = entries.empty() ? kSide : 0;
  for (const AttentionEntry& entry : entries)
    tallest = std::max(tallest, static_cast<double>(entry.image.height) * factor(entry.image, kSide));
  scene.width = width_of(columns);
  scene.height = 2 * kMargin + static_cast<double>(rows) * (tallest + kCaption) + static_cast<double>(rows - 1) * kGap;
  scene.title = "Images and the attention of the model";
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const AttentionEntry& entry = entries[i];
    const std::size_t row = i / columns;
    const double x = kMargin + static_cast<double>(i % columns) * (kPair + kGap);
    const double y = kMargin + static_cast<double>(row) * (tallest + kCaption + kGap);
    const auto width = static_cast<double>(entry.image.width), height = static_cast<double>(entry.image.height);
    const double shown = factor(entry.image, kSide);
    const bool smooth = std::max(width, height) >= 64;  // a few pixels are shown as what they are
    const auto show = [&](const Image& image, double left, bool soft) {
      const Box place = {left, y, width * shown, height * shown};
      scene.shapes.push_back(Picture{place, std::make_shared<Image>(image), soft});
    };
    show(entry.image, x, smooth);
    // Enough pixels for a smooth map.
    const double grown = std::max(factor(entry.image, 128), 1.0);
    const std::int64_t wide = std::llround(width * grown), high = std::llround(height * grown);
    const Image base = smooth ? resize(entry.image, wide, high) : enlarge(entry.image, wide, high);
    show(overlay(base, entry.map), x + width * shown + 4, true);
    scene.shapes.push_back(Text{{x, y + tallest + 16}, cut(entry.caption, 38), 12, kInk, Anchor::kStart, true});
    scene.shapes.push_back(Text{{x, y + tallest + 31}, cut(entry.name, 44), 10, kSoftInk});
  }
  return scene;
}

}  // namespace violin::viz
