#include "violin/nn/attention.h"

#include <torch/torch.h>

#include <cmath>

#include "violin/error.h"
#include "violin/ops/ops.h"

namespace violin::nn {
namespace {

// q, k or v (0, 1, 2) of [B,T,3,h,d] as [B,h,T,d].
at::Tensor unpacked(const at::Tensor& packed, std::int64_t which) {
  return packed.select(2, which).transpose(1, 2);
}

// Dropout of attention weights needs the weights: the plain formula, in full precision from the softmax on.
at::Tensor attention_with_dropout(const at::Tensor& packed, const ops::Tables& tables, double rate) {
  const at::Tensor q = unpacked(packed, 0), k = unpacked(packed, 1), v = unpacked(packed, 2);
  at::Tensor weights = at::matmul(q, k.transpose(2, 3)).to(at::promote_types(q.scalar_type(), at::kFloat)) /
                       std::sqrt(static_cast<double>(q.size(3)));
  if (tables.gain) weights = weights * *tables.gain;
  if (tables.bias) weights = weights + *tables.bias;
  weights = at::dropout(at::softmax(weights, -1), rate, true);
  if (tables.gate) weights = weights * *tables.gate;
  if (tables.after) weights = weights + *tables.after;
  return at::matmul(weights.to(v.scalar_type()), v).transpose(1, 2);
}

}  // namespace

Attention::Attention(const ModelConfig& config, std::int64_t block, std::shared_ptr<TableBudget> budget)
    : heads_(config.num_heads), attn_drop_(config.attn_drop_rate), proj_drop_(config.proj_drop_rate) {
  qkv = register_module("qkv", std::make_shared<Linear>(config.embed_dim, 3 * config.embed_dim, config.qkv_bias));
  proj = register_module("proj", std::make_shared<Linear>(config.embed_dim, config.embed_dim, true));
  if (config.violin && config.violin->covers_block(block)) plug(*config.violin, config.grid(), std::move(budget));
}

void Attention::plug(const MaskConfig& mask, const Size& native, std::shared_ptr<TableBudget> budget) {
  unplug();
  violin = register_module("violin", std::make_shared<Mask>(mask, heads_, native, std::move(budget)));
  violin->train(is_training());
}

void Attention::unplug() {
  if (!violin) return;
  unregister_module("violin");
  violin.reset();
}

// [B,T,3,h,d] -> [B,T,h,d]
at::Tensor Attention::attend(const at::Tensor& packed, const ops::Tables& tables) {
  if (reads_tables()) return attention_with_dropout(packed, tables, attn_drop_);
  if (!tables.after) return ops::attention_qkv(packed, tables.gain, tables.bias, tables.gate, {}, tables.handle);
  return ops::masked_attention(unpacked(packed, 0), unpacked(packed, 1), unpacked(packed, 2), tables).transpose(1, 2);
}

at::Tensor Attention::forward(const at::Tensor& x, const ops::Tables& tables, const AttentionRequest* request,
                              at::Tensor* rows) {
  const std::int64_t batch = x.size(0), tokens = x.size(1), dim = x.size(2);
  const at::Tensor packed = qkv->forward(x).view({batch, tokens, 3, heads_, dim / heads_});
  if (request != nullptr && rows != nullptr) {
    const torch::NoGradGuard no_grad;
    at::Tensor q = unpacked(packed, 0), k = unpacked(packed, 1), v = unpacked(packed, 2);
    ops::Tables chosen = tables;
    if (!request->heads.empty()) {
      const at::Tensor index = at::tensor(request->heads, at::kLong).to(x.device());
      q = q.index_select(1, index), k = k.index_select(1, index), v = v.index_select(1, index);
      for (ops::MaybeTensor* table : {&chosen.gain, &chosen.bias, &chosen.gate, &chosen.after})
        if (*table) *table = (*table)->index_select(-3, index);
    }
    const at::Tensor queries = at::tensor(request->queries, at::kLong).to(x.device());
    const at::Tensor lse = std::get<1>(ops::attention_with_lse(q, k, v, chosen.gain, chosen.bias, chosen.gate));
    *rows = ops::attention_rows(q, k, lse, queries, chosen.gain, chosen.bias, chosen.gate);
    if (chosen.after) *rows = *rows + chosen.after->index_select(-2, queries);
  }
  const at::Tensor out = proj->forward(attend(packed, tables).reshape({batch, tokens, dim}));
  return at::dropout(out, proj_drop_, is_training());
}

}  // namespace violin::nn
