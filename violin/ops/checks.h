// Checks of operator arguments. Sizes are symbolic so that the same checks serve real tensors and the fake ones of
// torch.compile; messages name the argument, what was expected and what came.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "violin/kernels/attention.h"
#include "violin/ops/ops.h"

namespace violin::ops {

// Sizes that the arguments agree upon.
struct AttentionSizes {
  c10::SymInt batch, heads, queries, keys, dim;
  c10::SymInt groups = 1;  // of the tables
};

// Throws unless q [B,h,Nq,d], k and v [B,h,Nk,d] and the tables [G or nothing, h or 1, Nq, Nk] fit together.
AttentionSizes check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                               const MaybeTensor& bias, const MaybeTensor& gate);

// Whether a gain is one that pack_gain made: integers [G or 1, h or 1, key tiles, query tiles, one tile's].
bool is_packed_gain(const at::Tensor& gain);
// The type of its integers beside q of this type, so that one form is not taken for the other, and their number.
at::ScalarType packed_type(at::ScalarType q);
std::int64_t packed_size(at::ScalarType q);
inline c10::SymInt packed_tiles(const c10::SymInt& tokens) {
  return (tokens + (kernels::kPackedTile - 1)) / kernels::kPackedTile;
}

// Throws unless qkv is [B,N,3,h,d]; what is inside is checked when it is taken apart.
void check_packed(const at::Tensor& qkv);

// Throws unless lse is [B,h,Nq] and rows int64 [R].
void check_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& lse, const at::Tensor& rows,
                const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate);

struct DecayMaskSizes {
  c10::SymInt groups, curves, axes, tokens, heads;
  bool grouped = false;         // ranks came with G
  bool decay_per_axis = false;  // log_decay came as [C,A,h]
};

DecayMaskSizes check_decay_mask(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                                std::int64_t prefix, const MaybeTensor& prefix_decay);

// float32, and float64 beside float64: the type of tables, log-sum-exps and everything that is summed.
inline at::ScalarType accumulate_type(at::ScalarType inputs) {
  return inputs == at::kDouble ? at::kDouble : at::kFloat;
}

// An optional argument as a tensor: undefined where none was given.
inline at::Tensor or_undefined(const MaybeTensor& tensor) {
  return tensor.value_or(at::Tensor());
}
inline MaybeTensor or_nothing(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

}  // namespace violin::ops
