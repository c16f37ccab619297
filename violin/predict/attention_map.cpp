#include "violin/predict/attention_map.h"

#include <torch/torch.h>

#include <algorithm>

#include "violin/error.h"

namespace violin {

viz::HeatMap attention_map(nn::VisionTransformer& model, const at::Tensor& image, std::int64_t block) {
  constexpr std::int64_t kMaxQueries = 256;
  const nn::ModelConfig& config = model.config();
  const std::int64_t chosen = block < 0 ? block + config.depth : block;
  if (chosen < 0 || chosen >= config.depth) {
    throw Error("block " + std::to_string(block) + " does not exist; the model has blocks 0 to " +
                std::to_string(config.depth - 1));
  }
  const torch::NoGradGuard no_grad;
  const at::Tensor batch = image.unsqueeze(0).to(model.parameters().front().device());
  const Size grid = model.grid_of(batch);
  const std::int64_t prefix = config.prefix_tokens(), patches = grid.height * grid.width;
  nn::AttentionRequest request;
  if (config.global_pool == "token") {
    request.queries = {0};
  } else {
    const std::int64_t count = std::min(patches, kMaxQueries);
    for (std::int64_t i = 0; i < count; ++i) request.queries.push_back(prefix + i * patches / count);
  }
  const nn::Observed seen = model.observe(batch, {.blocks = {}, .attention = {{chosen, request}}});
  at::Tensor map = seen.attention.at(chosen).mean(at::IntArrayRef({0, 1, 2})).slice(0, prefix).to(at::kCPU, at::kFloat);
  map = map - map.min();
  map = map / map.max().clamp_min(1e-12);
  const at::Tensor values = map.contiguous();
  return {grid.height, grid.width, {values.const_data_ptr<float>(), values.const_data_ptr<float>() + patches}};
}

}  // namespace violin
