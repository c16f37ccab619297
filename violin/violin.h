// Everything Violin offers to C++ programs. Each folder's header is its table of contents; start with
//   curves/curves.h   ranks of space-filling curves on any grid (no torch)
//   ops/ops.h         the two operators, decay_mask and attention, with gradients
//   ops/strategies.h  the ways in which a mask can enter attention
#pragma once

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/ops/ops.h"
#include "violin/ops/strategies.h"
#include "violin/version.h"
