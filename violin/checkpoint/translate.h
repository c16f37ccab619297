// The one place that knows how other people name things: from any tensor file to a state under our names, which are
// timm's and, for masks, `blocks.I.attn.violin.*`. Nothing is read here but the list of tensors.
//
//   wrappers    {"model": …}, {"state_dict": …}, {"teacher": …, "student": …}, {"model": …, "model_ema": …}
//   prefixes    module., _orig_mod., backbone.; what stands beside a backbone (DINO's projection head) is left out
//   Violin      attn.ai_list.C [h] each          -> attn.violin.beta [C,h]
//               attn.ai_list [C,h] (fixed decay) -> attn.violin.gamma
//               attn.normalize [h]               -> attn.violin.alpha
//   DeiT-III    gamma_1, gamma_2                 -> ls1.gamma, ls2.gamma
//   DINOv2      register_tokens                  -> reg_token; the class token's position goes into cls_token
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "violin/checkpoint/tensor_file.h"

namespace violin::checkpoint {

struct StateEntry {
  std::string name;
  std::string source;  // its name in the file; the first one where several are joined
  DType dtype = DType::kF32;
  std::vector<std::int64_t> sizes;
  std::function<at::Tensor()> make;  // reads it
};

struct State {
  std::string file;                  // for messages
  std::string branch;                // "teacher", "model"; empty where the file has none
  std::vector<StateEntry> entries;   // in the order of the file
  std::vector<std::string> renamed;  // what was done to names, one line each
  std::vector<std::string> ignored;  // what else the file holds, one line each: "student.*: 52 tensors"
  bool from_dino = false;            // the file has a teacher or a student

  const StateEntry* find(std::string_view name) const;
};

// `branch` chooses among wrappers: a key of the file, or "ema" for model_ema, state_dict_ema or ema. By default the
// teacher of DINO, otherwise the model and not its average. Throws violin::Error that lists what there is.
State translate(const TensorFile& file, std::string file_name, const std::string& branch = "");

// "[192,3,16,16]"
std::string shape_text(const std::vector<std::int64_t>& sizes);

}  // namespace violin::checkpoint
