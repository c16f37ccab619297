#include "violin/nn/config.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/nn/json_text.h"
#include "violin/ops/strategies.h"
#include "violin/text.h"

namespace violin::nn {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::int64_t kMaxSide = 1 << 16;

[[noreturn]] void reject(const std::string& field, const std::string& came, const std::string& expected) {
  throw Error("model: " + field + " is " + came + "; expected " + expected);
}

void require(bool good, const std::string& field, const std::string& came, const std::string& expected) {
  if (!good) reject(field, came, expected);
}

void one_of(const std::string& field, const std::string& value, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), value) == choices.end())
    reject(field, in_quotes(value), "one of " + joined(choices));
}

// One reader per type of field; each throws with the field's name.
bool read_bool(const std::string& field, const json& value) {
  require(value.is_boolean(), field, shown(value), "true or false");
  return value.get<bool>();
}
double read_number(const std::string& field, const json& value) {
  require(value.is_number(), field, shown(value), "a number");
  return value.get<double>();
}
std::int64_t read_integer(const std::string& field, const json& value) {
  require(value.is_number_integer() && std::abs(value.get<double>()) < 1e9, field, shown(value), "a whole number");
  return value.get<std::int64_t>();
}
std::string read_text(const std::string& field, const json& value) {
  require(value.is_string(), field, shown(value), "text");
  return value.get<std::string>();
}
Size read_size(const std::string& field, const json& value) {
  const std::optional<Size> size = size_from_json(value);
  require(size.has_value(), field, shown(value), "a whole number or [height, width]");
  return size.value_or(Size{});
}
std::vector<std::int64_t> read_integers(const std::string& field, const json& value) {
  require(value.is_array(), field, shown(value), "a list of whole numbers");
  std::vector<std::int64_t> result;
  for (const json& item : value) result.push_back(read_integer(field, item));
  return result;
}

using Reader = std::function<void(const std::string& field, const json& value)>;

void merge(const json& object, const std::string& where, const std::map<std::string, Reader>& readers) {
  require(object.is_object(), where.empty() ? "the description" : where, shown(object), "an object {…}");
  for (const auto& [key, value] : object.items()) {
    const auto reader = readers.find(key);
    std::string field = where.empty() ? "" : where + ".";
    field += key;
    if (reader == readers.end()) {
      std::vector<std::string> known;
      known.reserve(readers.size());
      for (const auto& [name, unused] : readers) known.push_back(name);
      throw Error("model: unknown field " + in_quotes(field) + did_you_mean(key, known));
    }
    reader->second(field, value);
  }
}

}  // namespace

ordered_json to_json(const Size& size) {
  if (size.is_square()) return size.height;
  return ordered_json::array({size.height, size.width});
}

std::optional<Size> size_from_json(const json& value) {
  const auto side = [](const json& number) -> std::optional<std::int64_t> {
    const double exact = number.is_number() ? number.get<double>() : std::nan("");
    if (!(std::abs(exact) < 1e9) || exact != std::trunc(exact)) return std::nullopt;
    return static_cast<std::int64_t>(exact);
  };
  if (value.is_string()) return parse_size(value.get<std::string>());
  const bool pair = value.is_array() && value.size() == 2;
  const auto height = side(pair ? value[0] : value);
  const auto width = pair ? side(value[1]) : height;
  if (!height || !width) return std::nullopt;
  return Size{*height, *width};
}

bool MaskConfig::covers_block(std::int64_t block) const {
  return blocks.empty() || std::find(blocks.begin(), blocks.end(), block) != blocks.end();
}

void check(const MaskConfig& mask) {
  std::vector<curves::Curve> parsed;
  if (!mask.curves.empty()) parsed = curves::parse_curves(mask.curves);
  const ops::Strategy strategy = ops::parse_strategy(mask.strategy);
  one_of("violin.init", mask.init, {"pretrain", "finetune", "none", "spread", "identity"});
  one_of("violin.parameterisation", mask.parameterisation, {"auto", "sigmoid", "rate"});
  require(!mask.decay || (*mask.decay > 0 && *mask.decay <= 1), "violin.decay",
          mask.decay ? std::to_string(*mask.decay) : "", "\"learned\" or a number above 0 and at most 1");
  require(!parsed.empty() || mask.alpha, "violin.curves", "empty", "at least one curve, or alpha: true");
  require(!parsed.empty() || !mask.curve_weights, "violin.curve_weights", "true", "false where there is no curve");
  if (mask.init != "identity") return;
  require(mask.parameterisation != "sigmoid", "violin.parameterisation", "\"sigmoid\"",
          "\"rate\" (or \"auto\") for init \"identity\": sigmoid(beta) is 1 for no beta");
  require(!mask.decay || *mask.decay == 1, "violin.decay", mask.decay ? std::to_string(*mask.decay) : "",
          "\"learned\" or 1 for init \"identity\"");
  // These add alpha M to something, so only alpha = 0 changes nothing.
  const bool adds =
      strategy == ops::Strategy::kMulV2 || strategy == ops::Strategy::kAddV1 || strategy == ops::Strategy::kAddAfterSm;
  require(!adds || mask.alpha, "violin.alpha", "false", "true for init \"identity\" with strategy " + mask.strategy);
}

void check(const ModelConfig& config) {
  const auto number = [](auto value) { return std::to_string(value); };
  const auto positive = [&](const std::string& field, std::int64_t value, std::int64_t most) {
    require(value >= 1 && value <= most, field, number(value), "a whole number from 1 to " + number(most));
  };
  const auto rate = [&](const std::string& field, double value) {
    require(value >= 0 && value < 1, field, number(value), "a share from 0 up to, but not, 1");
  };
  for (const auto& [name, size] : {std::pair<std::string, Size>{"img_size", config.img_size},
                                   std::pair<std::string, Size>{"patch_size", config.patch_size}}) {
    positive(name, size.height, kMaxSide);
    positive(name, size.width, kMaxSide);
  }
  require(config.grid().height >= 1 && config.grid().width >= 1, "img_size", to_string(config.img_size),
          "at least the patch size, " + to_string(config.patch_size));
  positive("in_chans", config.in_chans, 1024);
  require(config.num_classes >= 0 && config.num_classes <= (1 << 24), "num_classes", number(config.num_classes),
          "0 (no head) or the number of classes");
  positive("embed_dim", config.embed_dim, 1 << 16);
  positive("depth", config.depth, 1000);
  positive("num_heads", config.num_heads, 4096);
  require(config.embed_dim % config.num_heads == 0, "num_heads", number(config.num_heads),
          "a divisor of embed_dim, " + number(config.embed_dim));
  require(config.mlp_ratio > 0 && config.mlp_ratio < 1000, "mlp_ratio", number(config.mlp_ratio), "above 0");
  require(config.reg_tokens >= 0 && config.reg_tokens <= 4096, "reg_tokens", number(config.reg_tokens), "0 or more");
  require(!config.distilled || config.class_token, "distilled", "true", "a class token beside it (class_token: true)");
  one_of("pos_embed", config.pos_embed, {"learn", "none"});
  require(config.global_pool.empty() || config.global_pool == "token" || config.global_pool == "avg", "global_pool",
          in_quotes(config.global_pool), "token, avg or \"\" (all tokens)");
  require(config.global_pool != "token" || config.class_token, "global_pool", "token",
          "avg (or \"\") where class_token is false");
  require(!config.distilled || config.global_pool == "token", "global_pool", in_quotes(config.global_pool),
          "token for a distilled model");
  one_of("pos_resample", config.pos_resample, {"timm", "dino", "deit"});
  rate("drop_rate", config.drop_rate);
  rate("pos_drop_rate", config.pos_drop_rate);
  rate("proj_drop_rate", config.proj_drop_rate);
  rate("attn_drop_rate", config.attn_drop_rate);
  rate("drop_path_rate", config.drop_path_rate);
  require(config.norm_eps > 0, "norm_eps", number(config.norm_eps), "above 0");
  if (config.violin) {
    check(*config.violin);
    const auto within = [&](const std::string& field, const std::vector<std::int64_t>& list, std::int64_t count) {
      std::set<std::int64_t> seen;
      for (const std::int64_t item : list) {
        require(item >= 0 && item < count, field, number(item), "numbers from 0 to " + number(count - 1));
        require(seen.insert(item).second, field, number(item) + " twice", "each number once");
      }
    };
    within("violin.blocks", config.violin->blocks, config.depth);
    within("violin.heads", config.violin->heads, config.num_heads);
  }
  if (config.adapters) {
    one_of("adapters.kind", config.adapters->kind, {"lora", "dora"});
    require(!config.adapters->ranks.empty(), "adapters.ranks", "empty", "a rank for qkv, proj, fc1 or fc2");
    for (const auto& [target, rank] : config.adapters->ranks) {
      one_of("adapters.ranks", target, {"qkv", "proj", "fc1", "fc2"});
      positive("adapters.ranks." + target, rank, config.embed_dim);
    }
    require(config.adapters->alpha > 0, "adapters.alpha", number(config.adapters->alpha), "above 0");
  }
}

void merge_json(const json& object, MaskConfig& mask) {
  const std::map<std::string, Reader> readers = {
      {"curves",
       [&](const std::string& field, const json& value) {
         if (value.is_string()) {
           mask.curves = value.get<std::string>();
           return;
         }
         require(value.is_array(), field, shown(value), "a set's name or a list of curves");
         mask.curves.clear();
         for (const json& name : value) mask.curves += (mask.curves.empty() ? "" : ",") + read_text(field, name);
       }},
      {"strategy", [&](const auto& field, const json& value) { mask.strategy = read_text(field, value); }},
      {"decay",
       [&](const auto& field, const json& value) {
         mask.decay.reset();
         if (value.is_string() && value.get<std::string>() == "learned") return;
         require(value.is_number(), field, shown(value), "\"learned\" or a number");
         mask.decay = value.get<double>();
       }},
      {"decay_per_axis", [&](const auto& field, const json& value) { mask.decay_per_axis = read_bool(field, value); }},
      {"alpha", [&](const auto& field, const json& value) { mask.alpha = read_bool(field, value); }},
      {"curve_weights", [&](const auto& field, const json& value) { mask.curve_weights = read_bool(field, value); }},
      {"prefix_decay",
       [&](const auto& field, const json& value) {
         const std::string text = read_text(field, value);
         one_of(field, text, {"one", "learned"});
         mask.learned_prefix_decay = text == "learned";
       }},
      {"init", [&](const auto& field, const json& value) { mask.init = read_text(field, value); }},
      {"parameterisation",
       [&](const auto& field, const json& value) { mask.parameterisation = read_text(field, value); }},
      {"blocks", [&](const auto& field, const json& value) { mask.blocks = read_integers(field, value); }},
      {"heads", [&](const auto& field, const json& value) { mask.heads = read_integers(field, value); }},
  };
  merge(object, "violin", readers);
}

void merge_json(const json& object, AdapterConfig& adapters) {
  const std::map<std::string, Reader> readers = {
      {"kind", [&](const auto& field, const json& value) { adapters.kind = read_text(field, value); }},
      {"alpha", [&](const auto& field, const json& value) { adapters.alpha = read_number(field, value); }},
      {"norm_gradient",
       [&](const auto& field, const json& value) { adapters.norm_gradient = read_bool(field, value); }},
      {"ranks",
       [&](const auto& field, const json& value) {
         require(value.is_object(), field, shown(value), "an object {\"qkv\": 8, …}");
         adapters.ranks.clear();
         for (const auto& [target, rank] : value.items()) {
           std::string name = field + ".";
           name += target;
           adapters.ranks[target] = read_integer(name, rank);
         }
       }},
  };
  merge(object, "adapters", readers);
}

void merge_json(const json& object, ModelConfig& config) {
  const auto flag = [](bool& target) {
    return [&target](const std::string& field, const json& value) { target = read_bool(field, value); };
  };
  const auto integer = [](std::int64_t& target) {
    return [&target](const std::string& field, const json& value) { target = read_integer(field, value); };
  };
  const auto number = [](double& target) {
    return [&target](const std::string& field, const json& value) { target = read_number(field, value); };
  };
  const auto text = [](std::string& target) {
    return [&target](const std::string& field, const json& value) { target = read_text(field, value); };
  };
  const auto size = [](Size& target) {
    return [&target](const std::string& field, const json& value) { target = read_size(field, value); };
  };
  const std::map<std::string, Reader> readers = {
      {"img_size", size(config.img_size)},
      {"patch_size", size(config.patch_size)},
      {"in_chans", integer(config.in_chans)},
      {"num_classes", integer(config.num_classes)},
      {"embed_dim", integer(config.embed_dim)},
      {"depth", integer(config.depth)},
      {"num_heads", integer(config.num_heads)},
      {"mlp_ratio", number(config.mlp_ratio)},
      {"qkv_bias", flag(config.qkv_bias)},
      {"class_token", flag(config.class_token)},
      {"distilled", flag(config.distilled)},
      {"reg_tokens", integer(config.reg_tokens)},
      {"pos_embed", text(config.pos_embed)},
      {"no_embed_class", flag(config.no_embed_class)},
      {"global_pool", text(config.global_pool)},
      {"fc_norm",
       [&](const std::string& field, const json& value) {
         config.fc_norm.reset();
         if (!value.is_null()) config.fc_norm = read_bool(field, value);
       }},
      {"init_values",
       [&](const std::string& field, const json& value) {
         config.init_values.reset();
         if (!value.is_null()) config.init_values = read_number(field, value);
       }},
      {"drop_rate", number(config.drop_rate)},
      {"pos_drop_rate", number(config.pos_drop_rate)},
      {"proj_drop_rate", number(config.proj_drop_rate)},
      {"attn_drop_rate", number(config.attn_drop_rate)},
      {"drop_path_rate", number(config.drop_path_rate)},
      {"norm_eps", number(config.norm_eps)},
      {"pos_resample", text(config.pos_resample)},
      {"violin",
       [&](const std::string&, const json& value) {
         if (value.is_null()) {
           config.violin.reset();
           return;
         }
         MaskConfig mask = config.violin.value_or(MaskConfig{});
         merge_json(value, mask);
         config.violin = mask;
       }},
      {"adapters",
       [&](const std::string&, const json& value) {
         if (value.is_null()) {
           config.adapters.reset();
           return;
         }
         AdapterConfig adapters = config.adapters.value_or(AdapterConfig{});
         merge_json(value, adapters);
         config.adapters = adapters;
       }},
  };
  merge(object, "", readers);
}

ModelConfig model_from_json(const json& object) {
  ModelConfig config;
  merge_json(object, config);
  check(config);
  return config;
}

ordered_json to_json(const MaskConfig& mask) {
  ordered_json object;
  const std::vector<std::string>& sets = curves::curve_set_names();
  if (std::find(sets.begin(), sets.end(), mask.curves) != sets.end()) {
    object["curves"] = mask.curves;
  } else {
    object["curves"] = ordered_json::array();
    if (!mask.curves.empty())
      for (const curves::Curve& curve : curves::parse_curves(mask.curves)) object["curves"].push_back(curve.name());
  }
  object["strategy"] = mask.strategy;
  if (mask.decay) {
    object["decay"] = *mask.decay;
  } else {
    object["decay"] = "learned";
  }
  object["decay_per_axis"] = mask.decay_per_axis;
  object["alpha"] = mask.alpha;
  object["curve_weights"] = mask.curve_weights;
  object["prefix_decay"] = mask.learned_prefix_decay ? "learned" : "one";
  object["init"] = mask.init;
  object["parameterisation"] = mask.uses_rate() ? "rate" : "sigmoid";
  if (!mask.blocks.empty()) object["blocks"] = mask.blocks;
  if (!mask.heads.empty()) object["heads"] = mask.heads;
  return object;
}

ordered_json to_json(const AdapterConfig& adapters) {
  return {{"kind", adapters.kind},
          {"ranks", adapters.ranks},
          {"alpha", adapters.alpha},
          {"norm_gradient", adapters.norm_gradient}};
}

ordered_json to_json(const ModelConfig& config) {
  ordered_json object = {
      {"img_size", to_json(config.img_size)},
      {"patch_size", to_json(config.patch_size)},
      {"in_chans", config.in_chans},
      {"num_classes", config.num_classes},
      {"embed_dim", config.embed_dim},
      {"depth", config.depth},
      {"num_heads", config.num_heads},
      {"mlp_ratio", config.mlp_ratio},
      {"qkv_bias", config.qkv_bias},
      {"class_token", config.class_token},
      {"distilled", config.distilled},
      {"reg_tokens", config.reg_tokens},
      {"pos_embed", config.pos_embed},
      {"no_embed_class", config.no_embed_class},
      {"global_pool", config.global_pool},
      {"fc_norm", config.norm_behind_pooling()},
      {"init_values", nullptr},
      {"drop_rate", config.drop_rate},
      {"pos_drop_rate", config.pos_drop_rate},
      {"proj_drop_rate", config.proj_drop_rate},
      {"attn_drop_rate", config.attn_drop_rate},
      {"drop_path_rate", config.drop_path_rate},
      {"norm_eps", config.norm_eps},
      {"pos_resample", config.pos_resample},
  };
  if (config.init_values) object["init_values"] = *config.init_values;
  if (config.violin) object["violin"] = to_json(*config.violin);
  if (config.adapters) object["adapters"] = to_json(*config.adapters);
  return object;
}

}  // namespace violin::nn
