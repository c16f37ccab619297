// violin bench data: how many images a core decodes, augments and prepares per second, and what the loader delivers.
// bench/data_peer.py measures the same steps with torchvision and timm and prints the ratios.

#include "cli/bench_data.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/common.h"
#include "cli/weights.h"
#include "violin/data/loader.h"
#include "violin/nn/config.h"
#include "violin/nn/json_text.h"

namespace violin::cli {
namespace {

struct DataOptions {
  std::string data;
  std::string size = "224";
  int workers = 0;
  double seconds = 4;
  std::uint64_t seed = 0;
  bool json = false;
};

// Of this process: what a core needs for an image does not depend on what else the machine does.
double processor_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Images per processor second of `visit`, called with one index after the other for the given time; the first images
// warm up.
double rate(std::int64_t size, double seconds, const std::function<void(std::int64_t)>& visit) {
  for (std::int64_t i = 0; i < std::min<std::int64_t>(size, 16); ++i) visit(i);
  const double begin = processor_seconds();
  std::int64_t count = 0;
  double passed = 0;
  while (passed < seconds) {
    // Looking at the clock costs as much as a small image.
    for (int i = 0; i < 8; ++i) visit(count++ % size);
    passed = processor_seconds() - begin;
  }
  return static_cast<double>(count) / passed;
}

double transform_rate(const data::SampleSet& set, const data::Transform& transform, const DataOptions& options) {
  std::vector<float> out(static_cast<std::size_t>(3 * transform.size().area()));
  std::int64_t visits = 0;
  return rate(set.size(), options.seconds, [&](std::int64_t index) {
    data::Random random(options.seed, data::Purpose::kAugment, {visits++, index});
    transform.apply(set.decode(index), random, out.data());
  });
}

double loader_rate(const data::SampleSet& set, const std::shared_ptr<const data::Transform>& transform,
                   const DataOptions& options) {
  const std::int64_t batch = std::min<std::int64_t>(64, set.size());
  data::Loader loader(set, transform, {.workers = options.workers, .seed = options.seed});
  const data::Sampler sampler(set.size(), {.seed = options.seed, .batch = batch});
  double begin = now();
  std::int64_t count = -batch;  // the first batch includes the start of the workers
  for (std::int64_t epoch = 0;; ++epoch) {
    loader.start(sampler.epoch(epoch), batch, epoch);
    while (const auto next = loader.next()) {
      if (count < 0) begin = now();
      count += next->size();
      if (count > 0 && now() - begin > options.seconds) return static_cast<double>(count) / (now() - begin);
    }
  }
}

// The images that can be decoded, at most a few thousand of them.
data::SampleSet usable(const data::SampleSet& all, std::uint64_t seed, std::int64_t& bad) {
  const data::SampleSet part = all.limited(2000, seed);
  std::vector<std::int64_t> good;
  for (std::int64_t i = 0; i < part.size(); ++i) {
    try {
      part.decode(i);
      good.push_back(i);
    } catch (const Error&) {
      ++bad;
    }
  }
  if (good.empty()) throw Error("none of the images can be decoded");
  return part.subset(good);
}

void run_data(DataOptions options) {
  const Size size = parse_size("--size", options.size, 8, data::kLargestSize);
  if (options.workers < 1) options.workers = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const data::Dataset dataset = data::open_dataset(options.data, {.held_out = 0});
  std::int64_t bad = 0;
  const data::SampleSet set = usable(dataset.train.empty() ? dataset.evaluated() : dataset.train, options.seed, bad);
  if (bad > 0) note(std::to_string(bad) + " images cannot be decoded and are left out");

  data::TrainOptions flips;
  flips.size = size;
  const auto deit = std::make_shared<data::TrainTransform>(data::deit_augmentation(size));
  struct Row {
    const char* name;
    const char* meaning;
    double rate;
  };
  std::vector<Row> rows;
  const auto measure = [&](const char* name, const char* meaning, const std::function<double()>& work) {
    note(std::string("measuring ") + name);
    rows.push_back({name, meaning, work()});
  };
  measure("decode", "read and decode",
          [&] { return rate(set.size(), options.seconds, [&](std::int64_t index) { set.decode(index); }); });
  measure("eval", "decode, resize, centre crop, normalise",
          [&] { return transform_rate(set, data::EvalTransform({.size = size}), options); });
  measure("finetune", "decode, random resized crop, flip, normalise",
          [&] { return transform_rate(set, data::TrainTransform(flips), options); });
  measure("deit", "the same with RandAugment and erasing", [&] { return transform_rate(set, *deit, options); });
  note("measuring the loader");
  const double loader = loader_rate(set, deit, options);

  if (options.json) {
    nlohmann::json document = {{"data", options.data},
                               {"images", set.size()},
                               {"bad_images", bad},
                               {"size", nn::to_json(size)},
                               {"loader", {{"workers", options.workers}, {"images_per_second", loader}}}};
    for (const Row& row : rows) document["images_per_second_per_core"][row.name] = row.rate;
    print(nn::json_text(document, 2) + "\n");
    return;
  }
  print(printable(options.data) + ": " + std::to_string(set.size()) + " images, to " + to_string(size) +
        "; images per second on one core\n");
  char line[160];
  for (const Row& row : rows) {
    std::snprintf(line, sizeof line, "  %-10s %9.1f   %s\n", row.name, row.rate, row.meaning);
    print(line);
  }
  std::snprintf(line, sizeof line, "  %-10s %9.1f   deit in batches, %d workers together\n", "loader", loader,
                options.workers);
  print(line);
}

}  // namespace

void add_bench_data(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand("data", "Decoding, augmentation and the loader on a folder of images");
  auto options = std::make_shared<DataOptions>();
  verb->add_option("--data", options->data, "Folder of images, CIFAR files or manifest")->required();
  verb->add_option("--size", options->size, "Of the prepared images, N or HxW in pixels")
      ->type_name("SIZE")
      ->capture_default_str();
  verb->add_option("--workers,--threads", options->workers, "Of the loader; default: one per core")
      ->check(CLI::Range(1, 1024));
  verb->add_option("--seconds", options->seconds, "To spend on each step")->check(check_seconds)->capture_default_str();
  verb->add_option("--seed", options->seed, "Of augmentation")->check(check_seed)->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON document on stdout");
  verb->callback([options] { run_data(*options); });
}

}  // namespace violin::cli
