// Attention of a block: vanilla, or with a mask from space-filling curves.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "violin/nn/layers.h"
#include "violin/nn/mask.h"

namespace violin::nn {

// Rows of the attention map that somebody wants to look at: what the chosen query tokens look at, in chosen heads.
struct AttentionRequest {
  std::vector<std::int64_t> queries;  // token numbers, prefix tokens first
  std::vector<std::int64_t> heads;    // empty: all
};

class Attention : public torch::nn::Module {
 public:
  Attention(const ModelConfig& config, std::int64_t block, std::shared_ptr<TableBudget> budget);

  // x [B,T,D], tables [h,T,T]. With `request`, `rows` becomes [B,heads,queries,T], the weights that
  // multiply v, computed from the log-sum-exp of the fused path: no map of a whole image is formed.
  at::Tensor forward(const at::Tensor& x, const ops::Tables& tables, const AttentionRequest* request = nullptr,
                     at::Tensor* rows = nullptr);

  // Gives the layer a mask, or takes it away.
  void plug(const MaskConfig& mask, const Size& native, std::shared_ptr<TableBudget> budget);
  void unplug();

  std::int64_t heads() const { return heads_; }
  // Whether forward() itself reads the numbers of the tables, which a packed gain does not have.
  bool reads_tables() const { return attn_drop_ > 0 && is_training(); }

  std::shared_ptr<Linear> qkv, proj;
  std::shared_ptr<Mask> violin;  // null: vanilla

 private:
  at::Tensor attend(const at::Tensor& packed, const ops::Tables& tables);

  std::int64_t heads_;
  double attn_drop_, proj_drop_;
};

}  // namespace violin::nn
