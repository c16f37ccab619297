// What the decay-mask kernels compute, as plain data. Shared by cpu/ and cuda/; no torch.
//
//     M[g,h,i,j] = sum_c w[c,h] * exp( sum_a log_decay[c,a,h] * |ranks[g,c,a,i] - ranks[g,c,a,j]| )      between
//     patches M[g,h,i,j] = exp(prefix_decay[h]), or 1 without one          where i or j is one of the P prefix tokens
//     and i != j M[g,h,i,i] = 1                                                                            for a prefix
//     token i
//
// Prefix tokens (class token, registers) come first, so M is [G,h,P+N,P+N]. Outside of log_space no power is taken per
// element: for each (curve, axis, head) the powers gamma^0 ... gamma^max are a row of numbers that M gathers, and the
// gradient is a histogram of dM over distances, contracted with those rows once.
#pragma once

#include <cstdint>

#include "violin/kernels/attention.h"

namespace violin::kernels {

struct DecayMask {
  std::int64_t groups = 1;
  std::int64_t curves = 0;
  std::int64_t axes = 1;
  std::int64_t tokens = 0;  // N
  std::int64_t heads = 0;
  std::int64_t prefix = 0;              // P
  DType dtype = DType::kFloat32;        // of everything below but ranks: kFloat32 or kFloat64
  bool log_space = false;               // log M instead of M
  bool decay_per_axis = false;          // log_decay is [C,A,h]; otherwise [C,h] and the axes' distances are added first
  const std::int32_t* ranks = nullptr;  // [G,C,A,N] contiguous, none negative
  const void* log_decay = nullptr;      // contiguous, none positive
  const void* weight = nullptr;         // [C,h] contiguous; null: 1/C
  const void* prefix_decay = nullptr;   // [h]; null: prefix rows and columns are 1
};

struct DecayMaskForward {
  DecayMask mask;
  void* out = nullptr;  // [G,h,P+N,P+N] contiguous
};

struct DecayMaskBackward {
  DecayMask mask;
  const void* dout = nullptr;  // like out
  // Null where not wanted; like their inputs.
  void* dlog_decay = nullptr;
  void* dweight = nullptr;
  void* dprefix_decay = nullptr;
};

// A gain made of a mask, offset + alpha[h] M, in the packed form that GPU kernels read (attention.h), and the gradient
// of what it is made of. One axis; ranks below 2^23; float32.
struct DecayGain {
  DecayMask mask;
  const float* alpha = nullptr;  // [h]; null: 1
  float offset = 0;
};

struct DecayGainForward {
  DecayGain gain;
  DType dtype = DType::kBFloat16;  // of q, k, v: kFloat16 or kBFloat16
  void* out = nullptr;             // [G,h] packed
};

struct DecayGainBackward {
  DecayGain gain;
  // Of the heads of each of `layers`, one layer's after the other's: [G,h/layers,P+N,P+N] contiguous.
  static constexpr int kMostLayers = 64;
  const float* dgain[kMostLayers] = {};
  int layers = 1;
  // Null where not wanted; like their inputs.
  float* dlog_decay = nullptr;
  float* dweight = nullptr;
  float* dprefix_decay = nullptr;
  float* dalpha = nullptr;
};

}  // namespace violin::kernels
