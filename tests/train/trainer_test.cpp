#include <atomic>
#include <fstream>

#include "tests/train/helpers.h"
#include "violin/checkpoint/model_file.h"
#include "violin/ops/path.h"
#include "violin/train/search.h"

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

// The same weights and optimiser in the end, the same log on the way.
void expect_equal_runs(const fs::path& a, const fs::path& b) {
  for (const char* file : {"last/model.safetensors", "last/optimizer.safetensors"})
    expect_equal_files(a / file, b / file);
  EXPECT_EQ(log_without_times(a), log_without_times(b));
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

  expect_equal_runs(folder.path() / "whole", folder.path() / "broken");
  expect_equal_files(folder.path() / "whole/best/model.safetensors", folder.path() / "broken/best/model.safetensors");
}

// Epochs of one step are shorter than a checkpoint takes to write: not every one has its own.
TEST(Trainer, AStopBetweenShortEpochsLosesNothing) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 2);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.held_out = 0;
  request.options.epochs = 12;
  train::RunFolder whole(folder.path() / "whole", train::RunFolder::Mode::kNew);
  ASSERT_TRUE(train_run(train::prepare(request), &whole).finished);

  struct Watch : train::Listener {
    std::atomic<bool> stop = false;
    void on_epoch(const Epoch& epoch) override { stop = epoch.epoch == 6; }
  } watch;
  {
    train::RunFolder broken(folder.path() / "broken", train::RunFolder::Mode::kNew);
    const train::Prepared prepared = train::prepare(request);
    broken.write("config.json", train::to_json(prepared.task));
    train::TrainerOptions options;
    options.workers = 1;
    options.listener = &watch;
    options.stop = &watch.stop;
    train::Trainer trainer(prepared.task, prepared.dataset, prepared.model, &broken, options);
    ASSERT_FALSE(trainer.train().finished);
  }
  EXPECT_EQ(train::read_json_file(folder.path() / "broken" / "last" / "state.json").at("epoch"), 7);
  train::RunFolder broken(folder.path() / "broken", train::RunFolder::Mode::kResume);
  ASSERT_TRUE(train_run(reopened(folder.path() / "broken"), &broken, 0, true).finished);
  expect_equal_runs(folder.path() / "whole", folder.path() / "broken");
}

// Evaluating may take longer than whoever stops a run waits.
TEST(Trainer, AStopDuringAnEvaluationLosesNothing) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data" / "train", 4, 4);
  write_images(folder.path() / "data" / "val", 4, 4, 16, 100);
  write_images(folder.path() / "data" / "test", 4, 4, 16, 200);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.epochs = 2;
  train::RunFolder whole(folder.path() / "whole", train::RunFolder::Mode::kNew);
  ASSERT_TRUE(train_run(train::prepare(request), &whole).finished);

  struct Watch : train::Listener {
    std::atomic<bool> stop = false;
    int stop_in = 0;
    void on_evaluation(std::int64_t) override { stop = --stop_in == 0; }
  };
  train::RunFolder broken(folder.path() / "broken", train::RunFolder::Mode::kNew);
  broken.write("config.json", train::to_json(train::prepare(request).task));
  // In the first epoch's evaluation, in the second's when the first has been made up for, and in that of test.
  std::int64_t epoch = 0;
  for (const int stop_in : {1, 2, 2}) {
    Watch watch;
    watch.stop_in = stop_in;
    train::TrainerOptions options;
    options.workers = 1;
    options.listener = &watch;
    options.stop = &watch.stop;
    const train::Prepared prepared = reopened(folder.path() / "broken");
    train::Trainer trainer(prepared.task, prepared.dataset, prepared.model, &broken, options);
    trainer.resume();
    const train::Outcome outcome = trainer.train();
    EXPECT_FALSE(outcome.finished);
    EXPECT_FALSE(outcome.test);
    EXPECT_EQ(outcome.epochs, epoch++);
  }
  EXPECT_FALSE(fs::exists(broken.path() / "result.json"));
  ASSERT_TRUE(train_run(reopened(folder.path() / "broken"), &broken, 0, true).finished);
  expect_equal_runs(folder.path() / "whole", folder.path() / "broken");
  expect_equal_files(folder.path() / "whole/best/model.safetensors", folder.path() / "broken/best/model.safetensors");
  const nlohmann::json result = train::read_json_file(broken.path() / "result.json");
  EXPECT_EQ(result.at("test").at("top1"), train::read_json_file(whole.path() / "result.json").at("test").at("top1"));
  for (const nlohmann::json& line : train::read_log(broken.path())) {
    if (line.at("type") != "epoch") continue;
    EXPECT_GT(line.at("images_per_second").get<double>(), 0);
  }
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
    prepared.model->head->bias[0] = 3e38;  // losses of which no two have a finite sum
  }
  try {
    train_run(prepared, &run);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no longer finite"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("--lr"), std::string::npos) << error.what();
  }
}

TEST(Trainer, WeightsThatAreNotFiniteAreNeverSaved) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.lr = 1e30;
  request.options.warmup_epochs = 0;
  request.options.epochs = 1;  // the last step is the first that goes wrong
  request.options.batch_size = 20;
  train::RunFolder run(folder.path() / "run", train::RunFolder::Mode::kNew);
  EXPECT_THROW(train_run(train::prepare(request), &run), train::NotFinite);
  EXPECT_FALSE(fs::exists(run.best_weights()));
  EXPECT_EQ(train::read_json_file(run.last() / "state.json").at("step"), 0);
  for (const auto& [name, tensor] : tensors(run.last() / "model.safetensors"))
    EXPECT_TRUE(at::isfinite(tensor).all().item<bool>()) << name;

  train::Prepared broken = train::prepare(request);
  {
    const torch::NoGradGuard no_grad;
    broken.model->head->bias.fill_(std::numeric_limits<float>::quiet_NaN());
  }
  EXPECT_THROW(train_run(broken, nullptr), Error);
}

TEST(Trainer, AStateThatNoRunCanHaveIsRefusedAndTheLogStays) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  train::RunFolder run(folder.path() / "run", train::RunFolder::Mode::kNew);
  run.write("config.json", train::to_json(train::prepare(tiny_request(folder.path() / "data")).task));
  ASSERT_FALSE(train_run(train::prepare(tiny_request(folder.path() / "data")), &run, 3).finished);
  run.log({{"type", "step"}});
  const nlohmann::json good = train::read_json_file(run.last() / "state.json");
  const std::int64_t log_bytes = run.log_bytes();
  for (const nlohmann::json& change : {nlohmann::json{{"epoch", 1000}},
                                       {{"epoch", -1}},
                                       {{"batch", 1000}},
                                       {{"batch", -1}},
                                       {{"step", -1}},
                                       {{"step", 1000000}},
                                       {{"best_epoch", 9}},
                                       {{"log_bytes", -1}}}) {
    nlohmann::json state = good;
    state.update(change);
    std::ofstream(run.last() / "state.json") << state;
    EXPECT_THROW(train_run(reopened(run.path()), &run, 0, true), Error) << change;
    EXPECT_EQ(run.log_bytes(), log_bytes) << change;
  }
  std::ofstream(run.last() / "state.json") << good;
  EXPECT_TRUE(train_run(reopened(run.path()), &run, 0, true).finished);
}

TEST(Trainer, ClassWeightsDoNotDependOnAccumulation) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 1, 12);
  write_images(folder.path() / "data", 3, 3, 16, 100);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.epochs = 1;
  request.options.class_weights = "inverse";
  request.options.mixup = request.options.cutmix = 0;
  const double whole = train_run(train::prepare(request), nullptr).train_loss;
  request.options.accumulate = 4;
  EXPECT_NEAR(train_run(train::prepare(request), nullptr).train_loss, whole, 2e-5);
}

class Messages : public train::Listener {
 public:
  void on_start(const std::string& line) override { lines.push_back(line); }
  void on_message(const std::string& line) override { lines.push_back(line); }
  std::int64_t count(const std::string& part) const {
    return std::count_if(lines.begin(), lines.end(),
                         [&](const std::string& line) { return line.find(part) != std::string::npos; });
  }
  std::vector<std::string> lines;
};

TEST(Trainer, BrokenImagesOfValAndTestAreNamedOnce) {
  const TemporaryFolder folder;
  const fs::path data = folder.path() / "data";
  write_images(data / "train", 3, 8);
  write_images(data / "val", 3, 2, 16, 100);
  write_images(data / "test", 3, 2, 16, 200);
  for (const char* file : {"val/class_1/image_100.png", "test/class_2/image_200.png"}) fs::resize_file(data / file, 0);
  Messages messages;
  train::TrainerOptions options;
  options.listener = &messages;
  const train::Prepared prepared = train::prepare(tiny_request(data));
  train::Trainer trainer(prepared.task, prepared.dataset, prepared.model, nullptr, options);
  const train::Outcome outcome = trainer.train();
  EXPECT_EQ(outcome.val->images, 5);
  EXPECT_EQ(outcome.test->images, 5);
  EXPECT_EQ(messages.count("class_1/image_100.png"), 1);
  EXPECT_EQ(messages.count("class_2/image_200.png"), 1);
  for (const auto& entry : fs::recursive_directory_iterator(data / "val"))
    if (entry.is_regular_file()) fs::resize_file(entry.path(), 0);
  EXPECT_THROW(train_run(train::prepare(tiny_request(data)), nullptr), Error);
}

TEST(Trainer, SaysThatNoImageOfTrainCanBeRead) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 2, 4);
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder.path() / "data"))
    if (file.is_regular_file()) write_file_atomically(file.path(), "no image");
  try {
    train_run(train::prepare(tiny_request(folder.path() / "data")), nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("none of the 6 images of train can be read"), std::string::npos)
        << error.what();
  }
}

TEST(Trainer, AnAverageIsAFileOfItsOwnAndAFinishedRunStaysAsItIs) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 10);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.ema = 0.5;
  {
    train::RunFolder run(folder.path() / "run", train::RunFolder::Mode::kNew);
    ASSERT_TRUE(train_run(train::prepare(request), &run).finished);
  }
  const checkpoint::LoadedModel average = checkpoint::load_model(folder.path() / "run", {.branch = "ema"});
  EXPECT_EQ(average.classes.size(), 4U);
  EXPECT_FALSE(
      at::equal(average.model->head->weight, checkpoint::load_model(folder.path() / "run").model->head->weight));
  const auto saved = tensors(folder.path() / "run/last/optimizer.safetensors");
  const auto stored =
      std::find_if(saved.begin(), saved.end(), [](const auto& x) { return x.first == "ema.head.weight"; });
  ASSERT_NE(stored, saved.end());
  EXPECT_TRUE(at::equal(stored->second,
                        checkpoint::load_model(folder.path() / "run/last", {.branch = "ema"}).model->head->weight));

  const nlohmann::json before = train::read_json_file(folder.path() / "run/result.json");
  EXPECT_TRUE(before.contains("val"));
  {
    train::RunFolder run(folder.path() / "run", train::RunFolder::Mode::kResume);
    const train::Outcome again = train_run(reopened(folder.path() / "run"), &run, 0, true);
    ASSERT_TRUE(again.val.has_value());
    EXPECT_EQ(again.val->top1, before.at("val").at("top1"));
    EXPECT_EQ(again.seconds, before.at("seconds"));
  }
  EXPECT_EQ(train::read_json_file(folder.path() / "run/result.json"), before);
}

TEST(Search, GoesOnWhereItWasAndPassesOverRatesThatDiverge) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 10);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.epochs = 1;
  const train::Prepared prepared = train::prepare(request);
  Messages messages;
  train::TrainerOptions options;
  options.listener = &messages;
  const auto search = [&](const train::Task& task, train::RunFolder* run) {
    messages.lines.clear();
    const auto fresh = [&] { return std::make_shared<nn::VisionTransformer>(task.model, 0); };
    return train::search_rate(task, prepared.dataset, fresh, run, options);
  };
  train::RunFolder run(folder.path() / "run", train::RunFolder::Mode::kNew);
  run.write("lr_search.json", {{"trials",
                                {{{"lr", 1e-3}, {"diverged", true}},
                                 {{"lr", 7.5e-4}, {"top1", 100.5}, {"loss", 0.5}},
                                 {{"lr", 5e-4}, {"top1", 10}, {"loss", 2}},
                                 {{"lr", 2.5e-4}, {"top1", 100.5}, {"loss", 0.4}}}}});
  const train::RateSearch found = search(prepared.task, &run);
  EXPECT_EQ(found.best, 2.5e-4);
  EXPECT_EQ(found.tied, std::vector<double>{7.5e-4});
  EXPECT_EQ(messages.count("trying learning rate"), 1);
  EXPECT_EQ(train::read_json_file(run.path() / "lr_search.json").at("trials").size(), 5U);

  train::Task wild = prepared.task;
  wild.options.weight_decay = 1e12;
  wild.options.warmup_epochs = 0;
  EXPECT_THROW(search(wild, nullptr), Error);
  EXPECT_EQ(messages.count("is too high"), 5);
}

TEST(Trainer, FinetuneReplacesTheHeadPlugsAMaskAndKeepsPreprocessing) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  nn::ModelConfig config = tiny_model();
  config.violin.reset();
  config.num_classes = 9;
  const nn::VisionTransformer pretrained(config, 1);
  data::EvalOptions preprocessing;
  preprocessing.size = Size::square(16);
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

TEST(Trainer, RectangularRunsResumeToo) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 10);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.img_size = {12, 20};
  train::RunFolder whole(folder.path() / "whole", train::RunFolder::Mode::kNew);
  const train::Prepared prepared = train::prepare(request);
  EXPECT_EQ(prepared.model->config().grid(), (Size{3, 5}));
  EXPECT_EQ(prepared.task.preprocessing.size, (Size{12, 20}));
  ASSERT_TRUE(train_run(prepared, &whole).finished);
  train::RunFolder broken(folder.path() / "broken", train::RunFolder::Mode::kNew);
  ASSERT_FALSE(train_run(train::prepare(request), &broken, 5).finished);
  const train::Prepared again = reopened(folder.path() / "broken");
  EXPECT_EQ(again.task.options.img_size, (Size{12, 20}));
  ASSERT_TRUE(train_run(again, &broken, 0, true).finished);
  expect_equal_files(folder.path() / "whole/last/model.safetensors", folder.path() / "broken/last/model.safetensors");
}

}  // namespace
}  // namespace violin::tests
