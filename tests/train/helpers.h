// Small data and models for the tests of training.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/temporary_folder.h"
#include "violin/data/image.h"
#include "violin/data/random.h"
#include "violin/train/train.h"

namespace violin::tests {

// Images whose class shows: a bright square in a corner that belongs to the class, on noise.
inline void write_images(const std::filesystem::path& folder, int classes, int per_class, std::int64_t size = 16,
                         std::int64_t first = 0) {
  for (int label = 0; label < classes; ++label) {
    const std::filesystem::path where = folder / ("class_" + std::to_string(label));
    std::filesystem::create_directories(where);
    for (int i = 0; i < per_class; ++i) {
      data::Random random(7, data::Purpose::kAugment, {label, first + i});
      Image image(size, size);
      for (std::uint8_t& value : image.pixels) value = static_cast<std::uint8_t>(random.below(120));
      const std::int64_t half = size / 2, left = label % 2 * half, top = label / 2 % 2 * half;
      for (std::int64_t y = top + 1; y < top + half - 1; ++y)
        for (std::int64_t x = left + 1; x < left + half - 1; ++x) image.at(x, y)[label / 4 % 3] = 250;
      write_file_atomically(where / ("image_" + std::to_string(first + i) + ".png"), encode_png(image));
    }
  }
}

inline nn::ModelConfig tiny_model() {
  nn::ModelConfig config;
  config.img_size = {16, 16};
  config.patch_size = {4, 4};
  config.embed_dim = 24;
  config.depth = 2;
  config.num_heads = 2;
  config.class_token = false;
  config.global_pool = "avg";
  config.fc_norm = false;
  config.violin = nn::MaskConfig{};
  return config;
}

inline train::Request tiny_request(const std::filesystem::path& data) {
  train::Request request;
  request.data = data;
  request.config = tiny_model();
  train::Options& options = request.options;
  train::apply_recipe("deit", options);
  options.epochs = 3;
  options.batch_size = 8;
  options.warmup_epochs = 1;
  options.lr = 2e-3;
  return request;
}

inline train::Outcome train_run(const train::Prepared& prepared, train::RunFolder* run, std::int64_t stop_after = 0,
                                bool resume = false, int workers = 1) {
  train::TrainerOptions options;
  options.workers = workers;
  options.stop_after_steps = stop_after;
  if (run != nullptr && !resume) run->write("config.json", train::to_json(prepared.task));
  train::Trainer trainer(prepared.task, prepared.dataset, prepared.model, run, options);
  if (resume) trainer.resume();
  return trainer.train();
}

// As the command line does it: nothing but the folder.
inline train::Prepared reopened(const std::filesystem::path& folder) {
  train::Prepared prepared;
  prepared.task = train::task_from_json(train::read_json_file(folder / "config.json"));
  prepared.dataset = train::open_task_data(prepared.task);
  prepared.model = std::make_shared<nn::VisionTransformer>(prepared.task.model, prepared.task.options.seed);
  return prepared;
}

}  // namespace violin::tests
