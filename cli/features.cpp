// violin features: logits, pooled features and tokens of images, as tensors in a file.

#include <torch/torch.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/compute.h"
#include "cli/progress.h"
#include "cli/weights.h"
#include "violin/checkpoint/safetensors.h"
#include "violin/data/loader.h"
#include "violin/nn/json_text.h"
#include "violin/nn/memory.h"
#include "violin/text.h"

namespace violin::cli {
namespace {

struct Options {
  std::string weights;
  std::string input;
  std::string out;
  std::string blocks;
  bool tokens = false;
  std::int64_t batch = 32;
  std::string on_bad_image = "skip";
  WeightsOptions model;
  ComputeOptions compute;
  bool json = false;
};

// "0,3", "-1" (the last) or "all"
std::vector<std::int64_t> parse_blocks(const std::string& text, std::int64_t depth) {
  std::vector<std::int64_t> blocks;
  if (text.empty()) return blocks;
  if (text == "all") {
    for (std::int64_t i = 0; i < depth; ++i) blocks.push_back(i);
    return blocks;
  }
  for (std::int64_t block : parse_integers("--blocks", text)) {
    if (block < 0) block += depth;
    if (block < 0 || block >= depth)
      throw Usage("--blocks '" + text + "': the model has blocks 0 to " + std::to_string(depth - 1));
    if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) blocks.push_back(block);
  }
  return blocks;
}

// Collects what a model says about batches of images.
class Collector {
 public:
  Collector(nn::VisionTransformer& model, const Compute& compute, std::vector<std::int64_t> blocks, bool tokens)
      : model_(model), compute_(compute), tokens_(tokens) {
    what_.blocks = std::move(blocks);
  }

  void add(const at::Tensor& images) {
    const torch::NoGradGuard no_grad;
    const nn::PrecisionScope precision(compute_.device.type(), compute_.precision);
    const nn::Observed seen = nn::within_memory(images, "--batch", [&](const at::Tensor& some) {
      return model_.observe(some.to(compute_.device, at::kFloat), what_);
    });
    keep("logits", seen.logits);
    keep("features", seen.features);
    if (tokens_) keep("tokens", seen.tokens);
    for (const auto& [block, values] : seen.blocks) keep("blocks." + std::to_string(block), values);
  }

  checkpoint::NamedTensors results() const {
    checkpoint::NamedTensors all;
    for (const auto& [name, parts] : parts_) all.emplace_back(name, at::cat(parts));
    return all;
  }

 private:
  void keep(const std::string& name, const at::Tensor& values) {
    parts_[name].push_back(values.detach().to(at::kCPU, at::kFloat));
  }

  nn::VisionTransformer& model_;
  const Compute& compute_;
  nn::Observe what_;
  bool tokens_;
  std::map<std::string, std::vector<at::Tensor>> parts_;
};

// "images" [n,C,H,W] of a tensor file, already normalised.
void from_tensors(const Options& options, Collector& collector) {
  const checkpoint::TensorFile file = checkpoint::TensorFile::open(options.input);
  const at::Tensor images = file.tensor("images");
  if (images.dim() != 4 || images.size(0) < 1 || !at::isFloatingType(images.scalar_type())) {
    throw Error(file_in_quotes(options.input) + ": tensor 'images' is " + checkpoint::shape_text(images.sizes().vec()) +
                " of " + c10::toString(images.scalar_type()) +
                "; expected floating-point numbers [images,channels,height,width]");
  }
  Progress progress("features", images.size(0), "images");
  for (std::int64_t begin = 0; begin < images.size(0); begin += options.batch) {
    const at::Tensor part = images.narrow(0, begin, std::min(options.batch, images.size(0) - begin));
    collector.add(part.contiguous());
    progress.advance(part.size(0));
  }
}

struct Read {
  std::vector<std::string> names;  // of the rows, relative to the folder
  std::vector<data::BadImage> bad;
};

Read from_images(const Options& options, const Compute& compute, const data::EvalOptions& preprocessing,
                 Collector& collector) {
  const data::OnBadImage policy =
      argument("--on-bad-image", [&] { return data::parse_on_bad_image(options.on_bad_image); });
  const data::SampleSet set = data::open_images({options.input});
  data::LoaderOptions loading;
  loading.workers = compute.workers;
  loading.on_bad_image = policy;
  loading.pin = compute.device.is_cuda();
  data::Loader loader(set, std::make_shared<data::EvalTransform>(preprocessing), loading);
  loader.start(data::in_order(set.size()), options.batch, 0);
  Read read;
  Progress progress("features", set.size(), "images");
  while (const std::optional<data::Batch> batch = loader.next()) {
    if (batch->size() == 0) continue;
    collector.add(batch->images);
    const auto* indices = batch->indices.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < batch->size(); ++i) {
      const std::filesystem::path path = set[indices[i]].path;
      const std::filesystem::path relative = path.lexically_relative(options.input);
      read.names.push_back(relative.empty() || relative == "." ? path.filename().string() : relative.string());
    }
    progress.advance(batch->size());
  }
  progress.finish();
  read.bad = loader.bad_images();
  note_skipped(read.bad);
  if (read.names.empty()) throw Error(file_in_quotes(options.input) + ": no image could be decoded");
  return read;
}

void run_features(const Options& options) {
  if (options.batch < 1) throw Usage("--batch must be at least 1");
  check_output("--out", options.out, {options.weights, options.input});
  const bool of_images = std::filesystem::is_directory(options.input) || data::is_image_file(options.input);
  const Compute compute = start_compute(options.compute);
  const checkpoint::LoadedModel loaded = load_weights(options.weights, options.model, compute.device);
  note(loaded.report.architecture + ", " + std::to_string(loaded.report.loaded.size()) + " tensors");
  nn::VisionTransformer& model = *loaded.model;
  Collector collector(model, compute, parse_blocks(options.blocks, model.config().depth), options.tokens);

  const auto start = std::chrono::steady_clock::now();
  Read read;
  if (of_images) {
    read = from_images(options, compute, loaded.preprocessing, collector);
  } else {
    from_tensors(options, collector);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const checkpoint::NamedTensors results = collector.results();
  checkpoint::Metadata metadata;
  if (!read.names.empty()) metadata["violin.images"] = nn::json_text(nlohmann::json(read.names));
  if (!loaded.classes.empty()) metadata["violin.classes"] = nlohmann::json(loaded.classes).dump();
  checkpoint::save_safetensors(options.out, results, metadata);

  const auto images = results.front().second.size(0);
  if (options.json) {
    nlohmann::ordered_json shapes = nlohmann::ordered_json::object();
    for (const auto& [name, tensor] : results) shapes[name] = tensor.sizes().vec();
    nlohmann::ordered_json skipped = nlohmann::ordered_json::array();
    for (const data::BadImage& bad : read.bad) skipped.push_back({{"image", bad.name}, {"message", bad.message}});
    const nlohmann::ordered_json json = {{"images", images},
                                         {"out", options.out},
                                         {"architecture", loaded.report.architecture},
                                         {"tensors", shapes},
                                         {"skipped", skipped},
                                         {"seconds", seconds},
                                         {"images_per_second", static_cast<double>(images) / seconds}};
    return print(nn::json_text(json) + "\n");
  }
  for (const auto& [name, tensor] : results) print(name + " " + checkpoint::shape_text(tensor.sizes().vec()) + "\n");
  note("wrote " + options.out);
}

}  // namespace

void add_features(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("features", "Embeddings and logits of images");
  verb->group("Verbs");
  verb->add_option("WEIGHTS", options->weights, "Weights (.pth, .pt, .safetensors) or a run's folder")->required();
  verb->add_option("--input", options->input,
                   "A folder of images, an image, or a tensor file with normalised \"images\" [n,3,H,W]")
      ->type_name("PATH")
      ->required();
  verb->add_option("--out", options->out, "The safetensors file to write")->type_name("FILE")->required();
  verb->add_option("--blocks", options->blocks, "Tokens after these blocks as well: 0,3 or all")
      ->type_name("LIST")
      ->group("Output");
  verb->add_flag("--tokens", options->tokens, "All tokens behind the last norm as well")->group("Output");
  verb->add_flag("--json", options->json, "Print a summary as JSON and nothing else")->group("Output");
  verb->add_option("--batch", options->batch, "Images per forward pass (default 32)")
      ->type_name("N")
      ->group("Computation");
  verb->add_option("--on-bad-image", options->on_bad_image, "skip (default) or fatal")
      ->type_name("WHAT")
      ->group("Computation");
  add_weights_options(*verb, options->model);
  add_compute_options(*verb, options->compute, Draws::kNone);
  verb->footer(
      R"(The file holds "logits" [n,classes], "features" (pooled) [n,width] and what was asked for; for a folder,
the names of the images in order are in its metadata as "violin.images".

Examples:
  violin features run/ --input photos/ --out photos.safetensors
  violin features dino_deitsmall16.pth --input images.safetensors --out out.safetensors --blocks 0,11)");
  verb->callback([options] { run_features(*options); });
}

}  // namespace violin::cli
