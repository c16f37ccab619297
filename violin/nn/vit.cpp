#include "violin/nn/vit.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "violin/error.h"

namespace violin::nn {
namespace {

std::string block_name(std::size_t index) {
  return "blocks." + std::to_string(index);
}

// Initial values as timm has them, by the kind of parameter.
void fill(const std::string& name, at::Tensor& parameter, const ModelConfig& config, std::uint64_t seed) {
  at::Tensor values = at::empty(parameter.sizes(), at::kFloat);
  const at::Generator generator = generator_for(seed, name);
  if (name == "cls_token" || name == "reg_token") {
    values.normal_(0, 1e-6, generator);
  } else if (name.starts_with("patch_embed.")) {
    const double bound =
        1 / std::sqrt(static_cast<double>(config.in_chans * config.patch_size.height * config.patch_size.width));
    values.uniform_(-bound, bound, generator);
  } else if (name.ends_with(".gamma")) {
    values.fill_(config.init_values.value_or(1));
  } else if (name == "pos_embed" || name == "dist_token" || parameter.dim() == 2) {
    values.normal_(0, 0.02, generator);
  } else {
    values.fill_(name.ends_with("weight") ? 1 : 0);
  }
  parameter.copy_(values);
}

void train_adapters_masks_and_heads(torch::nn::Module& model) {
  for (auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    item.value().requires_grad_(is_adapter_parameter(name) || is_mask_parameter(name) || name.starts_with("head"));
  }
}

}  // namespace

Block::Block(const ModelConfig& config, std::int64_t index, std::shared_ptr<TableBudget> budget) {
  drop_path_ = config.depth == 1
                   ? 0
                   : config.drop_path_rate * static_cast<double>(index) / static_cast<double>(config.depth - 1);
  norm1 = register_module("norm1", std::make_shared<LayerNorm>(config.embed_dim, config.norm_eps));
  attn = register_module("attn", std::make_shared<Attention>(config, index, std::move(budget)));
  if (config.init_values) ls1 = register_module("ls1", std::make_shared<LayerScale>(config.embed_dim));
  norm2 = register_module("norm2", std::make_shared<LayerNorm>(config.embed_dim, config.norm_eps));
  mlp = register_module("mlp", std::make_shared<Mlp>(config));
  if (config.init_values) ls2 = register_module("ls2", std::make_shared<LayerScale>(config.embed_dim));
}

at::Tensor Block::forward(const at::Tensor& x, const ops::Tables& tables, const at::Tensor& draws,
                          const AttentionRequest* request, at::Tensor* rows) {
  const auto branch = [&](const at::Tensor& y, const std::shared_ptr<LayerScale>& scale, std::int64_t which) {
    const at::Tensor scaled = scale ? scale->forward(y) : y;
    return draws.defined() ? drop_path(scaled, drop_path_, draws.select(0, which)) : scaled;
  };
  const at::Tensor middle =
      x + branch(attn->forward(norm1->forward(x, LayerNorm::For::kProduct), tables, request, rows), ls1, 0);
  return middle + branch(mlp->forward(norm2->forward(middle, LayerNorm::For::kProduct)), ls2, 1);
}

VisionTransformer::VisionTransformer(const ModelConfig& config, std::uint64_t seed)
    : VisionTransformer(config, Uninitialised{}) {
  initialise(seed);
  if (config.adapters) {
    config_.adapters.reset();
    adapt(*config.adapters, seed);
  }
}

VisionTransformer::VisionTransformer(const ModelConfig& config, Uninitialised)
    : config_(config), budget_(std::make_shared<TableBudget>()) {
  check(config);
  const std::int64_t dim = config.embed_dim;
  const auto token = [&](const char* name, std::int64_t count) {
    return register_parameter(name, at::empty({1, count, dim}, at::kFloat));
  };
  if (config.class_token) cls_token = token("cls_token", 1);
  if (config.distilled) dist_token = token("dist_token", 1);
  if (config.reg_tokens > 0) reg_token = token("reg_token", config.reg_tokens);
  if (config.pos_embed == "learn") {
    const Size grid = config.grid();
    pos_embed = token("pos_embed", grid.height * grid.width + (config.no_embed_class ? 0 : config.prefix_tokens()));
  }
  patch_embed = register_module("patch_embed", std::make_shared<PatchEmbed>(config));
  const auto list = register_module("blocks", std::make_shared<torch::nn::ModuleListImpl>());
  for (std::int64_t i = 0; i < config.depth; ++i) {
    blocks.push_back(std::make_shared<Block>(config, i, budget_));
    list->push_back(std::static_pointer_cast<torch::nn::Module>(blocks.back()));
  }
  const bool behind = config.norm_behind_pooling();
  auto& last = behind ? fc_norm : norm;
  last = register_module(behind ? "fc_norm" : "norm", std::make_shared<LayerNorm>(dim, config.norm_eps));
  if (config.num_classes > 0) {
    head = register_module("head", std::make_shared<Linear>(dim, config.num_classes, true));
    if (config.distilled)
      head_dist = register_module("head_dist", std::make_shared<Linear>(dim, config.num_classes, true));
  }
  // A file that holds adapters brings their values; here they only get their places.
  if (config.adapters) {
    const torch::NoGradGuard no_grad;
    for (auto& [name, layer] : projections()) {
      const auto rank = config.adapters->ranks.find(name.substr(name.rfind('.') + 1));
      if (rank != config.adapters->ranks.end())
        layer->adapt(config.adapters->kind, rank->second, config.adapters->alpha, config.adapters->norm_gradient, 0,
                     name);
    }
    train_adapters_masks_and_heads(*this);
  }
}

void VisionTransformer::initialise(std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  if (config_.adapters) {
    for (auto& [name, layer] : projections()) layer->drop_adapter();
  }
  for (auto& item : named_parameters())
    if (!is_mask_parameter(item.key())) fill(item.key(), item.value(), config_, seed);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i]->attn->violin) blocks[i]->attn->violin->initialise(seed, block_name(i) + ".attn.violin");
}

Size VisionTransformer::grid_of(const at::Tensor& images) const {
  if (images.dim() != 4 || images.size(1) != config_.in_chans) {
    std::string sizes;
    for (const std::int64_t size : images.sizes()) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
    throw Error("images are [" + sizes + "]; the model takes [batch," + std::to_string(config_.in_chans) +
                ",height,width]");
  }
  const Size grid{images.size(2) / config_.patch_size.height, images.size(3) / config_.patch_size.width};
  if (grid.height < 1 || grid.width < 1) {
    throw Error("images of " + to_string(Size{images.size(2), images.size(3)}) +
                " pixels are smaller than a patch of " + to_string(config_.patch_size));
  }
  return grid;
}

at::Tensor VisionTransformer::positions(const at::Tensor& images, const Size& grid) {
  // The published DINO code resamples whenever the image is not square, even to the grid that it has.
  const bool same = grid == config_.grid() && (config_.pos_resample != "dino" || images.size(2) == images.size(3) ||
                                               config_.img_size.height != config_.img_size.width);
  if (same) return pos_embed;
  return resample_positions(pos_embed, config_.grid(), grid, config_.no_embed_class ? 0 : config_.prefix_tokens(),
                            config_.pos_resample);
}

at::Tensor VisionTransformer::embed(const at::Tensor& images, const Size& grid) {
  at::Tensor x = patch_embed->forward(images);
  const at::Tensor where = pos_embed.defined() ? positions(images, grid) : at::Tensor();
  std::vector<at::Tensor> parts;
  for (const at::Tensor* token : {&cls_token, &dist_token, &reg_token})
    if (token->defined()) parts.push_back(token->to(x.scalar_type()).expand({x.size(0), -1, -1}));
  if (where.defined() && config_.no_embed_class) x = x + where;
  if (!parts.empty()) {
    parts.push_back(x);
    x = at::cat(parts, 1);
  }
  if (where.defined() && !config_.no_embed_class) x = x + where;
  return at::dropout(x, config_.pos_drop_rate, is_training());
}

at::Tensor VisionTransformer::pool(const at::Tensor& tokens) {
  at::Tensor pooled = tokens;
  if (config_.global_pool == "avg") {
    pooled = tokens.slice(1, config_.prefix_tokens()).mean(1);
  } else if (config_.global_pool == "token" && config_.distilled) {
    pooled = (tokens.select(1, 0) + tokens.select(1, 1)) / 2;
  } else if (config_.global_pool == "token") {
    pooled = tokens.select(1, 0);
  }
  return fc_norm ? fc_norm->forward(pooled) : pooled;
}

Observed VisionTransformer::observe(const at::Tensor& images, const Observe& what) {
  for (const std::int64_t block : what.blocks) {
    if (block < 0 || block >= config_.depth)
      throw Error("block " + std::to_string(block) + " does not exist; the model has blocks 0 to " +
                  std::to_string(config_.depth - 1));
  }
  Observed result;
  result.grid = grid_of(images);
  const std::int64_t batch = images.size(0), prefix = config_.prefix_tokens();
  for (const auto& [block, request] : what.attention) {
    if (block < 0 || block >= config_.depth)
      throw Error("block " + std::to_string(block) + " does not exist; the model has blocks 0 to " +
                  std::to_string(config_.depth - 1));
    for (const std::int64_t head_index : request.heads)
      if (head_index < 0 || head_index >= config_.num_heads)
        throw Error("head " + std::to_string(head_index) + " does not exist; blocks have heads 0 to " +
                    std::to_string(config_.num_heads - 1));
    for (const std::int64_t query : request.queries)
      if (query < 0 || query >= prefix + result.grid.height * result.grid.width)
        throw Error("query token " + std::to_string(query) + " does not exist; this image has tokens 0 to " +
                    std::to_string(prefix + result.grid.height * result.grid.width - 1));
  }
  at::Tensor x = embed(images, result.grid);
  at::Tensor draws;
  const bool dropping = is_training() && std::any_of(blocks.begin(), blocks.end(),
                                                     [](const auto& block) { return block->drop_path_rate() > 0; });
  if (dropping) {
    draws = drop_draws_.defined() ? drop_draws_.to(x.device())
                                  : at::rand({2 * config_.depth, batch}, x.options().dtype(at::kFloat));
    drop_draws_ = at::Tensor();
    if (draws.dim() != 2 || draws.size(0) != 2 * config_.depth || draws.size(1) != batch)
      throw Error("draws for drop path do not have the shape [2*depth, batch]");
  }
  std::vector<Mask*> masks;
  masks.reserve(blocks.size());
  for (const auto& block : blocks) masks.push_back(block->attn->violin.get());
  LayerTables tables(std::move(masks), result.grid, prefix, product_type(x));
  const bool fused = config_.embed_dim / config_.num_heads <= ops::kLargestFusedHead;
  for (std::int64_t i = 0; i < config_.depth; ++i) {
    const auto request = what.attention.find(i);
    at::Tensor rows;
    Block& block = *blocks[static_cast<std::size_t>(i)];
    const bool readable = !fused || block.attn->reads_tables() || request != what.attention.end();
    x = block.forward(x, tables.take(static_cast<std::size_t>(i), readable),
                      dropping && block.drop_path_rate() > 0 ? draws.narrow(0, 2 * i, 2) : at::Tensor(),
                      request == what.attention.end() ? nullptr : &request->second, &rows);
    if (rows.defined()) result.attention[i] = rows;
    if (std::find(what.blocks.begin(), what.blocks.end(), i) != what.blocks.end()) result.blocks[i] = x;
  }
  result.tokens = norm ? norm->forward(x) : x;
  result.features = pool(result.tokens);
  if (!head) {
    result.logits = result.features;
    return result;
  }
  const auto classify = [&](const std::shared_ptr<Linear>& layer, const at::Tensor& features) {
    return layer->forward(at::dropout(features, config_.drop_rate, is_training()));
  };
  if (config_.distilled) {
    result.head_logits = classify(head, result.tokens.select(1, 0));
    result.distilled_logits = classify(head_dist, result.tokens.select(1, 1));
    result.logits = (result.head_logits + result.distilled_logits) / 2;
  } else {
    result.logits = classify(head, result.features);
  }
  return result;
}

at::Tensor VisionTransformer::forward(const at::Tensor& images) {
  return observe(images).logits;
}

void VisionTransformer::set_drop_rate(double rate) {
  ModelConfig changed = config_;
  changed.drop_rate = rate;
  check(changed);
  config_ = changed;
}

void VisionTransformer::set_drop_path_rate(double rate) {
  ModelConfig changed = config_;
  changed.drop_path_rate = rate;
  check(changed);
  config_ = changed;
  for (std::size_t i = 0; i < blocks.size(); ++i)
    blocks[i]->set_drop_path_rate(
        blocks.size() == 1 ? 0 : rate * static_cast<double>(i) / static_cast<double>(blocks.size() - 1));
}

void VisionTransformer::plug(const MaskConfig& mask, std::uint64_t seed) {
  ModelConfig changed = config_;
  changed.violin = mask;
  check(changed);
  const at::Device device = patch_embed->parameters().front().device();
  const bool wide = patch_embed->parameters().front().scalar_type() == at::kDouble;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    Attention& attn = *blocks[i]->attn;
    attn.unplug();
    if (!mask.covers_block(static_cast<std::int64_t>(i))) continue;
    attn.plug(mask, config_.grid(), budget_);
    attn.violin->initialise(seed, block_name(i) + ".attn.violin");
    attn.violin->to(device, wide ? at::kDouble : at::kFloat);
  }
  config_ = changed;
}

void VisionTransformer::unplug() {
  for (const auto& block : blocks) block->attn->unplug();
  config_.violin.reset();
}

void VisionTransformer::freeze_tables(const Size& image) {
  const Size grid{image.height / config_.patch_size.height, image.width / config_.patch_size.width};
  if (grid.height < 1 || grid.width < 1) {
    throw Error("tables cannot be frozen for images of " + to_string(image) + " pixels; take at least a patch, " +
                to_string(config_.patch_size));
  }
  for (const auto& block : blocks)
    if (block->attn->violin) block->attn->violin->freeze(grid, config_.prefix_tokens());
}

void VisionTransformer::thaw_tables() {
  for (const auto& block : blocks)
    if (block->attn->violin) block->attn->violin->thaw();
}

std::vector<std::pair<std::string, std::shared_ptr<Linear>>> VisionTransformer::projections() {
  std::vector<std::pair<std::string, std::shared_ptr<Linear>>> result;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::string name = block_name(i);
    result.emplace_back(name + ".attn.qkv", blocks[i]->attn->qkv);
    result.emplace_back(name + ".attn.proj", blocks[i]->attn->proj);
    result.emplace_back(name + ".mlp.fc1", blocks[i]->mlp->fc1);
    result.emplace_back(name + ".mlp.fc2", blocks[i]->mlp->fc2);
  }
  return result;
}

void VisionTransformer::adapt(const AdapterConfig& adapters, std::uint64_t seed) {
  if (config_.adapters) throw Error("the model has adapters already; merge or drop them first");
  ModelConfig changed = config_;
  changed.adapters = adapters;
  check(changed);
  for (auto& [name, layer] : projections()) {
    const auto rank = adapters.ranks.find(name.substr(name.rfind('.') + 1));
    if (rank != adapters.ranks.end())
      layer->adapt(adapters.kind, rank->second, adapters.alpha, adapters.norm_gradient, seed, name);
  }
  config_ = changed;
  train_adapters_masks_and_heads(*this);
}

void VisionTransformer::merge_adapters() {
  for (auto& [name, layer] : projections()) layer->merge();
}

void VisionTransformer::unmerge_adapters() {
  for (auto& [name, layer] : projections()) layer->unmerge();
}

void VisionTransformer::drop_adapters() {
  for (auto& [name, layer] : projections()) layer->drop_adapter();
  for (at::Tensor& parameter : parameters()) parameter.requires_grad_(true);
  config_.adapters.reset();
}

void VisionTransformer::replace_head(std::int64_t num_classes, std::uint64_t seed) {
  ModelConfig changed = config_;
  changed.num_classes = num_classes;
  check(changed);
  const at::TensorOptions options = patch_embed->parameters().front().options().requires_grad(false);
  const auto renew = [&](std::shared_ptr<Linear>& layer, const std::string& name) {
    if (layer) unregister_module(name);
    layer.reset();
    if (num_classes == 0) return;
    layer = register_module(name, std::make_shared<Linear>(config_.embed_dim, num_classes, true));
    const torch::NoGradGuard no_grad;
    fill(name + ".weight", layer->weight, changed, seed);
    fill(name + ".bias", layer->bias, changed, seed);
    layer->to(options.device(), c10::typeMetaToScalarType(options.dtype()));
    layer->train(is_training());
  };
  renew(head, "head");
  if (config_.distilled) renew(head_dist, "head_dist");
  config_ = changed;
}

void VisionTransformer::resize(const Size& img_size) {
  ModelConfig changed = config_;
  changed.img_size = img_size;
  check(changed);
  if (pos_embed.defined() && changed.grid() != config_.grid()) {
    const torch::NoGradGuard no_grad;
    const bool needed = pos_embed.requires_grad();
    const at::Tensor resampled =
        resample_positions(pos_embed, config_.grid(), changed.grid(),
                           config_.no_embed_class ? 0 : config_.prefix_tokens(), config_.pos_resample);
    pos_embed.set_data(resampled.contiguous());
    pos_embed.requires_grad_(needed);
  }
  // The unit of `rate` belongs to the old grid: keep the decay itself.
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::shared_ptr<Mask> before = blocks[i]->attn->violin;
    if (!before || changed.grid() == config_.grid()) continue;
    const at::Tensor decay = before->rate.defined() ? before->log_decay().detach() : at::Tensor();
    const bool frozen = before->frozen();
    before->thaw();  // each parameter's own requires_grad
    blocks[i]->attn->plug(before->config(), changed.grid(), budget_);
    const std::shared_ptr<Mask> after = blocks[i]->attn->violin;
    const torch::NoGradGuard no_grad;
    const at::Tensor like = state(*before).front().second;  // a buffer where the decay is fixed and alpha absent
    after->to(like.device(), like.scalar_type());
    const auto parameters = before->named_parameters(), buffers = before->named_buffers();
    for (auto& item : after->named_parameters()) {
      item.value().copy_(parameters[item.key()]);
      item.value().requires_grad_(parameters[item.key()].requires_grad());
    }
    for (auto& item : after->named_buffers()) item.value().copy_(buffers[item.key()]);
    if (decay.defined()) after->set_log_decay(decay);
    if (frozen) after->freeze(changed.grid(), config_.prefix_tokens());
  }
  config_ = changed;
}

std::vector<std::pair<std::string, at::Tensor>> state(const torch::nn::Module& model) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : model.named_parameters()) result.emplace_back(item.key(), item.value());
  for (const auto& item : model.named_buffers()) result.emplace_back(item.key(), item.value());
  return result;
}

bool is_mask_parameter(std::string_view name) {
  return name.find(".attn.violin.") != std::string_view::npos;
}

bool is_adapter_parameter(std::string_view name) {
  return name.find(".lora_") != std::string_view::npos;
}

Cost cost(const ModelConfig& config, const Size& image) {
  Cost result;
  // Memory of an uninitialised model is never touched, so that counting even a huge one costs nothing.
  const VisionTransformer model(config, Uninitialised{});
  for (const auto& item : model.named_parameters()) {
    result.parameters += item.value().numel();
    if (is_mask_parameter(item.key())) result.mask_parameters += item.value().numel();
  }
  const std::int64_t rows = image.height / config.patch_size.height, columns = image.width / config.patch_size.width;
  const auto patches = static_cast<double>(rows * columns);
  const double tokens = patches + static_cast<double>(config.prefix_tokens());
  const auto dim = static_cast<double>(config.embed_dim);
  const double hidden = std::floor(dim * config.mlp_ratio);
  const auto patch = static_cast<double>(config.patch_size.height * config.patch_size.width * config.in_chans);
  const double block = tokens * dim * (4 * dim + 2 * hidden) + 2 * tokens * tokens * dim;
  result.macs = patches * patch * dim + static_cast<double>(config.depth) * block +
                dim * static_cast<double>(config.num_classes) * (config.distilled ? 2 : 1);
  result.tokens = static_cast<std::int64_t>(tokens);
  return result;
}

}  // namespace violin::nn
