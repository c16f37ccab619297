// The small layers of a transformer, with timm's parameter names. Constructors leave memory uninitialised: weights come
// from initialise() (vit.h) or from a file, and neither wants to pay for the other.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include "violin/nn/config.h"

namespace violin::nn {

// One generator per parameter, derived from a seed and the parameter's name: models that differ in one layer (a mask
// more, another head) agree in all other initial weights.
at::Generator generator_for(std::uint64_t seed, const std::string& name);

// The type that products are computed in: autocast's, or the tensor's own.
at::ScalarType product_type(const at::Tensor& x);

// y = x W^T + b, with a low-rank adapter beside W on request:
//   lora   W + s B A                      s = alpha / rank
//   dora   m o V / |V|, V = W + s B A     |V|: norm of each output row
// B starts at zero and m at |W|, so an adapter changes nothing at first.
class Linear : public torch::nn::Module {
 public:
  Linear(std::int64_t in, std::int64_t out, bool with_bias);
  at::Tensor forward(const at::Tensor& x);  // [...,in] -> [...,out]

  // Adds an adapter and freezes W; `name` is this layer's, for the generator. W must hold its values already.
  void adapt(const std::string& kind, std::int64_t rank, double alpha, bool norm_gradient, std::uint64_t seed,
             const std::string& name);
  bool adapted() const { return rank_ > 0; }
  // Puts the adapter into W (faster, and what a file without adapters needs) and takes it out again: the same bits as
  // before.
  void merge();
  void unmerge();
  bool merged() const { return original_.defined(); }
  // Forgets the adapter; what was merged stays.
  void drop_adapter();
  at::Tensor merged_weight() const;

  at::Tensor weight, bias;    // [out,in], [out]
  at::Tensor lora_A, lora_B;  // [rank,in], [out,rank]
  at::Tensor lora_magnitude;  // [out]: dora only

 private:
  at::Tensor row_norms() const;  // |V|, [out]

  std::int64_t rank_ = 0;
  double scaling_ = 1;
  bool norm_gradient_ = false;
  at::Tensor original_;  // W while merged
};

class LayerNorm : public torch::nn::Module {
 public:
  // What comes next: a product, which under autocast wants 16 bits, or anything.
  enum class For { kProduct, kAnything };
  LayerNorm(std::int64_t dim, double eps);
  at::Tensor forward(const at::Tensor& x, For next = For::kAnything);
  at::Tensor weight, bias;  // [dim]

 private:
  double eps_;
};

class LayerScale : public torch::nn::Module {
 public:
  explicit LayerScale(std::int64_t dim);
  at::Tensor forward(const at::Tensor& x) { return x * gamma; }
  at::Tensor gamma;  // [dim]
};

// Images [B,C,H,W] as tokens [B,N,D], row by row. Pixels beyond the last whole patch are left out.
class PatchEmbed : public torch::nn::Module {
 public:
  explicit PatchEmbed(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& images);

 private:
  // Registered as `proj` to have timm's names.
  class Projection : public torch::nn::Module {
   public:
    explicit Projection(const ModelConfig& config);
    at::Tensor weight, bias;  // [D,C,p,p], [D]
  };
  std::shared_ptr<Projection> proj_;
  Size patch_;
};

class Mlp : public torch::nn::Module {
 public:
  explicit Mlp(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);
  std::shared_ptr<Linear> fc1, fc2;

 private:
  double drop_;
};

// Stochastic depth: whole samples of a residual branch are left out and the others scaled up. `draws` [B] uniform in
// [0,1).
at::Tensor drop_path(const at::Tensor& x, double rate, const at::Tensor& draws);

// A position table [1,P+h*w,D] for another grid. The first `prefix` rows are copied.
//   timm  bicubic with antialiasing
//   dino  bicubic with the scale factor (new + 0.1) / old, as the published DINO code has it
//   deit  bicubic to the size
at::Tensor resample_positions(const at::Tensor& positions, const Size& from, const Size& to, std::int64_t prefix,
                              const std::string& rule);

}  // namespace violin::nn
