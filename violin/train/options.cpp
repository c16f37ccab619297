#include "violin/train/options.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "violin/data/augment.h"
#include "violin/data/transforms.h"
#include "violin/error.h"
#include "violin/nn/config.h"
#include "violin/nn/json_text.h"
#include "violin/number_text.h"
#include "violin/text.h"

namespace violin::train {
namespace {

using nlohmann::json;
using nn::shown;

struct Recipe {
  const char* name;
  const char* about;
  const char* options;  // what differs from the struct's defaults, which are DeiT's
};

// Plain fine-tuning: no mixing, no RandAugment, no erasing.
constexpr const char* kFinetune = R"({"epochs": 50, "lr": 5e-4, "min_lr": 1e-6, "layer_decay": 0.65, "drop_path": 0.0,
  "mask_lr": 10, "rand_augment": "", "erase": 0, "mixup": 0, "cutmix": 0, "smoothing": 0})";

constexpr Recipe kRecipes[] = {
    {"deit", "from scratch, DeiT's recipe: AdamW, cosine, RandAugment, mixup, CutMix, erasing",
     R"({"epochs": 300, "drop_path": 0.1, "repeats": 0})"},
    {"finetune", "all weights, from trained ones: random resized crop and flip, layer-wise decay 0.65, 50 epochs",
     kFinetune},
    {"vtab", "as finetune, without augmentation and with a plain resize, batch 64: the paper's protocol",
     R"({"epochs": 50, "lr": 5e-4, "min_lr": 1e-6, "layer_decay": 0.65, "batch_size": 64, "mask_lr": 1,
         "mask_layer_decay": true, "crop": "squash", "flip": 0, "rand_augment": "", "erase": 0, "mixup": 0, "cutmix": 0,
         "smoothing": 0})"},
    {"lora", "low-rank adapters, mask and head; the weights stay",
     R"({"epochs": 50, "lr": 1e-3, "min_lr": 1e-6, "adapter": "lora", "train_what": "adapters", "mask_lr": 10,
         "weight_decay": 0.0001, "rand_augment": "", "erase": 0, "mixup": 0, "cutmix": 0, "smoothing": 0})"},
    {"dora", "as lora, with adapters that scale the rows of the weights too",
     R"({"epochs": 50, "lr": 1e-3, "min_lr": 1e-6, "adapter": "dora", "train_what": "adapters", "mask_lr": 10,
         "weight_decay": 0.0001, "rand_augment": "", "erase": 0, "mixup": 0, "cutmix": 0, "smoothing": 0})"},
    {"head", "a linear classifier on frozen features",
     R"({"epochs": 50, "lr": 1e-3, "min_lr": 1e-6, "train_what": "head", "weight_decay": 0, "rand_augment": "",
         "erase": 0, "mixup": 0, "cutmix": 0, "smoothing": 0})"},
    {"mask", "the mask and the head; all other weights stay",
     R"({"epochs": 50, "lr": 1e-3, "min_lr": 1e-6, "train_what": "mask", "mask_lr": 10, "weight_decay": 0,
         "rand_augment": "", "erase": 0, "mixup": 0, "cutmix": 0, "smoothing": 0})"},
};

const Recipe& find(std::string_view name) {
  for (const Recipe& recipe : kRecipes)
    if (recipe.name == name) return recipe;
  throw Error("unknown recipe " + in_quotes(name) + did_you_mean(name, recipe_names(), ".") + " There are " +
              joined(recipe_names()));
}

template <class T>
void read(const std::string& name, const json& value, T& field) {
  const auto wrong = [&](const char* expected) {
    throw Error("option " + name + " is " + shown(value) + "; expected " + expected);
  };
  if constexpr (std::is_same_v<T, std::optional<double>>) {
    if (value.is_null()) {
      field.reset();
    } else if (value.is_number()) {
      field = value.get<double>();
    } else {
      wrong("a number or null");
    }
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!value.is_boolean()) wrong("true or false");
    field = value.get<bool>();
  } else if constexpr (std::is_same_v<T, double>) {
    if (!value.is_number()) wrong("a number");
    field = value.get<double>();
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!value.is_string()) wrong("text");
    field = value.get<std::string>();
  } else if constexpr (std::is_same_v<T, Size>) {
    if (const std::optional<Size> size = nn::size_from_json(value)) {
      field = *size;
    } else {
      wrong("a whole number, [height, width] or \"HxW\"");
    }
  } else {
    // 1e3 is a whole number too; larger ones than 2^53 must be written as such.
    const double number = value.is_number() ? value.get<double>() : std::nan("");
    if (!value.is_number_integer() && !(std::abs(number) <= 0x1p53 && number == std::trunc(number)))
      wrong("a whole number");
    if (std::is_unsigned_v<T> && number < 0) wrong("0 or more");
    if (std::is_signed_v<T> && value.is_number_unsigned() &&
        value.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()})
      wrong("a smaller number");
    field = value.get<T>();
  }
}

}  // namespace

const std::vector<std::string>& recipe_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Recipe& recipe : kRecipes) list.emplace_back(recipe.name);
    return list;
  }();
  return names;
}

std::string recipe_help(std::string_view name) {
  return find(name).about;
}

void apply_recipe(std::string_view name, Options& options) {
  const Recipe& recipe = find(name);
  merge_json(json::parse(recipe.options), options);
  options.recipe = recipe.name;
}

void merge_json(const json& object, Options& options) {
  if (!object.is_object()) throw Error("options are " + shown(object) + "; expected an object {\"epochs\": 50, …}");
  std::vector<std::string> known = {"recipe"};
  visit_options(options, [&](const std::string& name, auto& field, const char*, const char*) {
    known.push_back(name);
    if (object.contains(name)) read(name, object.at(name), field);
  });
  for (const auto& [key, value] : object.items()) {
    if (key == "recipe") read(key, value, options.recipe);
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    throw Error("unknown option " + in_quotes(key) + did_you_mean(key, known));
  }
}

nlohmann::ordered_json to_json(const Options& options) {
  nlohmann::ordered_json object;
  object["recipe"] = options.recipe;
  visit_options(options, [&](const std::string& name, const auto& field, const char*, const char*) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, std::optional<double>>) {
      if (field) {
        object[name] = *field;
      } else {
        object[name] = nullptr;
      }
    } else if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Size>) {
      object[name] = nn::to_json(field);
    } else {
      object[name] = field;
    }
  });
  return object;
}

std::vector<std::string> adapter_targets(const Options& options) {
  std::vector<std::string> targets(1);
  for (const char c : options.adapter_targets) {
    if (c == ',') {
      targets.emplace_back();
    } else if (c != ' ') {
      targets.back() += c;
    }
  }
  std::erase(targets, "");
  return targets;
}

void check(const Options& o) {
  const auto require = [](bool good, const std::string& name, const auto& came, const std::string& expected) {
    if (good) return;
    std::string text;
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(came)>>) {
      const auto number = static_cast<double>(came);
      text = std::isfinite(number) ? json(came).dump() : number_text(number, "%g");  // JSON has no inf and no nan
    } else if constexpr (std::is_same_v<std::decay_t<decltype(came)>, Size>) {
      text = short_text(came);
    } else {
      text = in_quotes(came);
    }
    throw Error("option " + name + " is " + text + "; expected " + expected);
  };
  const auto one_of = [&](const std::string& name, const std::string& value, const std::vector<std::string>& choices) {
    require(std::find(choices.begin(), choices.end(), value) != choices.end(), name, value,
            "one of " + joined(choices));
  };
  const auto share = [&](const std::string& name, double value) {
    require(value >= 0 && value <= 1, name, value, "a share from 0 to 1");
  };
  const auto within = [&](const std::string& name, std::int64_t value, std::int64_t least, std::int64_t most) {
    require(value >= least && value <= most, name, value,
            "a number from " + std::to_string(least) + " to " + std::to_string(most));
  };
  visit_options(o, [&](const std::string& name, const auto& field, const char*, const char*) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, double>) {
      require(std::isfinite(field), name, field, "a finite number");
    } else if constexpr (std::is_same_v<Field, std::optional<double>>) {
      require(std::isfinite(field.value_or(0)), name, field.value_or(0), "a finite number");
    }
  });
  within("epochs", o.epochs, 1, 1000000);
  within("batch_size", o.batch_size, 1, 1 << 20);
  require(o.accumulate >= 1 && o.accumulate <= o.batch_size, "accumulate", o.accumulate,
          "from 1 to the batch size, " + std::to_string(o.batch_size));
  require(!o.lr || *o.lr > 0, "lr", o.lr.value_or(0), "above 0");
  require(o.lr_per_512 > 0, "lr_per_512", o.lr_per_512, "above 0");
  require(std::isfinite(o.peak_lr()), "lr_per_512", o.lr_per_512, "a smaller number");
  require(o.min_lr >= 0, "min_lr", o.min_lr, "0 or more");
  require(o.warmup_lr >= 0, "warmup_lr", o.warmup_lr, "0 or more");
  require(o.warmup_epochs >= 0, "warmup_epochs", o.warmup_epochs, "0 or more");
  require(o.weight_decay >= 0, "weight_decay", o.weight_decay, "0 or more");
  require(o.beta1 >= 0 && o.beta1 < 1, "beta1", o.beta1, "from 0 up to, but not, 1");
  require(o.beta2 >= 0 && o.beta2 < 1, "beta2", o.beta2, "from 0 up to, but not, 1");
  require(o.eps > 0, "eps", o.eps, "above 0");
  require(o.clip_grad >= 0, "clip_grad", o.clip_grad, "0 or more");
  require(o.layer_decay > 0 && o.layer_decay <= 1, "layer_decay", o.layer_decay, "above 0 and at most 1");
  require(o.mask_lr >= 0, "mask_lr", o.mask_lr, "0 or more");
  require(o.ema >= 0 && o.ema < 1, "ema", o.ema, "from 0 up to, but not, 1");
  require(o.drop_path >= 0 && o.drop_path < 1, "drop_path", o.drop_path, "from 0 up to, but not, 1");
  require(o.drop >= 0 && o.drop < 1, "drop", o.drop, "from 0 up to, but not, 1");
  one_of("train_what", o.train_what, {"all", "head", "mask", "adapters"});
  if (!o.adapter.empty()) one_of("adapter", o.adapter, {"lora", "dora"});
  require(o.train_what != "adapters" || !o.adapter.empty(), "train_what", o.train_what,
          "an adapter beside it (adapter: lora or dora)");
  if (!o.adapter.empty()) {  // they are ignored otherwise
    const std::vector<std::string> targets = adapter_targets(o);
    for (const std::string& target : targets) one_of("adapter_targets", target, {"qkv", "proj", "fc1", "fc2"});
    require(!targets.empty(), "adapter_targets", o.adapter_targets, "some of qkv, proj, fc1, fc2");
  }
  within("rank", o.rank, 1, 65536);
  require(o.adapter_alpha > 0 && o.adapter_alpha <= 1e6, "adapter_alpha", o.adapter_alpha, "above 0 and at most 1e6");
  require(o.img_size == Size{} || (o.img_size.shorter() >= 1 && o.img_size.longer() <= data::kLargestSize), "img_size",
          o.img_size, "0, or sides of 1 to " + std::to_string(data::kLargestSize) + " pixels");
  if (!o.rand_augment.empty() && o.rand_augment != "none") data::parse_rand_augment(o.rand_augment);
  one_of("crop", o.crop, {"auto", "resized", "padded", "centre", "squash"});
  require(o.min_scale > 0 && o.min_scale <= 1, "min_scale", o.min_scale, "above 0 and at most 1");
  share("flip", o.flip);
  share("erase", o.erase);
  share("mix_probability", o.mix_probability);
  require(o.mixup >= 0, "mixup", o.mixup, "0 or more");
  require(o.cutmix >= 0, "cutmix", o.cutmix, "0 or more");
  require(o.smoothing >= 0 && o.smoothing < 1, "smoothing", o.smoothing, "from 0 up to, but not, 1");
  require(o.colour_jitter >= 0 && o.colour_jitter <= 100, "colour_jitter", o.colour_jitter, "from 0 to 100");
  within("repeats", o.repeats, 0, 64);
  if (o.statistics != "auto" && o.statistics != "data") {
    try {
      data::parse_statistics(o.statistics);
    } catch (const Error& error) {
      throw Error(std::string(error.what()) + "; or data, which measures them, or auto");
    }
  }
  one_of("class_weights", o.class_weights, {"none", "inverse"});
  require(!o.balanced || o.class_weights == "none", "class_weights", o.class_weights,
          "none beside balanced, which makes up for rare classes already");
  require(o.held_out >= 0 && o.held_out < 1, "held_out", o.held_out, "from 0 up to, but not, 1");
  require(o.limit >= 0, "limit", o.limit, "0 or more");
  one_of("on_bad_image", o.on_bad_image, {"skip", "fatal"});
  within("cache_mb", o.cache_mb, 0, 1 << 30);  // as bytes it must fit into 64 bits
  require(o.eval_every >= 1, "eval_every", o.eval_every, "at least 1");
  require(o.save_minutes >= 0, "save_minutes", o.save_minutes, "0 or more");
  one_of("precision", o.precision, {"fp32", "bf16"});
}

}  // namespace violin::train
