// A gain made of a mask, offset + alpha M with an offset of 0 or 1, in the packed form that 16-bit kernels on CUDA
// read: the table itself, with its passes over memory for M, for alpha and for packing, never exists.
#pragma once

#include "violin/kernels/decay_mask.h"
#include "violin/ops/checks.h"
#include "violin/ops/library.h"

namespace violin::ops {

// Whether decay_gain() takes such a mask: float32 parameters on CUDA, one axis, one decay for it, 16 bits for q, k, v.
bool packs_decay_gains(const at::Tensor& log_decay, std::int64_t axes, at::ScalarType dtype);

// How many layers decay_gains() takes.
constexpr std::int64_t kMostLayersTogether = kernels::DecayGainBackward::kMostLayers;

DecayMaskSizes check_decay_gain(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                                std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                                at::ScalarType dtype);

// Where it goes.
at::Tensor empty_gain(const DecayMaskSizes& sizes, std::int64_t prefix, at::ScalarType dtype, const at::Tensor& like);

}  // namespace violin::ops
