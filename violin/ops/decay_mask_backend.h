// What a backend has to provide for decay_mask, and what is the same for all of them.
#pragma once

#include "violin/kernels/decay_mask.h"
#include "violin/ops/library.h"

namespace violin::ops {

// A checked call with everything contiguous and in the type of the mask (float32, or float64 where log_decay is).
struct DecayMaskCall {
  at::Tensor ranks;         // int32 [G,C,A,N]
  at::Tensor log_decay;     // [C,h] or [C,A,h]
  at::Tensor weight;        // [C,h] or undefined
  at::Tensor prefix_decay;  // [h] or undefined
  std::int64_t prefix = 0;
  bool log_space = false;
  bool decay_per_axis = false;
  at::Tensor mask;  // [G,h,P+N,P+N]: filled by forward
};

struct DecayMaskBackwardCall : DecayMaskCall {
  at::Tensor dmask;  // [G,h,P+N,P+N]
  // Like their inputs above; filled by backward, undefined where not wanted.
  at::Tensor dlog_decay, dweight, dprefix_decay;
};

struct DecayMaskBackend {
  void (*forward)(const DecayMaskCall&);
  void (*backward)(const DecayMaskBackwardCall&);
};

// The bodies of the private operators for a backend.
at::Tensor forward_with(const DecayMaskBackend& backend, const at::Tensor& ranks, const at::Tensor& log_decay,
                        const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                        bool log_space);
Tensors3 backward_with(const DecayMaskBackend& backend, const at::Tensor& dmask, const at::Tensor& ranks,
                       const at::Tensor& log_decay, const MaybeTensor& weight, std::int64_t prefix,
                       const MaybeTensor& prefix_decay, bool log_space, std::array<bool, 3> need);

// A call as plain data for the kernels, which borrow the tensors' memory.
kernels::DecayMaskForward kernel_parameters(const DecayMaskCall& call);
kernels::DecayMaskBackward kernel_parameters(const DecayMaskBackwardCall& call);

// Plain tensor operations: any device.
extern const DecayMaskBackend kReferenceDecayMask;

}  // namespace violin::ops
