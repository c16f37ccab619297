// One vision transformer for the whole family: ViT, DeiT (distilled too), DeiT-III, DINO, registers, pixel-level ViT,
// with or without a mask in its attention. Structure and parameter names are timm's.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "violin/nn/attention.h"

namespace violin::nn {

// What else a forward pass should bring home.
struct Observe {
  std::vector<std::int64_t> blocks;                    // tokens after these blocks
  std::map<std::int64_t, AttentionRequest> attention;  // rows of the attention map, by block
};

struct Observed {
  at::Tensor tokens;                             // [B,P+N,D] behind the last norm
  at::Tensor features;                           // pooled [B,D]; all tokens where the model does not pool
  at::Tensor logits;                             // [B,K]; features where there is no head
  at::Tensor head_logits, distilled_logits;      // of a distilled model, whose mean the logits are
  std::map<std::int64_t, at::Tensor> blocks;     // [B,P+N,D]
  std::map<std::int64_t, at::Tensor> attention;  // [B,heads,queries,P+N]
  Size grid;
};

class Block : public torch::nn::Module {
 public:
  Block(const ModelConfig& config, std::int64_t index, std::shared_ptr<TableBudget> budget);
  // draws [2,B], uniform, where drop path is on.
  at::Tensor forward(const at::Tensor& x, const ops::Tables& tables, const at::Tensor& draws,
                     const AttentionRequest* request, at::Tensor* rows);
  double drop_path_rate() const { return drop_path_; }
  void set_drop_path_rate(double rate) { drop_path_ = rate; }

  std::shared_ptr<LayerNorm> norm1, norm2;
  std::shared_ptr<Attention> attn;
  std::shared_ptr<LayerScale> ls1, ls2;  // null without layer scale
  std::shared_ptr<Mlp> mlp;

 private:
  double drop_path_;
};

// Whether constructing a model fills its parameters.
struct Uninitialised {};

class VisionTransformer : public torch::nn::Module {
 public:
  // Initial weights as timm's, from the seed; parameters of equal name are equal in models of equal seed.
  explicit VisionTransformer(const ModelConfig& config, std::uint64_t seed = 0);
  // For weights that come from a file.
  VisionTransformer(const ModelConfig& config, Uninitialised);

  const ModelConfig& config() const { return config_; }

  at::Tensor forward(const at::Tensor& images);  // [B,C,H,W] -> logits [B,K]; H, W: any
  Observed observe(const at::Tensor& images, const Observe& what = {});
  Size grid_of(const at::Tensor& images) const;  // throws where the image is smaller than a patch

  // Stochastic depth draws from torch's generator unless the next call's draws are given: uniform [2*depth,B]. A
  // trainer that derives them from (seed, step, sample) is independent of devices, ranks and interruptions.
  void set_drop_draws(const at::Tensor& draws) { drop_draws_ = draws; }
  void set_drop_path_rate(double rate);
  void set_drop_rate(double rate);

  // A mask in the attention of a vanilla model (or another mask), with fresh parameters; and back.
  void plug(const MaskConfig& mask, std::uint64_t seed = 0);
  void unplug();
  // Tables for this image size are made now and kept, and mask parameters need no gradient: for inference, where
  // nothing of this size will be rebuilt or checked. thaw_tables() undoes it.
  void freeze_tables(const Size& image);
  void thaw_tables();
  void set_table_limit(std::int64_t bytes) { budget_->limit = bytes; }

  // Adapters on the chosen projections of all blocks. Everything else is frozen but masks and heads.
  void adapt(const AdapterConfig& adapters, std::uint64_t seed = 0);
  void merge_adapters();
  void unmerge_adapters();
  void drop_adapters();  // merge_adapters() first to keep what they learned

  // Another number of classes: a fresh head.
  void replace_head(std::int64_t num_classes, std::uint64_t seed = 0);
  // Another native size: positions are resampled by the model's rule. Where the grid of patches changes, a model with
  // frozen tables has those of the new size afterwards and no others.
  void resize(const Size& img_size);

  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<Linear> head, head_dist;  // null without a head
  std::shared_ptr<LayerNorm> norm, fc_norm;
  std::shared_ptr<PatchEmbed> patch_embed;
  at::Tensor cls_token, dist_token, reg_token, pos_embed;  // undefined where the model has none

 private:
  void initialise(std::uint64_t seed);
  at::Tensor embed(const at::Tensor& images, const Size& grid);
  at::Tensor positions(const at::Tensor& images, const Size& grid);
  at::Tensor pool(const at::Tensor& tokens);
  std::vector<std::pair<std::string, std::shared_ptr<Linear>>> projections();

  ModelConfig config_;
  std::shared_ptr<TableBudget> budget_;
  at::Tensor drop_draws_;
};

using Model = std::shared_ptr<VisionTransformer>;

// Parameters and buffers by name: what a weights file holds. Tensors share memory with the model.
std::vector<std::pair<std::string, at::Tensor>> state(const torch::nn::Module& model);

// Parameters of masks and of low-rank adapters, told from their names.
bool is_mask_parameter(std::string_view name);
bool is_adapter_parameter(std::string_view name);

// Numbers for tables of models.
struct Cost {
  std::int64_t parameters = 0;
  std::int64_t mask_parameters = 0;
  double macs = 0;  // multiply-adds of one image: projections and attention products
  std::int64_t tokens = 0;
};
Cost cost(const ModelConfig& config, const Size& image);

}  // namespace violin::nn
