// What model a state belongs to, read off its tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "violin/checkpoint/translate.h"
#include "violin/nn/config.h"

namespace violin::checkpoint {

// What the tensors of a file do not say.
struct Hints {
  std::optional<std::int64_t> num_heads;
  std::optional<Size> img_size;  // tells a grid that is not square
};

struct Architecture {
  nn::ModelConfig config;
  std::string name;                // of the registry, where a model there has these tensors; otherwise empty
  std::string family;              // its family: "DeiT", "DINO", …
  bool heads_known = true;         // false: config.num_heads is 1, and only looking at the file is possible
  std::vector<std::string> notes;  // what was assumed, one line each
};

// Widths, depth, tokens, norms, layer scale, classes and the mask follow from the shapes. Heads follow from the mask;
// without one, from the model of the registry that has these shapes, or they are 64 wide. Throws violin::Error for a
// file that holds no vision transformer, naming the tensor.
Architecture infer_architecture(const State& state, const Hints& hints = {});

}  // namespace violin::checkpoint
