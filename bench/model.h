// Whole models on this machine: with a mask, without one, without one and with torch's attention instead of ours, and
// on request timm's twin in a process of its own. All take turns within a round, so that a slow moment hits everybody;
// what counts are the ratios within rounds.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "violin/nn/vit.h"

namespace violin::bench {

struct ModelOptions {
  nn::ModelConfig config;  // with a mask
  std::int64_t batch = 8;
  c10::Device device = c10::kCPU;
  bool bf16 = false;
  double seconds = 20;    // for each of inference and training
  bool adapters = false;  // also with LoRA and DoRA beside all projections, rank 8
  std::string trace;      // folder for a trace of one training step of each; empty: none
  std::string peer;       // a command that speaks bench/model_peer.py's protocol; empty: none
};

struct ModelRow {
  std::string name;
  double infer_ms = 0, train_ms = 0;        // medians
  double infer_ratio = 0, train_ratio = 0;  // to the first row, medians over rounds
  double issue_ms = 0;                      // until the host has issued a training step; 0 where nobody says
};

struct ModelResult {
  std::vector<ModelRow> rows;  // vanilla, violin, vanilla with torch's attention, and others where asked for
  std::int64_t infer_rounds = 0, train_rounds = 0;
};

ModelResult bench_model(const ModelOptions& options, const std::function<void(const std::string&)>& say);

}  // namespace violin::bench
