// Schemas of all operators, and the C++ functions that call them through the dispatcher.
//
// The public operators have an autograd and an autocast kernel; what computes are the private ones (underscore), with
// one kernel per backend and one for tensors without data. A private operator is the unit that torch.compile and
// torch.export see below autograd, so every call of one goes through the dispatcher too.
#include "violin/ops/library.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace violin::ops {
namespace {

#define VIOLIN_QKV "Tensor q, Tensor k, Tensor v"
#define VIOLIN_TABLES "Tensor? gain=None, Tensor? bias=None, Tensor? gate=None"
#define VIOLIN_TABLES_AND_SCALE VIOLIN_TABLES ", float? scale=None"
#define VIOLIN_MASK                                                                                     \
  "Tensor ranks, Tensor log_decay, Tensor? weight=None, int prefix=0, Tensor? prefix_decay=None, bool " \
  "log_space=False"
#define VIOLIN_GAIN "Tensor ranks, Tensor log_decay, Tensor? weight, int prefix, Tensor? prefix_decay, Tensor? alpha"

TORCH_LIBRARY(violin, library) {
  // Inputs keep their strides under torch.compile: the unit stride in d is a precondition.
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order};
  library.def("attention(" VIOLIN_QKV ", " VIOLIN_TABLES_AND_SCALE ", Tensor? handle=None) -> Tensor", tags);
  library.def("attention_with_lse(" VIOLIN_QKV ", " VIOLIN_TABLES_AND_SCALE ") -> (Tensor, Tensor)", tags);
  library.def("attention_qkv(Tensor qkv, " VIOLIN_TABLES_AND_SCALE ", Tensor? handle=None) -> Tensor", tags);
  library.def("attention_rows(Tensor q, Tensor k, Tensor lse, Tensor rows, " VIOLIN_TABLES_AND_SCALE ") -> Tensor",
              tags);
  library.def("decay_mask(" VIOLIN_MASK ") -> Tensor", tags);
  library.def("curve_ranks(str curves, int[] grid, *, Device? device=None) -> Tensor", tags);

  library.def("_pack_gain(Tensor gain, Tensor q) -> Tensor", tags);
  library.def("_decay_gain(" VIOLIN_GAIN ", bool plus_one, ScalarType dtype) -> (Tensor, Tensor)", tags);
  library.def("_decay_gains(" VIOLIN_GAIN ", bool plus_one, ScalarType dtype, int layers) -> (Tensor, Tensor[])", tags);
  library.def("_decay_gain_forward(" VIOLIN_GAIN ", bool plus_one, ScalarType dtype) -> Tensor", tags);
  library.def("_decay_gain_backward(Tensor[] dgain, " VIOLIN_GAIN ", bool[4] need) -> (Tensor, Tensor, Tensor, Tensor)",
              tags);
  library.def("_attention_forward(" VIOLIN_QKV ", " VIOLIN_TABLES_AND_SCALE ") -> (Tensor, Tensor)", tags);
  library.def("_attention_backward(Tensor dout, " VIOLIN_QKV
              ", Tensor? gain, Tensor? bias, Tensor? gate, Tensor out, Tensor lse, float? scale, bool[6] need) -> "
              "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
              tags);
  library.def(
      "_attention_qkv_backward(Tensor dout, Tensor qkv, Tensor? gain, Tensor? bias, Tensor? gate, Tensor out, Tensor "
      "lse, float? scale, bool[4] need) -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  library.def("_decay_mask_forward(" VIOLIN_MASK ") -> Tensor", tags);
  library.def(
      "_decay_mask_backward(Tensor dmask, Tensor ranks, Tensor log_decay, Tensor? weight, int prefix, Tensor? "
      "prefix_decay, bool log_space, bool[3] need) -> (Tensor, Tensor, Tensor)",
      tags);
}

// Differentiating one of these is a second derivative, or a derivative of attention weights: an error that names them.
TORCH_LIBRARY_IMPL(violin, Autograd, library) {
  for (const char* name :
       {"_pack_gain", "_attention_forward", "_attention_backward", "_attention_qkv_backward", "_decay_mask_forward",
        "_decay_mask_backward", "_decay_gain_forward", "_decay_gain_backward", "attention_rows"}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

template <class Function>
c10::TypedOperatorHandle<Function> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

}  // namespace

// The declared type of each function is also the type of its operator.
#define VIOLIN_CALL(function, name, ...)                            \
  static const auto op = find<decltype(function)>("violin::" name); \
  return op.call(__VA_ARGS__)

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                     const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale,
                     const MaybeTensor& handle) {
  VIOLIN_CALL(attention, "attention", q, k, v, gain, bias, gate, scale, handle);
}

Tensors2 attention_with_lse(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                            const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale) {
  VIOLIN_CALL(attention_with_lse, "attention_with_lse", q, k, v, gain, bias, gate, scale);
}

at::Tensor attention_qkv(const at::Tensor& qkv, const MaybeTensor& gain, const MaybeTensor& bias,
                         const MaybeTensor& gate, std::optional<double> scale, const MaybeTensor& handle) {
  VIOLIN_CALL(attention_qkv, "attention_qkv", qkv, gain, bias, gate, scale, handle);
}

at::Tensor attention_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& lse, const at::Tensor& rows,
                          const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                          std::optional<double> scale) {
  VIOLIN_CALL(attention_rows, "attention_rows", q, k, lse, rows, gain, bias, gate, scale);
}

at::Tensor decay_mask(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                      std::int64_t prefix, const MaybeTensor& prefix_decay, bool log_space) {
  VIOLIN_CALL(decay_mask, "decay_mask", ranks, log_decay, weight, prefix, prefix_decay, log_space);
}

at::Tensor curve_ranks(const std::string& curves, at::IntArrayRef grid) {
  static const auto op =
      find<at::Tensor(c10::string_view, at::IntArrayRef, std::optional<at::Device>)>("violin::curve_ranks");
  return op.call(curves, grid, std::nullopt);
}

at::Tensor pack_gain(const at::Tensor& gain, const at::Tensor& q) {
  VIOLIN_CALL(pack_gain, "_pack_gain", gain, q);
}

Tensors2 decay_gain(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                    std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha, bool plus_one,
                    at::ScalarType dtype) {
  VIOLIN_CALL(decay_gain, "_decay_gain", ranks, log_decay, weight, prefix, prefix_decay, alpha, plus_one, dtype);
}

std::tuple<at::Tensor, std::vector<at::Tensor>> decay_gains(const at::Tensor& ranks, const at::Tensor& log_decay,
                                                            const MaybeTensor& weight, std::int64_t prefix,
                                                            const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                                                            bool plus_one, at::ScalarType dtype, std::int64_t layers) {
  VIOLIN_CALL(decay_gains, "_decay_gains", ranks, log_decay, weight, prefix, prefix_decay, alpha, plus_one, dtype,
              layers);
}

at::Tensor decay_gain_forward(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                              std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                              bool plus_one, at::ScalarType dtype) {
  VIOLIN_CALL(decay_gain_forward, "_decay_gain_forward", ranks, log_decay, weight, prefix, prefix_decay, alpha,
              plus_one, dtype);
}

Tensors4 decay_gain_backward(at::TensorList dgain, const at::Tensor& ranks, const at::Tensor& log_decay,
                             const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                             const MaybeTensor& alpha, std::array<bool, 4> need) {
  VIOLIN_CALL(decay_gain_backward, "_decay_gain_backward", dgain, ranks, log_decay, weight, prefix, prefix_decay, alpha,
              need);
}

Tensors2 attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                           const MaybeTensor& bias, const MaybeTensor& gate, std::optional<double> scale) {
  VIOLIN_CALL(attention_forward, "_attention_forward", q, k, v, gain, bias, gate, scale);
}

Tensors6 attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate,
                            const at::Tensor& out, const at::Tensor& lse, std::optional<double> scale,
                            std::array<bool, 6> need) {
  VIOLIN_CALL(attention_backward, "_attention_backward", dout, q, k, v, gain, bias, gate, out, lse, scale, need);
}

Tensors4 attention_qkv_backward(const at::Tensor& dout, const at::Tensor& qkv, const MaybeTensor& gain,
                                const MaybeTensor& bias, const MaybeTensor& gate, const at::Tensor& out,
                                const at::Tensor& lse, std::optional<double> scale, std::array<bool, 4> need) {
  VIOLIN_CALL(attention_qkv_backward, "_attention_qkv_backward", dout, qkv, gain, bias, gate, out, lse, scale, need);
}

at::Tensor decay_mask_forward(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                              std::int64_t prefix, const MaybeTensor& prefix_decay, bool log_space) {
  VIOLIN_CALL(decay_mask_forward, "_decay_mask_forward", ranks, log_decay, weight, prefix, prefix_decay, log_space);
}

Tensors3 decay_mask_backward(const at::Tensor& dmask, const at::Tensor& ranks, const at::Tensor& log_decay,
                             const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                             bool log_space, std::array<bool, 3> need) {
  VIOLIN_CALL(decay_mask_backward, "_decay_mask_backward", dmask, ranks, log_decay, weight, prefix, prefix_decay,
              log_space, need);
}

}  // namespace violin::ops
