#include "violin/nn/layers.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <cmath>

#include "violin/error.h"
#include "violin/ops/device.h"
#include "violin/ops/rows.h"

namespace violin::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

void only_first_derivative(const char* what) {
  if (at::GradMode::is_enabled()) throw Error(std::string(what) + " has no second derivative on GPUs");
}

// at::linear on a GPU: gradients of 16-bit products come out of them in the parameters' own precision, without a copy
// that was rounded first, and the bias gets its from our sums over rows.
struct LinearFunction : public Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias) {
    const at::Tensor cast = weight.to(x.scalar_type());
    context->save_for_backward({x, cast});
    context->saved_data["type"] = weight.scalar_type();
    return at::linear(x, cast, bias.to(x.scalar_type()));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    only_first_derivative("a linear layer");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::ScalarType type = context->saved_data["type"].toScalarType();
    const at::Tensor dy = gradients[0].reshape({-1, weight.size(0)}), rows = x.reshape({-1, weight.size(1)});
    variable_list result(3);
    if (context->needs_input_grad(0)) result[0] = dy.mm(weight).view(x.sizes());
    if (context->needs_input_grad(1))
      result[1] = x.scalar_type() == type ? dy.t().mm(rows) : at::mm(dy.t(), rows, type);
    if (context->needs_input_grad(2)) result[2] = ops::column_sums(dy).to(type);
    return result;
  }
};

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool own = bias.defined() && ops::on_gpu(bias) && at::GradMode::is_enabled() && bias.requires_grad() &&
                   bias.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat &&
                   product_type(x) != at::kDouble && bias.numel() % 4 == 0 &&
                   ops::has_row_kernels(bias.narrow(0, 0, 4));
  if (!own) return at::linear(x, weight, bias);
  return LinearFunction::apply(x.to(product_type(x)), weight, bias);
}

struct LayerNormFunction : public Function<LayerNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, double eps, at::ScalarType type) {
    const auto [y, mean, rstd] = ops::layer_norm(x, weight, bias, eps, type);
    context->save_for_backward({x, weight, mean, rstd});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    only_first_derivative("a layer norm");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const auto [dx, dweight, dbias] = ops::layer_norm_backward(gradients[0], saved[0], saved[2], saved[3], weight);
    return {dx, dweight.to(weight.scalar_type()), dbias.to(weight.scalar_type()), {}, {}};
  }
};

at::Tensor uninitialised(at::IntArrayRef sizes) {
  return at::empty(sizes, at::kFloat);
}

std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

at::ScalarType product_type(const at::Tensor& x) {
  const at::DeviceType device = x.device().type();
  return at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : x.scalar_type();
}

at::Generator generator_for(std::uint64_t seed, const std::string& name) {
  std::uint64_t hash = mixed(seed);
  for (const char c : name) hash = mixed(hash ^ static_cast<unsigned char>(c));
  return at::make_generator<at::CPUGeneratorImpl>(hash);
}

Linear::Linear(std::int64_t in, std::int64_t out, bool with_bias) {
  weight = register_parameter("weight", uninitialised({out, in}));
  bias = with_bias ? register_parameter("bias", uninitialised({out})) : at::Tensor();
}

at::Tensor Linear::forward(const at::Tensor& x) {
  if (!adapted() || merged()) return linear(x, weight, bias);
  const at::Tensor update = at::linear(at::linear(x, lora_A), lora_B);
  if (!lora_magnitude.defined()) return at::add(at::linear(x, weight, bias), update, scaling_);
  const at::Tensor factor = lora_magnitude / row_norms();
  const at::Tensor y = at::add(at::linear(x, weight), update, scaling_);
  return bias.defined() ? at::addcmul(bias.to(y.scalar_type()), y, factor.to(y.scalar_type()))
                        : y * factor.to(y.scalar_type());
}

at::Tensor Linear::row_norms() const {
  // In full precision whatever autocast does: a norm of 16-bit products would wobble from step to step.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::AutoGradMode gradient(norm_gradient_ && at::GradMode::is_enabled());
  return at::linalg_vector_norm(at::addmm(weight, lora_B, lora_A, 1, scaling_), 2, 1);
}

at::Tensor Linear::merged_weight() const {
  if (!adapted() || merged()) return weight;
  const torch::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor sum = at::addmm(weight, lora_B, lora_A, 1, scaling_);
  return lora_magnitude.defined() ? sum * (lora_magnitude / at::linalg_vector_norm(sum, 2, 1)).unsqueeze(1) : sum;
}

void Linear::adapt(const std::string& kind, std::int64_t rank, double alpha, bool norm_gradient, std::uint64_t seed,
                   const std::string& name) {
  if (adapted()) throw Error("layer " + name + " has an adapter already; merge or drop it first");
  if (kind != "lora" && kind != "dora") throw Error("adapter kind '" + kind + "' does not exist; there are lora, dora");
  if (rank < 1) throw Error("adapter rank of " + name + " is " + std::to_string(rank) + "; expected at least 1");
  const torch::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(weight.size(1)));
  const at::Tensor a =
      at::empty({rank, weight.size(1)}, at::kFloat).uniform_(-bound, bound, generator_for(seed, name + ".lora_A"));
  lora_A = register_parameter("lora_A", a.to(weight.options()));
  lora_B = register_parameter("lora_B", at::zeros({weight.size(0), rank}, weight.options()));
  if (kind == "dora")
    lora_magnitude = register_parameter("lora_magnitude", at::linalg_vector_norm(weight, 2, 1).clone());
  rank_ = rank;
  scaling_ = alpha / static_cast<double>(rank);
  norm_gradient_ = norm_gradient;
  weight.requires_grad_(false);
  if (bias.defined()) bias.requires_grad_(false);
}

void Linear::merge() {
  if (!adapted() || merged()) return;
  const at::Tensor sum = merged_weight();
  original_ = weight.detach().clone();
  const torch::NoGradGuard no_grad;
  weight.copy_(sum);
}

void Linear::unmerge() {
  if (!merged()) return;
  const torch::NoGradGuard no_grad;
  weight.copy_(original_);
  original_ = at::Tensor();
}

void Linear::drop_adapter() {
  if (!adapted()) return;
  for (const char* name : {"lora_A", "lora_B", "lora_magnitude"})
    if (parameters_.contains(name)) parameters_.erase(name);
  lora_A = lora_B = lora_magnitude = original_ = at::Tensor();
  rank_ = 0;
  weight.requires_grad_(true);
  if (bias.defined()) bias.requires_grad_(true);
}

LayerNorm::LayerNorm(std::int64_t dim, double eps) : eps_(eps) {
  weight = register_parameter("weight", uninitialised({dim}));
  bias = register_parameter("bias", uninitialised({dim}));
}

at::Tensor LayerNorm::forward(const at::Tensor& x, For next) {
  if (!ops::has_row_kernels(x) || weight.scalar_type() == at::kDouble)
    return at::layer_norm(x, weight.sizes(), weight, bias, eps_);
  // Autocast norms in float32; a product that follows wants 16 bits at once.
  const bool cast = at::autocast::is_autocast_enabled(at::kCUDA);
  const at::Tensor wide = cast ? x.to(at::kFloat) : x;
  return LayerNormFunction::apply(wide, weight, bias, eps_,
                                  next == For::kProduct ? product_type(wide) : wide.scalar_type());
}

LayerScale::LayerScale(std::int64_t dim) {
  gamma = register_parameter("gamma", uninitialised({dim}));
}

PatchEmbed::Projection::Projection(const ModelConfig& config) {
  weight = register_parameter(
      "weight", uninitialised({config.embed_dim, config.in_chans, config.patch_size.height, config.patch_size.width}));
  bias = register_parameter("bias", uninitialised({config.embed_dim}));
}

PatchEmbed::PatchEmbed(const ModelConfig& config)
    : proj_(register_module("proj", std::make_shared<Projection>(config))), patch_(config.patch_size) {}

at::Tensor PatchEmbed::forward(const at::Tensor& images) {
  // One product over all patches; its result is in one piece, which a convolution's would not be.
  const std::int64_t rows = images.size(2) / patch_.height, columns = images.size(3) / patch_.width;
  const at::Tensor whole = images.narrow(2, 0, rows * patch_.height).narrow(3, 0, columns * patch_.width);
  const at::Tensor patches =
      whole.unflatten(2, {rows, patch_.height})
          .unflatten(4, {columns, patch_.width})
          .permute({0, 2, 4, 1, 3, 5})
          .reshape({images.size(0), rows * columns, images.size(1) * patch_.height * patch_.width});
  return linear(patches, proj_->weight.flatten(1), proj_->bias);
}

Mlp::Mlp(const ModelConfig& config) : drop_(config.proj_drop_rate) {
  const auto hidden = static_cast<std::int64_t>(static_cast<double>(config.embed_dim) * config.mlp_ratio);
  fc1 = register_module("fc1", std::make_shared<Linear>(config.embed_dim, hidden, true));
  fc2 = register_module("fc2", std::make_shared<Linear>(hidden, config.embed_dim, true));
}

at::Tensor Mlp::forward(const at::Tensor& x) {
  const at::Tensor hidden = at::dropout(at::gelu(fc1->forward(x)), drop_, is_training());
  return at::dropout(fc2->forward(hidden), drop_, is_training());
}

at::Tensor drop_path(const at::Tensor& x, double rate, const at::Tensor& draws) {
  const double keep = 1 - rate;
  const at::Tensor factor = (draws >= rate).to(x.scalar_type()).div_(keep);
  return x * factor.view({-1, 1, 1});
}

at::Tensor resample_positions(const at::Tensor& positions, const Size& from, const Size& to, std::int64_t prefix,
                              const std::string& rule) {
  const std::int64_t tokens = from.height * from.width, dim = positions.size(2);
  if (positions.size(1) != prefix + tokens) {
    throw Error("position table has " + std::to_string(positions.size(1)) + " rows; expected " +
                std::to_string(prefix) + " for prefix tokens and " + std::to_string(tokens) + " for the grid " +
                to_string(from));
  }
  const at::Tensor grid = positions.narrow(1, prefix, tokens)
                              .reshape({1, from.height, from.width, dim})
                              .permute({0, 3, 1, 2})
                              .to(positions.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  at::Tensor resized;
  if (rule == "timm") {
    resized = at::_upsample_bicubic2d_aa(grid, {to.height, to.width}, false);
  } else if (rule == "dino") {
    const auto factor = [](std::int64_t m, std::int64_t n) {
      return (static_cast<double>(m) + 0.1) / static_cast<double>(n);
    };
    resized = at::upsample_bicubic2d(grid, {to.height, to.width}, false, factor(to.height, from.height),
                                     factor(to.width, from.width));
  } else if (rule == "deit") {
    resized = at::upsample_bicubic2d(grid, {to.height, to.width}, false);
  } else {
    throw Error("unknown rule '" + rule + "' for positions; there are timm, dino and deit");
  }
  resized = resized.permute({0, 2, 3, 1}).reshape({1, to.height * to.width, dim}).to(positions.scalar_type());
  return prefix == 0 ? resized : at::cat({positions.narrow(1, 0, prefix), resized}, 1);
}

}  // namespace violin::nn
