#include "bench/model.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/trace.h"
#include "violin/error.h"
#include "violin/nn/precision.h"
#include "violin/ops/path.h"
#include "violin/train/adamw.h"
#include "violin/train/loss.h"

extern char** environ;

namespace violin::bench {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Somebody who can be asked to run one forward pass or one training step, and says how long it took.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual double infer() = 0;  // seconds
  virtual double train() = 0;
  // Of it, until the host had issued the work; 0: unknown.
  virtual double issued() const { return 0; }
};

// While it exists, attention without a mask is torch's: on CUDA cuDNN's where that takes the call, the fastest that
// torch has there and not always the one that it would choose.
class TorchAttention {
 public:
  TorchAttention() : order_(at::globalContext().sDPPriorityOrder()) {
    set_order({at::SDPBackend::cudnn_attention, at::SDPBackend::flash_attention, at::SDPBackend::efficient_attention,
               at::SDPBackend::math, at::SDPBackend::overrideable});
    ops::set_path(ops::Path::kTorch);
  }
  ~TorchAttention() {
    ops::set_path(std::nullopt);
    set_order(order_);
  }
  TorchAttention(const TorchAttention&) = delete;
  TorchAttention& operator=(const TorchAttention&) = delete;

 private:
  using Order = decltype(at::globalContext().sDPPriorityOrder());
  static void set_order(const Order& order) {
    std::vector<std::int64_t> numbers;
    for (const at::SDPBackend backend : order) numbers.push_back(static_cast<std::int64_t>(backend));
    at::globalContext().setSDPPriorityOrder(numbers);
  }
  Order order_;
};

class OwnRunner : public Runner {
 public:
  OwnRunner(const nn::ModelConfig& config, const ModelOptions& options, bool torch_attention = false)
      : options_(options),
        torch_attention_(torch_attention),
        model_(std::make_shared<nn::VisionTransformer>(config, 0)) {
    model_->to(options.device);
    images_ = at::randn({options.batch, config.in_chans, config.img_size.height, config.img_size.width},
                        at::make_generator<at::CPUGeneratorImpl>(1))
                  .to(options.device);
    labels_ = (at::arange(options.batch) % std::max<std::int64_t>(config.num_classes, 1)).to(options.device);
    optimizer_ = std::make_unique<train::AdamW>(train::parameter_groups(*model_, train::Options{}), train::Options{});
  }
  double infer() override {
    if (model_->is_training()) model_->eval();  // tables are kept until the next eval()
    const torch::NoGradGuard no_grad;
    return timed([&] { model_->forward(images_); });
  }
  double train() override {
    if (!model_->is_training()) model_->train();
    return timed([&] {
      optimizer_->clear_gradients();
      at::Tensor loss;
      {
        const nn::PrecisionScope precision(options_.device.type(),
                                           options_.bf16 ? nn::Precision::kBf16 : nn::Precision::kFp32);
        loss = train::label_loss(model_->forward(images_), labels_, 0);
      }
      loss.backward();
      optimizer_->step(1e-4);
    });
  }
  double issued() const override { return issued_; }

 private:
  template <class Work>
  double timed(const Work& work) {
    const auto wait = [&] {
      if (options_.device.is_cuda()) torch::cuda::synchronize();
    };
    wait();
    std::optional<TorchAttention> attention;
    if (torch_attention_) attention.emplace();
    const nn::PrecisionScope precision(options_.device.type(),
                                       options_.bf16 ? nn::Precision::kBf16 : nn::Precision::kFp32);
    const auto start = Clock::now();
    work();
    issued_ = std::chrono::duration<double>(Clock::now() - start).count();
    wait();
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  ModelOptions options_;
  bool torch_attention_;
  nn::Model model_;
  at::Tensor images_, labels_;
  std::unique_ptr<train::AdamW> optimizer_;
  double issued_ = 0;
};

// A process that reads "infer" and "train", one per line, and answers with seconds.
class PeerRunner : public Runner {
 public:
  PeerRunner(const ModelOptions& options, const nn::ModelConfig& config) {
    int to_child[2], from_child[2];
    if (::pipe2(to_child, O_CLOEXEC) != 0 || ::pipe2(from_child, O_CLOEXEC) != 0) throw Error("cannot make a pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_child[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from_child[1], 1);
    const nlohmann::json request = {{"model", nlohmann::json::parse(nn::to_json(config).dump())},
                                    {"batch", options.batch},
                                    {"threads", at::get_num_threads()},
                                    {"device", options.device.str()},
                                    {"bf16", options.bf16}};
    std::string command = options.peer;
    std::vector<char*> arguments = {const_cast<char*>("sh"), const_cast<char*>("-c"), command.data(), nullptr};
    const int error = posix_spawnp(&child_, "sh", &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(to_child[0]);
    ::close(from_child[1]);
    in_ = ::fdopen(from_child[0], "r");
    out_ = ::fdopen(to_child[1], "w");
    if (error != 0) throw Error("cannot start the peer '" + options.peer + "'");
    std::signal(SIGPIPE, SIG_IGN);
    ask(request.dump());  // ready when it answers
  }
  ~PeerRunner() override {
    if (out_ != nullptr) ::fclose(out_);
    if (in_ != nullptr) ::fclose(in_);
    ::waitpid(child_, nullptr, 0);
  }
  double infer() override { return ask("infer"); }
  double train() override { return ask("train"); }

 private:
  double ask(const std::string& line) {
    std::fprintf(out_, "%s\n", line.c_str());
    std::fflush(out_);
    double seconds = 0;
    if (std::fscanf(in_, "%lf", &seconds) != 1)
      throw Error("the peer ended without an answer; does its Python import torch and timm?");
    return seconds;
  }
  pid_t child_ = -1;
  std::FILE* in_ = nullptr;
  std::FILE* out_ = nullptr;
};

}  // namespace

ModelResult bench_model(const ModelOptions& options, const std::function<void(const std::string&)>& say) {
  if (!options.config.violin) throw Error("the model has no mask to compare with; take its violin_ twin");
  if (options.config.num_classes == 0) throw Error("the model has no head; a training step needs one");
  nn::ModelConfig vanilla = options.config;
  vanilla.violin.reset();
  std::vector<std::pair<std::string, std::unique_ptr<Runner>>> runners;
  runners.emplace_back("vanilla", std::make_unique<OwnRunner>(vanilla, options));
  runners.emplace_back("violin", std::make_unique<OwnRunner>(options.config, options));
  runners.emplace_back("torch", std::make_unique<OwnRunner>(vanilla, options, true));
  for (const char* kind : {"lora", "dora"}) {
    if (!options.adapters) break;
    nn::ModelConfig adapted = options.config;
    adapted.adapters = nn::AdapterConfig{};
    adapted.adapters->kind = kind;
    adapted.adapters->ranks = {{"qkv", 8}, {"proj", 8}, {"fc1", 8}, {"fc2", 8}};
    runners.emplace_back(kind, std::make_unique<OwnRunner>(adapted, options));
  }
  if (!options.peer.empty()) runners.emplace_back("timm", std::make_unique<PeerRunner>(options, vanilla));

  ModelResult result;
  for (const auto& [name, runner] : runners) result.rows.push_back({name});
  const auto measure = [&](const char* what, double (Runner::*run)(), double ModelRow::* milliseconds,
                           double ModelRow::* ratio) {
    say(std::string("measuring ") + what);
    for (const auto& [name, runner] : runners) (runner.get()->*run)();  // warm
    std::vector<std::vector<double>> times(runners.size()), ratios(runners.size()), issued(runners.size());
    const auto start = Clock::now();
    std::int64_t rounds = 0;
    while (rounds < 3 || std::chrono::duration<double>(Clock::now() - start).count() < options.seconds) {
      // Who begins changes from round to round.
      std::vector<double> now(runners.size());
      for (std::size_t i = 0; i < runners.size(); ++i) {
        const std::size_t who = (i + static_cast<std::size_t>(rounds)) % runners.size();
        now[who] = (runners[who].second.get()->*run)();
        issued[who].push_back(runners[who].second->issued() * 1e3);
      }
      for (std::size_t i = 0; i < runners.size(); ++i) {
        times[i].push_back(now[i] * 1e3);
        ratios[i].push_back(now[i] / now[0]);
      }
      ++rounds;
    }
    for (std::size_t i = 0; i < runners.size(); ++i) {
      result.rows[i].*milliseconds = median(times[i]);
      result.rows[i].*ratio = median(ratios[i]);
      result.rows[i].issue_ms = median(issued[i]);  // training is measured last
    }
    return rounds;
  };
  result.infer_rounds = measure("inference", &Runner::infer, &ModelRow::infer_ms, &ModelRow::infer_ratio);
  result.train_rounds = measure("training steps", &Runner::train, &ModelRow::train_ms, &ModelRow::train_ratio);
  if (!options.trace.empty()) {
    std::filesystem::create_directories(options.trace);
    for (const auto& [name, runner] : runners)
      if (runner->issued() > 0) trace(options.trace + "/" + name + ".json", [&] { runner->train(); });
  }
  return result;
}

}  // namespace violin::bench
