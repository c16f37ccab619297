// What a backend has to provide for attention, and everything around it that is the same for all backends: checks,
// tables brought into the form that kernels take, allocation, empty inputs, gradients in the shape of the tables.
#pragma once

#include "violin/kernels/attention.h"
#include "violin/ops/library.h"

namespace violin::ops {

kernels::DType kernel_type(at::ScalarType type);

// A checked call. Nothing in it is empty.
struct AttentionCall {
  at::Tensor q, k, v;  // [B,h,N,d], unit stride in d
  at::Tensor gain, bias,
      gate;  // undefined, or [G or 1, h or 1, Nq, Nk] of accumulate_type with unit stride along the keys
  std::int64_t groups = 1;
  double scale = 1;
  at::Tensor out;  // [B,h,Nq,d]: filled by forward
  at::Tensor lse;  // [B,h,Nq] contiguous, accumulate_type: filled by forward
};

struct AttentionBackwardCall : AttentionCall {
  at::Tensor dout;  // [B,h,Nq,d], unit stride in d
  // Filled by backward; undefined where not wanted.
  at::Tensor dq, dk, dv;           // unit stride in d
  at::Tensor dgain, dbias, dgate;  // [G,h,Nq,Nk] contiguous, accumulate_type, whatever the heads of the table
};

struct AttentionBackend {
  void (*forward)(const AttentionCall&);
  void (*backward)(const AttentionBackwardCall&);
};

// The bodies of the three private operators for a backend.
Tensors2 forward_with(const AttentionBackend& backend, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                      std::optional<double> scale);
Tensors6 backward_with(const AttentionBackend& backend, const at::Tensor& dout, const at::Tensor& q,
                       const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain, const MaybeTensor& bias,
                       const MaybeTensor& gate, const at::Tensor& out, const at::Tensor& lse,
                       std::optional<double> scale, std::array<bool, 6> need);
Tensors4 qkv_backward_with(const AttentionBackend& backend, const at::Tensor& dout, const at::Tensor& qkv,
                           const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                           const at::Tensor& out, const at::Tensor& lse, std::optional<double> scale,
                           std::array<bool, 4> need);

// A call as plain data for the kernels, which borrow the tensors' memory.
kernels::AttentionForward kernel_parameters(const AttentionCall& call);
kernels::AttentionBackward kernel_parameters(const AttentionBackwardCall& call);

// Plain tensor operations: any device, any of the types.
extern const AttentionBackend kReferenceAttention;

}  // namespace violin::ops
