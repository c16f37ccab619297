// What a backend has to provide for attention, and everything around it that is the same for all backends: checks,
// tables brought into the form that kernels take, allocation, empty inputs, gradients in the shape of the tables.
#pragma once

#include "violin/kernels/attention.h"
#include "violin/ops/library.h"

namespace violin::ops {

kernels::DType kernel_type(at::ScalarType type);

// Where the packed form of a gain [h or 1,Nq,Nk], with groups in front or without, goes.
at::Tensor empty_packed(const at::Tensor& gain, const at::Tensor& q);

// A checked call. Nothing in it is empty.
struct AttentionCall {
  at::Tensor q, k, v;  // [B,h,N,d], unit stride in d
  // Undefined, or [G or 1, h or 1, Nq, Nk] of accumulate_type with unit stride along the keys; the gain may be packed.
  at::Tensor gain, bias, gate;
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
  bool takes_packed = false;  // gains
};

// What a table was like before it was brought into a form for kernels, and a gradient [G,h,Nq,Nk] in its image.
struct TableForm {
  std::int64_t dim = 4;
  bool one_group = false;
  bool one_head = false;
  at::ScalarType type = at::kFloat;
};
TableForm form_of(const at::Tensor& table);
at::Tensor like_table(at::Tensor gradient, const TableForm& form);

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
