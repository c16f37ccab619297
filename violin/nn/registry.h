// Models by name: timm's names where timm has the model. `violin_` in front of any name adds the mask.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "violin/nn/config.h"

namespace violin::nn {

struct ModelEntry {
  std::string name;
  std::string family;  // "DeiT", "DeiT-III", …
  ModelConfig config;
  std::vector<std::string> aliases;
};

// Every plain model and the published Violin ones, in the order in which a table lists them.
const std::vector<ModelEntry>& model_registry();

// The configuration of a name or an alias. `violin_NAME` is NAME with the default mask; for DeiT as published, with
// global average pooling behind the norm and no class token. Throws violin::Error and suggests the nearest name.
ModelConfig find_model(std::string_view name);

}  // namespace violin::nn
