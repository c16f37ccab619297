// Coordinates of curves as the tensor that decay_mask takes.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/ops/ops.h"

namespace violin::ops {
namespace {

// A mistake of the caller arrives as the same kind of error as from the other operators.
at::Tensor curve_ranks_any(std::string_view names, at::IntArrayRef sides, std::optional<at::Device> device) {
  TORCH_CHECK_VALUE(sides.size() == 2 || sides.size() == 3, "violin::curve_ranks: grid has ", sides.size(),
                    " sides; expected (height, width) or (frames, height, width)");
  for (const std::int64_t side : sides) {
    TORCH_CHECK_VALUE(side >= 1, "violin::curve_ranks: grid is ", sides, "; expected sides of at least 1");
  }
  curves::Coordinates coordinates;
  try {
    curves::Grid grid{sides.size() == 3 ? sides[0] : 0, sides[sides.size() - 2], sides[sides.size() - 1]};
    curves::check_grid(grid);
    coordinates = curves::coordinates(curves::parse_curves(names), grid);
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, "violin::curve_ranks: ", error.what());
  }
  const std::vector<std::int64_t> shape = {coordinates.curves, coordinates.axes, coordinates.tokens};
  // Under torch.compile a tensor without data is asked for first, to learn the shape.
  if (device.has_value() && device->is_meta()) return at::empty(shape, at::dtype(at::kInt).device(*device));
  at::Tensor ranks = at::empty(shape, at::kInt);
  std::copy(coordinates.values.begin(), coordinates.values.end(), ranks.mutable_data_ptr<std::int32_t>());
  return device.has_value() ? ranks.to(*device) : ranks;
}

TORCH_LIBRARY_IMPL(violin, CompositeExplicitAutograd, library) {
  library.impl("curve_ranks", curve_ranks_any);
}

}  // namespace
}  // namespace violin::ops
