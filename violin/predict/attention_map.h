// Where a model looks: one number per patch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "violin/nn/vit.h"
#include "violin/viz/attention_sheet.h"

namespace violin {

// Values from 0, the smallest, to 1. The attention of a block (-1: the last), mean over its heads: from the class token
// where the model reads one, else the mean over patches (256 of them, evenly spread, where there are more). image
// [3,H,W], already normalised.
viz::HeatMap attention_map(nn::VisionTransformer& model, const at::Tensor& image, std::int64_t block = -1);

}  // namespace violin
