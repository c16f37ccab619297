// A model out of a file, and into one.
//
//   LoadedModel loaded = load_model("deit_small.pth", {.num_classes = 10});
//   loaded.model->forward(images);
//   save_model("mine.safetensors", *loaded.model, loaded.preprocessing, names);
//
// A file that was saved here says what it is in its metadata: violin.model (the configuration as JSON),
// violin.preprocessing, violin.classes (a JSON list of names), violin.version. For other files the architecture is
// given by name or configuration, or follows from the tensors.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "violin/checkpoint/architecture.h"
#include "violin/checkpoint/preprocessing.h"
#include "violin/nn/vit.h"

namespace violin::checkpoint {

struct LoadOptions {
  std::string model;                        // a name of the registry
  std::optional<nn::ModelConfig> config;    // instead of a name
  std::optional<std::int64_t> num_heads;    // where nothing tells
  std::optional<std::int64_t> num_classes;  // another number than the file's: a fresh head; 0: no head
  std::optional<Size> img_size;             // positions are resampled
  std::string pos_resample;                 // by this rule (timm, dino, deit); empty: the model's
  std::optional<Size> patch_size;  // the patch embedding is resampled so that it sees the same in scaled patches
  std::string branch;              // of a file with several: "student", "ema", …
  bool strict = true;              // weights that are missing are an error; otherwise they get initial values
  c10::Device device = c10::kCPU;
  std::uint64_t seed = 0;  // of what the file does not have
};

// What became of a file's tensors.
struct LoadReport {
  std::string file;
  std::string format;
  std::string branch;
  std::string architecture;             // "deit_small_patch16_224 (told from the tensors)"
  std::vector<std::string> loaded;      // names, ours
  std::vector<std::string> adapted;     // lines: "positions resampled (deit): 14x14 to 24x24"
  std::vector<std::string> missing;     // names
  std::vector<std::string> unexpected;  // names, the file's
  std::vector<std::string> ignored;     // lines: what else the file holds
  std::vector<std::string> notes;       // lines: what was assumed

  std::string text() const;
  nlohmann::ordered_json json() const;
  // What somebody who only uses the weights should hear: what was assumed, and what of the file the model has no place
  // for.
  std::vector<std::string> warnings() const;
};

struct LoadedModel {
  nn::Model model;   // in evaluation mode
  std::string name;  // of the registry, where known
  data::EvalOptions preprocessing;
  std::vector<std::string> classes;  // empty where the file has no names
  Metadata metadata;                 // the file's
  LoadReport report;
};

// A weights file as it is; for the folder of a run, the weights of its best epoch, otherwise of its last, with the
// branch "ema" their average. Throws violin::Error where there are none.
std::filesystem::path resolve_weights(const std::filesystem::path& path, const std::string& branch = "");

// Tensors in float32 are not copied: what is read from the file is the parameters' memory. Throws violin::Error that
// names the file and the tensor for shapes that do not fit and weights that are missing.
LoadedModel load_model(const std::filesystem::path& path, const LoadOptions& options = {});

// The configuration, preprocessing and classes that a file's metadata hold, if any. Throws violin::Error that names the
// file for metadata that cannot be read.
struct FileDescription {
  std::optional<nn::ModelConfig> config;
  std::optional<data::EvalOptions> preprocessing;
  std::vector<std::string> classes;
};
FileDescription describe(const TensorFile& file, const std::string& file_name);

// `extra` goes into the metadata as well; `dtype` is that of the file, but masks stay in float32, where a decay close
// to 1 has its digits. Throws violin::Error for names that are not one per class, and for adapters that are merged into
// the weights (unmerge or drop them first).
void save_model(const std::filesystem::path& path, const nn::VisionTransformer& model,
                const data::EvalOptions& preprocessing, const std::vector<std::string>& classes = {},
                const Metadata& extra = {}, at::ScalarType dtype = at::kFloat);

// A patch embedding [D,C,h,w] for patches of another size: a patch and its scaled image give about the same token. The
// weights are multiplied by the pseudo-inverse of antialiased bicubic scaling, as timm does.
at::Tensor resample_patches(const at::Tensor& weight, const Size& size);

}  // namespace violin::checkpoint
