// Models: vision transformers with or without a mask from space-filling curves.
//   config.h    what a model is, as data and as JSON
//   registry.h  configurations by name
//   vit.h       the model: forward, features, attention rows, plug and unplug, adapters
//   mask.h      the mask of a layer: parameters, initial values, tables
//   memory.h    what fits, where a batch does not
//   layers.h    linear layers with low-rank adapters, norms, position resampling
#pragma once

#include "violin/nn/config.h"
#include "violin/nn/registry.h"
#include "violin/nn/vit.h"
