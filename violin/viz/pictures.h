// The pictures of curves and masks, as scenes: write them with to_svg or to_image.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "violin/curves/curves.h"
#include "violin/viz/scene.h"

namespace violin::viz {

// One panel per curve: the path from cell to cell, coloured by position, over the patches of `photo` (cropped to the
// shape of the grid, in every frame) or over an empty grid. Steps to a cell that does not touch the last one are drawn
// thin.
Scene curve_gallery(std::span<const curves::Curve> curves, const curves::Grid& grid, const Image* photo = nullptr);

// What a transformer sees: the patches of `photo` in the sequence of each curve, one strip each, the z order first.
// Without a photo every patch has a colour of its own, hue by column and lightness by row. Throws violin::Error for
// manhattan.
Scene flattened(std::span<const curves::Curve> curves, const curves::Grid& grid, const Image* photo = nullptr);

// gamma^distance from one cell to every cell along one curve of the set: [tokens].
std::vector<double> decay_field(const curves::Coordinates& coordinates, std::int64_t curve, std::int64_t cell,
                                double gamma);

// The mean of equally long fields.
std::vector<double> mean_field(std::span<const std::vector<double>> fields);

// Decay masks around `cells`, one row each, for every curve and, where there are several, their mean; one group of rows
// per gamma.
struct MaskSweep {
  curves::Grid grid;
  std::vector<curves::Curve> curves;
  std::vector<double> gammas;
  std::vector<std::int64_t> cells;
};
Scene mask_panels(const MaskSweep& sweep);

}  // namespace violin::viz
