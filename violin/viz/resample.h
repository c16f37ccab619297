#pragma once

#include "violin/data/image.h"

namespace violin::viz {

// Stretches to width x height with a triangle filter: bilinear when it enlarges, an area average when it shrinks.
Image resize(const Image& image, std::int64_t width, std::int64_t height);

// The largest centred part with the sides' ratio width : height, resized to width x height.
Image crop_to_fit(const Image& image, std::int64_t width, std::int64_t height);

// Every pixel as a block.
Image enlarge(const Image& image, std::int64_t width, std::int64_t height);

}  // namespace violin::viz
