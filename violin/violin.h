// Everything Violin offers to C++ programs. Each folder's header is its table of contents; start with
//   curves/curves.h   ranks of space-filling curves on any grid (no torch)
//   ops/ops.h         the two operators, decay_mask and attention, with gradients
//   ops/strategies.h  the ways in which a mask can enter attention
//   nn/nn.h           vision transformers with and without a mask, by name or configuration
//   checkpoint/checkpoint.h  weights of timm, DeiT, DINO and Violin: load, adapt, save
//   predict/predictor.h      classes for images
#pragma once

#include "violin/checkpoint/checkpoint.h"
#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/nn/nn.h"
#include "violin/ops/ops.h"
#include "violin/ops/strategies.h"
#include "violin/predict/predictor.h"
#include "violin/size.h"
#include "violin/version.h"
