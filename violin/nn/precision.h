// In which precision a model computes. Parameters are float32 either way; bf16 lets torch's autocast choose what is
// computed in 16 bits.
#pragma once

#include <ATen/autocast_mode.h>

#include <string>
#include <string_view>

#include "violin/error.h"

namespace violin::nn {

enum class Precision { kFp32, kBf16 };

inline Precision parse_precision(std::string_view name) {
  if (name == "fp32") return Precision::kFp32;
  if (name == "bf16") return Precision::kBf16;
  throw Error("unknown precision '" + std::string(name) + "'; there are fp32 and bf16");
}

// How often autocast brings a weight into 16 bits. It keeps what it has cast in one place for all threads, without a
// word about streams, so that threads with streams of their own may not share it.
enum class WeightCasts { kOncePerScope, kAtEachUse };

// Autocast for this thread and type of device, as long as the object lives.
class PrecisionScope {
 public:
  PrecisionScope(c10::DeviceType device, Precision precision, WeightCasts casts = WeightCasts::kOncePerScope);
  ~PrecisionScope();
  PrecisionScope(const PrecisionScope&) = delete;
  PrecisionScope& operator=(const PrecisionScope&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_, keeps_casts_;
  at::ScalarType dtype_;
};

}  // namespace violin::nn
