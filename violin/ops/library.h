// The operators that the dispatcher knows, as functions: what is not in ops.h is for the other files of this folder.
// The names that Python sees are the same with `torch.ops.violin.` in front.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "violin/ops/ops.h"

namespace violin::ops {

using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Tensors6 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// A gain in the 16-bit form that the kernels of q's device and type read, on CUDA beside float16 and bfloat16: about
// half as large for long sequences, and made once for the forward and the backward pass. Below, it can stand in the
// place of the gain; its gradient is then [G,h,Nq,Nk], with a slice for every group and head.
at::Tensor pack_gain(const at::Tensor& gain, const at::Tensor& q);

// out [B,h,Nq,d] and the log-sum-exp [B,h,Nq].
Tensors2 attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                           const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale);

// dq, dk, dv, dgain, dbias, dgate; undefined where not needed.
Tensors6 attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                            const at::Tensor& out, const at::Tensor& lse, std::optional<double> scale,
                            std::array<bool, 6> need);

// dqkv [B,N,3,h,d], dgain, dbias, dgate; dout and out are [B,h,N,d].
Tensors4 attention_qkv_backward(const at::Tensor& dout, const at::Tensor& qkv, const MaybeTensor& gain,
                                const MaybeTensor& bias, const MaybeTensor& gate, const at::Tensor& out,
                                const at::Tensor& lse, std::optional<double> scale, std::array<bool, 4> need);

// The gain offset + alpha M of a mask, packed for q, k, v of a 16-bit type on CUDA (decay_gain.h), and a tensor of its
// shape without numbers: the attention operators take the former as `gain` and the latter as `handle`, through which
// the gradient of the gain flows back to here. alpha [h]: 1 unless given; plus_one: the offset is 1 instead of 0.
Tensors2 decay_gain(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                    std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha, bool plus_one,
                    at::ScalarType dtype);
// The same for `layers` of a model, whose heads come one layer's after the other's: the gains of all, and a handle
// each. The backward pass of all is one, once every layer's handle has its gradient.
std::tuple<at::Tensor, std::vector<at::Tensor>> decay_gains(const at::Tensor& ranks, const at::Tensor& log_decay,
                                                            const MaybeTensor& weight, std::int64_t prefix,
                                                            const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                                                            bool plus_one, at::ScalarType dtype, std::int64_t layers);
at::Tensor decay_gain_forward(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                              std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                              bool plus_one, at::ScalarType dtype);
// dlog_decay, dweight, dprefix_decay, dalpha; undefined where not needed. dgain: of each layer.
Tensors4 decay_gain_backward(at::TensorList dgain, const at::Tensor& ranks, const at::Tensor& log_decay,
                             const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                             const MaybeTensor& alpha, std::array<bool, 4> need);

at::Tensor decay_mask_forward(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                              std::int64_t prefix, const MaybeTensor& prefix_decay, bool log_space);

// dlog_decay, dweight, dprefix_decay; undefined where not needed.
Tensors3 decay_mask_backward(const at::Tensor& dmask, const at::Tensor& ranks, const at::Tensor& log_decay,
                             const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                             bool log_space, std::array<bool, 3> need);

// q, k or v (0, 1, 2) of a packed projection [B,N,3,h,d], as [B,h,N,d].
inline at::Tensor unpack(const at::Tensor& qkv, std::int64_t which) {
  return qkv.select(2, which).transpose(1, 2);
}

}  // namespace violin::ops
