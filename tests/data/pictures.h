// Small pictures and folders of them for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "violin/data/file.h"
#include "violin/data/image.h"

namespace violin::data {

inline Image noise(std::int64_t width, std::int64_t height, unsigned seed) {
  std::mt19937 random(seed);
  Image image(width, height);
  for (std::uint8_t& value : image.pixels) value = static_cast<std::uint8_t>(random());
  return image;
}

inline void write_image(const std::filesystem::path& path, const Image& image) {
  std::filesystem::create_directories(path.parent_path());
  write_file_atomically(path, encode_png(image));
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  write_file_atomically(path, text);
}

// DIR/<class>/0.png … with `counts` images each; no two are alike.
inline void write_classes(const std::filesystem::path& folder, const std::vector<std::string>& names,
                          const std::vector<int>& counts, std::int64_t side = 8) {
  unsigned seed = 1;
  for (std::size_t c = 0; c < names.size(); ++c) {
    for (int i = 0; i < counts[c]; ++i) {
      write_image(folder / names[c] / (std::to_string(i) + ".png"), noise(side, side, seed++));
    }
  }
}

// Largest difference of two values; 256 for images of different size.
inline int difference(const Image& a, const Image& b) {
  if (a.width != b.width || a.height != b.height) return 256;
  int largest = 0;
  for (std::size_t i = 0; i < a.pixels.size(); ++i) largest = std::max(largest, std::abs(a.pixels[i] - b.pixels[i]));
  return largest;
}

// What the message of the violin::Error says that `work` throws; empty when it throws none.
template <typename Work>
std::string error_of(const Work& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace violin::data
