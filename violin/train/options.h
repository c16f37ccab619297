// Everything about a training run that is not the model or the data: one struct with its defaults, filled by a recipe,
// then by a JSON file, then by the command line, and written out whole as config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "violin/size.h"

namespace violin::train {

struct Options {
  std::string recipe = "deit";

  std::int64_t epochs = 300;
  std::int64_t batch_size = 64;
  std::int64_t accumulate = 1;
  std::optional<double> lr;
  double lr_per_512 = 5e-4;
  double min_lr = 1e-5;
  double warmup_lr = 1e-6;
  double warmup_epochs = 5;
  double weight_decay = 0.05;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double clip_grad = 0;
  double layer_decay = 1;
  double mask_lr = 1;
  bool mask_layer_decay = false;
  double drop_path = 0;
  double drop = 0;
  double ema = 0;

  std::string train_what = "all";
  std::string adapter;
  std::int64_t rank = 8;
  std::string adapter_targets = "qkv,proj,fc1,fc2";
  double adapter_alpha = 16;

  Size img_size;
  std::string crop = "auto";
  double min_scale = 0.08;
  double flip = 0.5;
  std::string rand_augment = "rand-m9-mstd0.5-inc1";
  double colour_jitter = 0;
  double erase = 0.25;
  double mixup = 0.8;
  double cutmix = 1.0;
  double mix_probability = 1.0;
  double smoothing = 0.1;
  std::int64_t repeats = 1;
  std::string statistics = "auto";

  std::string class_weights = "none";
  bool balanced = false;
  double held_out = 0.1;
  std::int64_t limit = 0;
  std::string on_bad_image = "skip";
  std::int64_t cache_mb = 2048;

  std::int64_t eval_every = 1;
  double save_minutes = 10;
  std::uint64_t seed = 0;
  std::string precision = "fp32";

  // The learning rate that is in force.
  double peak_lr() const { return lr.value_or(lr_per_512 * static_cast<double>(batch_size) / 512); }
};

// One call per field: visitor(name, field, group, help). JSON, the command line and the tables in the documentation all
// come from this list.
template <class O, class Visitor>
void visit_options(O& o, Visitor&& visitor) {
  const char* g = "Training";
  visitor("epochs", o.epochs, g, "Passes over the training images");
  visitor("batch_size", o.batch_size, g, "Images per step, of all processes together");
  visitor("accumulate", o.accumulate, g, "Passes into which a step is divided, where a whole batch does not fit");
  visitor("lr", o.lr, g, "Learning rate at its highest; without it lr_per_512 * batch_size / 512");
  visitor("lr_per_512", o.lr_per_512, g, "Learning rate for a batch of 512");
  visitor("min_lr", o.min_lr, g, "Learning rate at the end");
  visitor("warmup_lr", o.warmup_lr, g, "Learning rate at the start");
  visitor("warmup_epochs", o.warmup_epochs, g, "Epochs in which it rises");
  visitor("weight_decay", o.weight_decay, g, "Of matrices; biases, norms, positions, tokens and masks have none");
  visitor("beta1", o.beta1, g, "Of AdamW");
  visitor("beta2", o.beta2, g, "Of AdamW");
  visitor("eps", o.eps, g, "Of AdamW");
  visitor("clip_grad", o.clip_grad, g, "Largest norm of the gradient; 0: any");
  visitor("layer_decay", o.layer_decay, g, "Factor of the learning rate from layer to layer, downward from the head");
  visitor("mask_lr", o.mask_lr, g, "Factor of the learning rate for mask parameters");
  visitor("mask_layer_decay", o.mask_layer_decay, g, "Apply layer_decay to mask parameters too");
  visitor("drop_path", o.drop_path, g, "Stochastic depth of the last block");
  visitor("drop", o.drop, g, "Dropout before the head");
  visitor("ema", o.ema, g, "Keep an average of the weights with this decay, beside the plain ones; 0: none");
  visitor("seed", o.seed, g, "Seed of everything random");
  visitor("precision", o.precision, g, "fp32 or bf16, several times as fast on GPUs");
  g = "What is trained";
  visitor("train_what", o.train_what, g, "all, head, mask (mask and head) or adapters (adapters, mask and head)");
  visitor("adapter", o.adapter, g, "Low-rank adapters: lora or dora");
  visitor("rank", o.rank, g, "Of adapters");
  visitor("adapter_targets", o.adapter_targets, g, "Projections that get one: qkv, proj, fc1, fc2");
  visitor("adapter_alpha", o.adapter_alpha, g, "Adapters are scaled by this over their rank");
  g = "Images";
  visitor("img_size", o.img_size, g, "Pixels per side, N or HxW; 0: the model's");
  visitor("crop", o.crop, g, "auto, resized (random part, scaled), padded (random shift), centre or squash");
  visitor("min_scale", o.min_scale, g, "Smallest share of the image that a resized crop takes");
  visitor("flip", o.flip, g, "Probability of a mirrored image");
  visitor("rand_augment", o.rand_augment, g, "RandAugment in timm's notation, or none");
  visitor("colour_jitter", o.colour_jitter, g, "Strength of colour jitter");
  visitor("erase", o.erase, g, "Probability of an erased box");
  visitor("mixup", o.mixup, g, "Alpha of mixup; 0: none");
  visitor("cutmix", o.cutmix, g, "Alpha of CutMix; 0: none");
  visitor("mix_probability", o.mix_probability, g, "Share of batches that are mixed");
  visitor("smoothing", o.smoothing, g, "Label smoothing");
  visitor("repeats", o.repeats, g,
          "Repeated augmentation: visits of an image per epoch; 0: 3 where several processes train together, as DeiT, "
          "or else 1");
  visitor("statistics", o.statistics, g,
          "auto (the weights', or CIFAR's up to 32 pixels), data (measured), imagenet, inception, cifar10, cifar100, "
          "or m,m,m:d,d,d");
  g = "Data";
  visitor("class_weights", o.class_weights, g, "Of the loss: none, or inverse to how often a class occurs");
  visitor("balanced", o.balanced, g, "Draw every class equally often");
  visitor("held_out", o.held_out, g, "Share of train that becomes val where there is none");
  visitor("limit", o.limit, g, "Training images, drawn so that classes keep their shares; 0: all");
  visitor("on_bad_image", o.on_bad_image, g, "skip (name and count it) or fatal");
  visitor("cache_mb", o.cache_mb, g, "Memory for decoded images");
  visitor("eval_every", o.eval_every, g, "Epochs between evaluations on val");
  visitor("save_minutes", o.save_minutes, g, "Minutes between checkpoints within an epoch; 0: only at its end");
}

// "deit", "finetune", "vtab", "lora", "dora", "head", "mask".
const std::vector<std::string>& recipe_names();
// One line about a recipe, and what it sets.
std::string recipe_help(std::string_view name);
// Sets what the recipe says and leaves the rest. Throws violin::Error for an unknown name.
void apply_recipe(std::string_view name, Options& options);

// Unknown fields and wrong types are mistakes that are named.
void merge_json(const nlohmann::json& json, Options& options);
nlohmann::ordered_json to_json(const Options& options);

// "qkv, proj" as a list.
std::vector<std::string> adapter_targets(const Options& options);

// Throws violin::Error naming the option, what came and what is accepted.
void check(const Options& options);

}  // namespace violin::train
