// The two operators that everything stands on, and their relatives. The same functions are registered with torch as
// torch.ops.violin.*; calling them here goes through the dispatcher, so autograd, autocast and torch.compile see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace violin::ops {

using MaybeTensor = std::optional<at::Tensor>;

// Head dimensions above it use the reference on CUDA, which reads no packed gain.
constexpr std::int64_t kLargestFusedHead = 128;

// O = ( softmax( scale * Q K^T o gain + bias ) o gate ) V
//   q [B,h,Nq,d], k, v [B,h,Nk,d]: unit stride in d, any other strides. gain, bias, gate: [G or nothing, h or 1, Nq,
//   Nk], image b uses table b mod G. scale: 1/sqrt(d) unless given. Returns [B,h,Nq,d], laid out in memory as
//   [B,Nq,h,d]. handle: what receives the gradient of a gain that came packed (decay_gain in library.h).
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain = {},
                     const MaybeTensor& bias = {}, const MaybeTensor& gate = {}, std::optional<double> scale = {},
                     const MaybeTensor& handle = {});

// The same, and the log-sum-exp of each row [B,h,Nq] (no gradient flows through it).
std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                      const MaybeTensor& gain = {}, const MaybeTensor& bias = {},
                                                      const MaybeTensor& gate = {}, std::optional<double> scale = {});

// The same for a packed projection qkv [B,N,3,h,d]: no copy on the way in, and one packed gradient on the way back.
// Returns [B,N,h,d], contiguous.
at::Tensor attention_qkv(const at::Tensor& qkv, const MaybeTensor& gain = {}, const MaybeTensor& bias = {},
                         const MaybeTensor& gate = {}, std::optional<double> scale = {},
                         const MaybeTensor& handle = {});

// Rows of the attention map on demand, from the log-sum-exp: for query tokens `rows` (int64 [R]) the weights that
// multiply v, [B,h,R,Nk]. Nothing larger is formed.
at::Tensor attention_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& lse, const at::Tensor& rows,
                          const MaybeTensor& gain = {}, const MaybeTensor& bias = {}, const MaybeTensor& gate = {},
                          std::optional<double> scale = {});

// M [h,P+N,P+N], with G in front where ranks have it; see violin/kernels/decay_mask.h for the formula.
//   ranks int32 [C,N], [C,A,N] or [G,C,A,N]; log_decay [C,h], or [C,A,h] for one decay per axis; weight [C,h]: 1/C
//   unless given; prefix: number of prefix tokens; prefix_decay [h]: log gamma_cls; log_space: log M, computed without
//   underflow.
at::Tensor decay_mask(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight = {},
                      std::int64_t prefix = 0, const MaybeTensor& prefix_decay = {}, bool log_space = false);

// Coordinates of curves on a grid (height, width or frames, height, width), ready for decay_mask: int32 [C,A,N].
//   curves: a set ("violin") or a comma-separated list of names.
at::Tensor curve_ranks(const std::string& curves, at::IntArrayRef grid);

}  // namespace violin::ops
