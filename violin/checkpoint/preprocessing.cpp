#include "violin/checkpoint/preprocessing.h"

#include <nlohmann/json.hpp>

#include "violin/error.h"
#include "violin/nn/json_text.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

using nlohmann::json;

constexpr std::int64_t kLargestSize = 1 << 14;

[[noreturn]] void reject(const std::string& field, const json& value, const std::string& expected) {
  throw Error("preprocessing: " + field + " is " + nn::shown(value) + "; expected " + expected);
}

std::string text(const std::string& field, const json& value) {
  if (!value.is_string()) reject(field, value, "text");
  return value.get<std::string>();
}

std::array<double, 3> channels(const std::string& field, const json& value, bool positive) {
  std::array<double, 3> result{};
  const char* expected = positive ? "three numbers above 0" : "three numbers";
  if (!value.is_array() || value.size() != result.size()) reject(field, value, expected);
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (!value[i].is_number()) reject(field, value, expected);
    result[i] = value[i].get<double>();
    if (positive && !(result[i] > 0)) reject(field, value, expected);
  }
  return result;
}

}  // namespace

nlohmann::ordered_json to_json(const data::EvalOptions& options) {
  return {{"size", nn::to_json(options.size)},
          {"crop_pct", options.crop_pct},
          {"crop", options.crop == data::EvalCrop::kSquash ? "squash" : "centre"},
          {"interpolation", data::interpolation_name(options.interpolation)},
          {"mean", options.normalisation.mean},
          {"std", options.normalisation.deviation}};
}

data::EvalOptions preprocessing_from_json(const json& object) {
  if (!object.is_object()) reject("the description", object, "an object {…}");
  data::EvalOptions options;
  for (const auto& [key, value] : object.items()) {
    if (key == "size") {
      const std::optional<Size> size = nn::size_from_json(value);
      if (!size || size->shorter() < 1 || size->longer() > kLargestSize)
        reject(key, value, "a whole number from 1 to " + std::to_string(kLargestSize) + ", or [height, width]");
      options.size = *size;
    } else if (key == "crop_pct") {
      if (!value.is_number() || !(value.get<double>() >= 0.05 && value.get<double>() <= 1))
        reject(key, value, "a share from 0.05 to 1");
      options.crop_pct = value.get<double>();
    } else if (key == "crop") {
      const std::string name = text(key, value);
      if (name != "centre" && name != "squash") reject(key, value, "centre or squash");
      options.crop = name == "squash" ? data::EvalCrop::kSquash : data::EvalCrop::kCentre;
    } else if (key == "interpolation") {
      options.interpolation = data::parse_interpolation(text(key, value));
    } else if (key == "mean") {
      options.normalisation.mean = channels(key, value, false);
    } else if (key == "std") {
      options.normalisation.deviation = channels(key, value, true);
    } else {
      throw Error("preprocessing: unknown field " + in_quotes(key) +
                  "; there are size, crop_pct, crop, interpolation, mean and std");
    }
  }
  return options;
}

data::EvalOptions default_preprocessing(const std::string& family, const nn::ModelConfig& config) {
  data::EvalOptions options;
  options.size = config.img_size;
  options.crop_pct = options.size.longer() >= 384 || options.size.longer() <= 64 ? 1 : 0.9;
  options.normalisation = family == "ViT" ? data::kInceptionStatistics : data::kImageNetStatistics;
  return options;
}

}  // namespace violin::checkpoint
