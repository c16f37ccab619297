// What is done to an image before a model sees it, as it travels with the weights.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "violin/data/transforms.h"
#include "violin/nn/config.h"

namespace violin::checkpoint {

// {"size":224,"crop_pct":0.9,"crop":"centre","interpolation":"bicubic","mean":[…],"std":[…]}; the size of a rectangle
// is [height, width], "squash" is the other crop. Fields that are missing keep EvalOptions' values; throws
// violin::Error that names a field that is wrong.
nlohmann::ordered_json to_json(const data::EvalOptions& options);
data::EvalOptions preprocessing_from_json(const nlohmann::json& json);

// For weights that do not say, as timm has it for the family: ImageNet statistics, 0.5 for plain ViT; the centre of
// size / 0.9, where the longer side has 384 pixels or more (or 64 or less) the whole.
data::EvalOptions default_preprocessing(const std::string& family, const nn::ModelConfig& config);

}  // namespace violin::checkpoint
