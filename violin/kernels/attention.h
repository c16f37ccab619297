// What the attention kernels compute, as plain data. Shared by cpu/ and cuda/; no torch.
//
//     O = ( softmax( scale * Q K^T o gain + bias ) o gate ) V                 o: elementwise
//
// Q [B,h,Nq,d], K and V [B,h,Nk,d], O [B,h,Nq,d]. The tables gain, bias, gate are optional, [G, h, Nq, Nk] by strides
// (a table without heads has head stride 0), shared by the batch: image b uses table b mod G. LSE [B,h,Nq] is the
// natural logarithm of the softmax denominator; a row whose logits are all -inf has LSE -inf and output 0.
//
// Backward, with P from the saved LSE, A = Q K^T and D = rowsum(dO o O):
//     dP = dO V^T o gate      dZ = P o (dP - D)      dgain = scale * sum_b dZ o A     dbias = sum_b dZ
//     dgate = sum_b P o dO V^T      dA = scale * dZ o gain      dQ = dA K      dK = dA^T Q      dV = (P o gate)^T dO
//
// The kernels neither allocate nor check nor throw; ops/ does all of that.
#pragma once

#include <cstdint>

namespace violin::kernels {

enum class DType { kFloat32, kFloat64, kBFloat16, kFloat16 };

// A [B,h,N,d] tensor; d has unit stride, the others are in elements.
template <class T>
struct Heads {
  T* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t token = 0;
};
using ConstHeads = Heads<const void>;
using MutableHeads = Heads<void>;

// A table [G,h,Nq,Nk] with unit stride along the keys: float, or double beside double inputs. Null when absent.
struct Table {
  const void* data = nullptr;
  std::int64_t group = 0;
  std::int64_t head = 0;
  std::int64_t row = 0;
  // A gain in the 16-bit form that GPU kernels read, [G or 1, h or 1, key tiles, query tiles] of kPackedBytes; `group`
  // and `head` are 0 where there is one for all.
  bool packed = false;
};
constexpr std::int64_t kPackedTile = 64;
constexpr std::int64_t kPackedBytes = kPackedTile * kPackedTile * 2 + 128;

struct AttentionShape {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t queries = 0;
  std::int64_t keys = 0;
  std::int64_t dim = 0;
  std::int64_t groups = 1;  // G of the tables; divides batch
};

struct AttentionForward {
  AttentionShape shape;
  DType dtype = DType::kFloat32;  // of q, k, v and out
  double scale = 1;
  ConstHeads q, k, v;
  Table gain, bias, gate;
  MutableHeads out;
  void* lse = nullptr;  // [B,h,Nq] contiguous; float, double for kFloat64
};

struct AttentionBackward {
  AttentionShape shape;
  DType dtype = DType::kFloat32;  // of q, k, v, out, dout, dq, dk, dv
  double scale = 1;
  ConstHeads q, k, v, out, dout;
  const void* lse = nullptr;
  Table gain, bias, gate;
  // What is null is not wanted and not computed.
  MutableHeads dq, dk, dv;
  // [G,h,Nq,Nk] contiguous (one slice per head also where the table has none); float, double for kFloat64.
  void* dgain = nullptr;
  void* dbias = nullptr;
  void* dgate = nullptr;
};

}  // namespace violin::kernels
