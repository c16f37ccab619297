#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "tests/train/helpers.h"
#include "violin/checkpoint/model_file.h"
#include "violin/ops/path.h"

namespace violin::tests {
namespace {

namespace fs = std::filesystem;

checkpoint::NamedTensors tensors(const fs::path& file) {
  return checkpoint::TensorFile::open(file, {.copy = true}).tensors();
}

void expect_equal_files(const fs::path& a, const fs::path& b) {
  const checkpoint::NamedTensors left = tensors(a), right = tensors(b);
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].first, right[i].first);
    EXPECT_TRUE(at::equal(left[i].second, right[i].second)) << left[i].first;
  }
}

// Without times, which no two runs share.
std::vector<std::string> log_without_times(const fs::path& run) {
  std::vector<std::string> lines;
  for (nlohmann::json line : train::read_log(run)) {
    line.erase("seconds");
    line.erase("images_per_second");
    lines.push_back(line.dump());
  }
  return lines;
}

TEST(Trainer, OverfitsSixtyFourImages) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 8, 8);
  train::Request request = tiny_request(folder.path() / "data");
  request.config->embed_dim = 64;
  train::Options& options = request.options;
  train::apply_recipe("finetune", options);
  options.epochs = 300;
  options.batch_size = 16;
  options.lr = 2e-3;
  options.layer_decay = 1;
  options.mask_lr = 1;
  options.crop = "centre";
  options.flip = 0;
  options.held_out = 0;
  train::Prepared prepared = train::prepare(request);
  EXPECT_TRUE(prepared.dataset.val.empty());
  const train::Outcome outcome = train_run(prepared, nullptr);
  EXPECT_TRUE(outcome.finished);
  const train::Evaluation seen =
      train::evaluate(*prepared.model, prepared.dataset.train, prepared.task.preprocessing, {});
  EXPECT_EQ(seen.metrics.images, 64);
  EXPECT_DOUBLE_EQ(seen.metrics.top1, 100);
}

TEST(Trainer, AnInterruptedRunEqualsAnUninterruptedOneBitForBit) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 10);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.drop_path = 0.2;
  request.options.drop = 0.1;  // draws from torch's generator
  request.options.ema = 0.9;
  const auto start = [&](const std::string& name) {
    return std::make_unique<train::RunFolder>(folder.path() / name, train::RunFolder::Mode::kNew);
  };
  const auto whole = start("whole");
  const train::Outcome outcome = train_run(train::prepare(request), whole.get());
  ASSERT_TRUE(outcome.finished);
  ASSERT_EQ(outcome.steps, 3 * 4);  // 36 images after holding out

  auto broken = start("broken");
  ASSERT_FALSE(train_run(train::prepare(request), broken.get(), 3).finished);
  for (const std::int64_t steps : {2, 4}) {  // within an epoch and across its end
    broken.reset();
    broken = std::make_unique<train::RunFolder>(folder.path() / "broken", train::RunFolder::Mode::kResume);
    at::globalContext().defaultGenerator(at::kCPU);
    torch::manual_seed(static_cast<std::uint64_t>(steps));  // whatever else a process draws
    ASSERT_FALSE(train_run(reopened(folder.path() / "broken"), broken.get(), steps, true, 2).finished);
  }
  ASSERT_TRUE(train_run(reopened(folder.path() / "broken"), broken.get(), 0, true, 0).finished);

  for (const char* file : {"last/model.safetensors", "last/optimizer.safetensors", "best/model.safetensors"})
    expect_equal_files(folder.path() / "whole" / file, folder.path() / "broken" / file);
  EXPECT_EQ(log_without_times(folder.path() / "whole"), log_without_times(folder.path() / "broken"));
}

TEST(Trainer, GradientsEqualThoseOfTheReferencePath) {
  const auto gradients = [](std::optional<ops::Path> path) {
    ops::set_path(path);
    nn::ModelConfig config = tiny_model();
    config.num_classes = 4;
    config.reg_tokens = 2;
    nn::VisionTransformer model(config, 3);
    const at::Tensor images = at::randn({3, 3, 16, 16}, at::make_generator<at::CPUGeneratorImpl>(5));
    at::cross_entropy_loss(model.forward(images), at::tensor({0, 1, 3}, at::kLong)).backward();
    std::map<std::string, at::Tensor> result;
    for (const auto& item : model.named_parameters()) result[item.key()] = item.value().grad();
    ops::set_path(std::nullopt);
    return result;
  };
  const auto fused = gradients(std::nullopt), reference = gradients(ops::Path::kReference);
  for (const auto& [name, gradient] : reference) {
    const double scale = std::max(gradient.abs().max().item<double>(), 1e-7);
    EXPECT_LT((fused.at(name) - gradient).abs().max().item<double>() / scale, 2e-4) << name;
  }
}

TEST(Trainer, AccumulationGivesTheGradientOfTheWholeBatch) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 10);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.epochs = 1;
  request.options.drop_path = 0.3;
  train::Prepared once = train::prepare(request);
  train_run(once, nullptr);
  request.options.accumulate = 3;
  train::Prepared divided = train::prepare(request);
  train_run(divided, nullptr);
  const auto left = nn::state(*once.model), right = nn::state(*divided.model);
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_LT((left[i].second - right[i].second).abs().max().item<double>(), 5e-4) << left[i].first;
  }
}

TEST(Trainer, ResultsDoNotDependOnTheNumberOfWorkers) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.epochs = 2;
  train::Prepared none = train::prepare(request), three = train::prepare(request);
  train_run(none, nullptr, 0, false, 0);
  train_run(three, nullptr, 0, false, 3);
  const auto left = nn::state(*none.model), right = nn::state(*three.model);
  for (std::size_t i = 0; i < left.size(); ++i)
    EXPECT_TRUE(at::equal(left[i].second, right[i].second)) << left[i].first;
}

TEST(Trainer, ALossThatIsNotFiniteStopsTheRunAndKeepsTheLastState) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  train::Request request = tiny_request(folder.path() / "data");
  train::RunFolder run(folder.path() / "run", train::RunFolder::Mode::kNew);
  train::Prepared prepared = train::prepare(request);
  {
    const torch::NoGradGuard no_grad;
    prepared.model->head->bias.fill_(std::numeric_limits<float>::infinity());
  }
  try {
    train_run(prepared, &run);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no longer finite"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("--lr"), std::string::npos) << error.what();
  }
}

TEST(Trainer, FinetuneReplacesTheHeadPlugsAMaskAndKeepsPreprocessing) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  nn::ModelConfig config = tiny_model();
  config.violin.reset();
  config.num_classes = 9;
  const nn::VisionTransformer pretrained(config, 1);
  data::EvalOptions preprocessing;
  preprocessing.size = 16;
  preprocessing.crop_pct = 1;
  preprocessing.normalisation = data::kInceptionStatistics;
  checkpoint::save_model(folder.path() / "w.safetensors", pretrained, preprocessing);
  train::Request request = tiny_request(folder.path() / "data");
  request.config.reset();
  request.weights = folder.path() / "w.safetensors";
  request.mask = nn::MaskConfig{};
  request.mask->init = "identity";
  const train::Prepared prepared = train::prepare(request);
  EXPECT_EQ(prepared.model->config().num_classes, 4);
  ASSERT_TRUE(prepared.model->config().violin.has_value());
  EXPECT_TRUE(prepared.model->config().violin->uses_rate());
  EXPECT_EQ(prepared.task.preprocessing.normalisation, data::kInceptionStatistics);
  EXPECT_TRUE(at::equal(prepared.model->blocks[0]->attn->qkv->weight, pretrained.blocks[0]->attn->qkv->weight));
  request.options.adapter = "lora";
  request.options.train_what = "adapters";
  const train::Prepared adapted = train::prepare(request);
  EXPECT_FALSE(adapted.model->blocks[0]->attn->qkv->weight.requires_grad());
  EXPECT_TRUE(adapted.model->blocks[0]->attn->qkv->lora_A.requires_grad());
}

TEST(Trainer, AdapterRunsResumeToo) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 10);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.adapter = "dora";
  request.options.train_what = "adapters";
  request.options.rank = 2;
  train::RunFolder whole(folder.path() / "whole", train::RunFolder::Mode::kNew);
  ASSERT_TRUE(train_run(train::prepare(request), &whole).finished);
  train::RunFolder broken(folder.path() / "broken", train::RunFolder::Mode::kNew);
  ASSERT_FALSE(train_run(train::prepare(request), &broken, 5).finished);
  ASSERT_TRUE(train_run(reopened(folder.path() / "broken"), &broken, 0, true).finished);
  expect_equal_files(folder.path() / "whole/last/model.safetensors", folder.path() / "broken/last/model.safetensors");
}

TEST(RunFolder, IsNeverOverwrittenByAccident) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "run";
  EXPECT_THROW(train::RunFolder(path, train::RunFolder::Mode::kResume), Error);
  {
    train::RunFolder run(path, train::RunFolder::Mode::kNew);
    run.write("config.json", {{"a", 1}});
    EXPECT_THROW(train::RunFolder(path, train::RunFolder::Mode::kResume), Error);  // in use
  }
  EXPECT_THROW(train::RunFolder(path, train::RunFolder::Mode::kNew), Error);
  EXPECT_TRUE(fs::exists(path / "config.json"));
  {
    const train::RunFolder run(path, train::RunFolder::Mode::kReplace);
  }
  EXPECT_FALSE(fs::exists(path / "config.json"));
  // A folder with somebody's files is nobody's run.
  fs::create_directories(folder.path() / "photos");
  std::ofstream(folder.path() / "photos" / "a.txt") << "x";
  EXPECT_THROW(train::RunFolder(folder.path() / "photos", train::RunFolder::Mode::kReplace), Error);
  EXPECT_TRUE(fs::exists(folder.path() / "photos" / "a.txt"));
}

TEST(RunFolder, AKillBetweenTwoRenamesIsRepaired) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "run";
  const auto put = [&](const std::string& where, const std::string& state) {
    fs::create_directories(path / where);
    std::ofstream(path / where / "state.json") << state;
  };
  {
    train::RunFolder(path, train::RunFolder::Mode::kNew).write("config.json", {{"a", 1}});
  }
  put("last.old", "1");
  put("last.next", "2");
  {
    const train::RunFolder run(path, train::RunFolder::Mode::kResume);
  }
  EXPECT_EQ(train::read_json_file(path / "last" / "state.json"), 2);
  // Half of a checkpoint is no checkpoint.
  fs::create_directories(path / "last.next");
  std::ofstream(path / "last.next" / "model.safetensors") << "half";
  {
    const train::RunFolder run(path, train::RunFolder::Mode::kResume);
  }
  EXPECT_EQ(train::read_json_file(path / "last" / "state.json"), 2);
  EXPECT_FALSE(fs::exists(path / "last.next"));
}

TEST(RunFolder, AFailedCheckpointLeavesThePreviousOne) {
  const TemporaryFolder folder;
  train::RunFolder run(folder.path() / "run", train::RunFolder::Mode::kNew);
  const auto put = [](const std::string& text) {
    return [text](const fs::path& where) { std::ofstream(where / "state.json") << text; };
  };
  run.replace_last(put("1"));
  run.replace_last(put("2"));
  EXPECT_THROW(run.replace_last([](const fs::path& where) {
    std::ofstream(where / "state.json") << "3";
    throw Error("no space left on device");
  }),
               Error);
  EXPECT_EQ(train::read_json_file(run.last() / "state.json"), 2);
}

// A process is killed at a random moment, again and again, and always leaves a run that goes on.
TEST(RunFolder, SurvivesKillsAtAnyMoment) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "run";
  {
    train::RunFolder(path, train::RunFolder::Mode::kNew).write("config.json", {{"a", 1}});
  }
  data::Random random(3, data::Purpose::kAugment);
  for (int round = 0; round < 30; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      train::RunFolder run(path, train::RunFolder::Mode::kResume);
      for (int i = 0;; ++i) {
        const std::string text = std::to_string(i);
        run.replace_last([&](const fs::path& where) {
          for (const char* name : {"model", "optimizer", "state.json"}) std::ofstream(where / name) << text;
        });
      }
    }
    ::usleep(static_cast<useconds_t>(2000 + random.below(8000)));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const train::RunFolder run(path, train::RunFolder::Mode::kResume);
    if (!run.has_checkpoint()) continue;  // killed before the first one
    const auto read = [&](const char* name) { return train::read_json_file(run.last() / name); };
    EXPECT_EQ(read("model"), read("state.json"));
    EXPECT_EQ(read("optimizer"), read("state.json"));
  }
}

TEST(Task, ChangedDataAreNoticed) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 3, 6);
  const train::Prepared prepared = train::prepare(tiny_request(folder.path() / "data"));
  const train::Task task = train::task_from_json(nlohmann::json::parse(train::to_json(prepared.task).dump()));
  EXPECT_NO_THROW(train::open_task_data(task));
  fs::remove(folder.path() / "data/class_1/image_2.png");
  EXPECT_THROW(train::open_task_data(task), Error);
}

TEST(Evaluate, MatchesClassesByName) {
  EXPECT_TRUE(train::match_classes({"a", "b"}, {"a", "b"}).empty());
  EXPECT_EQ(train::match_classes({"a", "b", "c"}, {"c", "a"}), (std::vector<std::int64_t>{2, 0}));
  EXPECT_THROW(train::match_classes({"a", "b"}, {"x"}), Error);
}

}  // namespace
}  // namespace violin::tests
