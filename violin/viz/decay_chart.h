// The decay of every layer, head and curve of a model in one picture, and the scale alpha of every head.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "violin/viz/scene.h"

namespace violin::viz {

struct DecayChart {
  std::string title;
  std::vector<std::string> curves;
  std::vector<std::int64_t> blocks;  // the layers that have a mask
  std::int64_t heads = 0;
  std::vector<double> log_gamma;  // [blocks, curves, heads]
  std::vector<double> alpha;      // [blocks, heads]; empty where there is none
  // Ends of the colour scales: steps until 1/e is left, and the size of alpha. 0: from the values.
  double shortest = 0, longest = 0, largest_alpha = 0;
};

// Gives charts that stand side by side the same colours for the same values.
void share_scale(std::span<DecayChart* const> charts);

// One panel per curve: layers downwards, heads to the right, coloured by how far the decay reaches, 1/-log gamma steps
// along the curve until 1/e is left. One more panel for alpha: teal above zero, rose below. Throws violin::Error for
// sizes that do not go together.
Scene decay_chart(const DecayChart& chart);

}  // namespace violin::viz
