// Packed gains of masks on CUDA devices.
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "violin/kernels/cuda/decay_mask.h"
#include "violin/ops/attention_backend.h"
#include "violin/ops/decay_gain.h"
#include "violin/ops/device_cuda.h"

namespace violin::ops {
namespace {

namespace cuda = kernels::cuda;

// The arguments of a call, contiguous, and what the kernels see of them.
struct Prepared {
  at::Tensor ranks, log_decay, weight, prefix_decay, alpha;
  kernels::DecayGain gain;
};

Prepared prepare(const DecayMaskSizes& sizes, const at::Tensor& ranks, const at::Tensor& log_decay,
                 const MaybeTensor& weight, std::int64_t prefix, const MaybeTensor& prefix_decay,
                 const MaybeTensor& alpha) {
  const auto whole = [](const MaybeTensor& tensor) {
    const at::Tensor given = or_undefined(tensor);
    return given.defined() ? given.contiguous() : given;
  };
  const auto data = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
  };
  Prepared call{ranks.contiguous(), log_decay.contiguous(), whole(weight), whole(prefix_decay), whole(alpha), {}};
  kernels::DecayMask& mask = call.gain.mask;
  mask.groups = sizes.groups.expect_int();
  mask.curves = sizes.curves.expect_int();
  mask.tokens = sizes.tokens.expect_int();
  mask.heads = sizes.heads.expect_int();
  mask.prefix = prefix;
  mask.ranks = call.ranks.const_data_ptr<std::int32_t>();
  mask.log_decay = data(call.log_decay);
  mask.weight = data(call.weight);
  mask.prefix_decay = data(call.prefix_decay);
  call.gain.alpha = data(call.alpha);
  return call;
}

at::Tensor forward(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight, std::int64_t prefix,
                   const MaybeTensor& prefix_decay, const MaybeTensor& alpha, bool plus_one, at::ScalarType dtype) {
  const DecayMaskSizes sizes = check_decay_gain(ranks, log_decay, weight, prefix, prefix_decay, alpha, dtype);
  at::Tensor packed = empty_gain(sizes, prefix, dtype, log_decay);
  if (packed.numel() == 0) return packed;
  const c10::DeviceGuard guard(ranks.device());
  Prepared call = prepare(sizes, ranks, log_decay, weight, prefix, prefix_decay, alpha);
  call.gain.offset = plus_one ? 1.0f : 0.0f;
  check_launch(cuda::launch(kernels::DecayGainForward{call.gain, kernel_type(dtype), packed.mutable_data_ptr()},
                            current_stream(ranks)),
               "violin::_decay_gain");
  return packed;
}

Tensors4 backward(at::TensorList dgain, const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                  std::int64_t prefix, const MaybeTensor& prefix_decay, const MaybeTensor& alpha,
                  std::array<bool, 4> need) {
  const DecayMaskSizes sizes = check_decay_gain(ranks, log_decay, weight, prefix, prefix_decay, alpha, at::kBFloat16);
  const std::int64_t side = sizes.tokens.expect_int() + prefix;
  const std::int64_t numbers = sizes.groups.expect_int() * sizes.heads.expect_int() * side * side;
  const auto layers = static_cast<std::int64_t>(dgain.size());
  TORCH_CHECK_VALUE(layers >= 1 && layers <= kMostLayersTogether && sizes.heads.expect_int() % layers == 0,
                    "violin::_decay_gain: dgain has ", layers, " layers beside ", sizes.heads, " heads");
  for (const at::Tensor& layer : dgain) {
    TORCH_CHECK_VALUE(layer.numel() * layers == numbers, "violin::_decay_gain: dgain has shape ", layer.sizes(),
                      "; expected that of the gain");
  }
  const auto wanted = [](bool needed, const MaybeTensor& input) {
    const at::Tensor like = or_undefined(input);
    return needed && like.defined() ? at::empty_like(like, at::MemoryFormat::Contiguous) : at::Tensor();
  };
  const auto data = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
  };
  Tensors4 results = {wanted(need[0], log_decay), wanted(need[1], weight), wanted(need[2], prefix_decay),
                      wanted(need[3], alpha)};
  const c10::DeviceGuard guard(ranks.device());
  const Prepared call = prepare(sizes, ranks, log_decay, weight, prefix, prefix_decay, alpha);
  kernels::DecayGainBackward parameters;
  parameters.gain = call.gain;
  parameters.layers = static_cast<int>(layers);
  std::vector<at::Tensor> whole;
  for (std::size_t i = 0; i < dgain.size(); ++i) {
    whole.push_back(dgain[i].to(at::kFloat).contiguous());
    parameters.dgain[i] = whole[i].const_data_ptr<float>();
  }
  parameters.dlog_decay = data(std::get<0>(results));
  parameters.dweight = data(std::get<1>(results));
  parameters.dprefix_decay = data(std::get<2>(results));
  parameters.dalpha = data(std::get<3>(results));
  const at::Tensor scratch = scratch_for(cuda::scratch_bytes(parameters), ranks);
  check_launch(cuda::launch(parameters, scratch.mutable_data_ptr(), current_stream(ranks)), "violin::_decay_gain");
  return results;
}

TORCH_LIBRARY_IMPL(violin, CUDA, library) {
  library.impl("_decay_gain_forward", forward);
  library.impl("_decay_gain_backward", backward);
}

}  // namespace
}  // namespace violin::ops
