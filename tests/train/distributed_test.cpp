// Several processes: how they find each other, gradient buckets, and whole runs under mpirun against one process.
//
// Started as `distributed_test --worker WHAT FOLDER` it is one of those processes.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/train/helpers.h"
#include "violin/checkpoint/tensor_file.h"
#include "violin/train/distributed.h"
#include "violin/train/gradient_buckets.h"

namespace violin {
namespace {

namespace fs = std::filesystem;
using train::Launch;

Launch launch_of(const std::map<std::string, std::string>& variables) {
  return train::find_launch([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Launch, IsReadFromTheEnvironmentOfEachStarter) {
  EXPECT_EQ(launch_of({}).world, 1);
  const Launch mpi = launch_of({{"OMPI_COMM_WORLD_SIZE", "4"},
                                {"OMPI_COMM_WORLD_RANK", "3"},
                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(mpi.by, Launch::By::kMpirun);
  EXPECT_EQ(mpi.world, 4);
  EXPECT_EQ(mpi.rank, 3);
  EXPECT_EQ(mpi.local_rank, 1);
  EXPECT_EQ(mpi.local_world, 2);
  const Launch torchrun = launch_of(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node"}, {"MASTER_PORT", "29400"}});
  EXPECT_EQ(torchrun.by, Launch::By::kTorchrun);
  EXPECT_EQ(torchrun.master, "node");
  EXPECT_EQ(torchrun.port, 29400);
  const Launch slurm = launch_of({{"SLURM_STEP_NUM_TASKS", "8"},
                                  {"SLURM_PROCID", "5"},
                                  {"SLURM_LOCALID", "1"},
                                  {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                                  {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"},
                                  {"SLURM_JOB_ID", "41234"}});
  EXPECT_EQ(slurm.by, Launch::By::kSlurm);
  EXPECT_EQ(slurm.rank, 5);
  EXPECT_EQ(slurm.local_world, 4);
  EXPECT_EQ(slurm.master, "10.0.0.1");
  EXPECT_EQ(slurm.port, 21234);
}

TEST(Launch, ABatchScriptWithoutSrunIsOneProcess) {
  EXPECT_EQ(launch_of({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}).world, 1);
}

TEST(Launch, NonsenseIsAnErrorThatNamesTheVariable) {
  EXPECT_THROW(launch_of({{"OMPI_COMM_WORLD_SIZE", "two"}}), Error);
  EXPECT_THROW(launch_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), Error);
  EXPECT_THROW(launch_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}), Error);
}

TEST(Launch, TorchrunOnCpusPointsToMpirun) {
  Launch launch;
  launch.by = Launch::By::kTorchrun;
  launch.world = 2;
  try {
    train::join_processes(launch, c10::kCPU, std::chrono::seconds(1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("mpirun -n 2"), std::string::npos) << error.what();
  }
}

// A process whose twin always has the same gradients: sums are twice its own.
class Buckets : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const std::int64_t size : {3, 5, 2, 4}) parameters_.push_back(torch::ones({size}, torch::requires_grad()));
  }
  train::GradientBuckets::Start doubling() {
    return [this](at::Tensor& flat) {
      started_.push_back(flat.numel());
      flat.mul_(2);
    };
  }
  std::vector<at::Tensor> parameters_;
  std::vector<std::int64_t> started_;
};

TEST_F(Buckets, StartDuringTheLastBackwardPassAndHoldWhatAllPassesMade) {
  train::GradientBuckets buckets(parameters_, doubling(), 8 * sizeof(float));
  ASSERT_EQ(buckets.buckets(), 2);  // from the end: 4 + 2, 5 + 3
  const auto pass = [&] {
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& parameter : parameters_) loss = loss + (parameter * parameter).sum();
    loss.backward();
  };
  pass();
  EXPECT_TRUE(started_.empty());  // not the last one
  buckets.arm();
  pass();
  EXPECT_EQ(started_.size(), 2U);
  buckets.flush();
  EXPECT_EQ(started_.size(), 2U);
  buckets.finish(0.5);
  for (const at::Tensor& parameter : parameters_)
    EXPECT_TRUE(at::equal(parameter.grad(), 4 * at::ones_like(parameter)));
}

TEST_F(Buckets, KeepTheirOrderAndCountAMissingGradientAsZero) {
  train::GradientBuckets buckets(parameters_, doubling(), 1);
  ASSERT_EQ(buckets.buckets(), 4);
  buckets.arm();
  (parameters_[0].sum() + parameters_[2].sum()).backward();  // the last one, which comes first, has none
  EXPECT_TRUE(started_.empty());
  buckets.flush();
  EXPECT_EQ(started_, (std::vector<std::int64_t>{5, 3, 6, 4}));  // with one place for the count each
  buckets.finish(0.5);
  EXPECT_TRUE(at::equal(parameters_[0].grad(), at::ones({3})));
  EXPECT_FALSE(parameters_[1].grad().defined());
  EXPECT_FALSE(parameters_[3].grad().defined());
}

TEST_F(Buckets, AGradientThatOnlyAnotherProcessHasArrives) {
  train::GradientBuckets buckets(parameters_, [](at::Tensor& flat) { flat.add_(3); });
  buckets.arm();
  parameters_[0].sum().backward();
  buckets.flush();
  buckets.finish(0.5);
  EXPECT_TRUE(at::equal(parameters_[0].grad(), at::full({3}, 2.0)));
  EXPECT_TRUE(at::equal(parameters_[1].grad(), at::full({5}, 1.5)));
}

TEST_F(Buckets, AreForgottenByParametersThatLiveLonger) {
  {
    const train::GradientBuckets buckets(parameters_, doubling());
  }
  parameters_[0].sum().backward();
  train::GradientBuckets buckets(parameters_, doubling());
  buckets.arm();
  buckets.cancel();
  parameters_[0].sum().backward();
  EXPECT_TRUE(started_.empty());
}

// Whole runs. Small steps with a large eps: without it, Adam turns the rounding of a gradient that is almost zero into
// a step of full size.
train::Request small_request(const fs::path& folder) {
  train::Request request = tests::tiny_request(folder / "data");
  request.options.mixup = request.options.cutmix = 0;
  request.options.eps = 1e-4;
  return request;
}

struct Finished {
  int code = -1;
  std::string err;
};

class Together : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!train::has_mpi()) GTEST_SKIP() << "built without MPI";
    if (mpirun({"true"}).code != 0) GTEST_SKIP() << "mpirun is missing or cannot start processes here";
    tests::write_images(folder_.path() / "data/train", 4, 10);
    tests::write_images(folder_.path() / "data/val", 4, 3, 16, 100);
    tests::write_images(folder_.path() / "data/test", 3, 3, 16, 200);
    std::ofstream(file("model.json")) << nlohmann::json({{"img_size", 16},
                                                         {"patch_size", 4},
                                                         {"embed_dim", 24},
                                                         {"depth", 2},
                                                         {"num_heads", 2},
                                                         {"class_token", false},
                                                         {"global_pool", "avg"},
                                                         {"fc_norm", false},
                                                         {"violin", nlohmann::json::object()}});
  }
  std::string file(const std::string& name) const { return (folder_.path() / name).string(); }

  pid_t start(const std::vector<std::string>& command, int processes = 2) const {
    std::vector<std::string> arguments = {"mpirun",
                                          "--allow-run-as-root",
                                          "--oversubscribe",
                                          "--bind-to",
                                          "none",
                                          "--mca",
                                          "mpi_yield_when_idle",
                                          "1",
                                          "--mca",
                                          "btl_vader_single_copy_mechanism",
                                          "none",
                                          "-n",
                                          std::to_string(processes)};
    arguments.insert(arguments.end(), command.begin(), command.end());
    std::vector<char*> raw;
    for (std::string& argument : arguments) raw.push_back(argument.data());
    raw.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, file("out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, file("err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t child = -1;
    if (posix_spawnp(&child, "mpirun", &actions, nullptr, raw.data(), environ) != 0) child = -1;
    posix_spawn_file_actions_destroy(&actions);
    return child;
  }
  Finished wait(pid_t child) const {
    if (child < 0) return {};
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text("err")};
  }
  Finished mpirun(const std::vector<std::string>& command, int processes = 2) const {
    return wait(start(command, processes));
  }
  Finished workers(const std::string& what, int processes = 2) const {
    return mpirun({fs::read_symlink("/proc/self/exe").string(), "--worker", what, folder_.path().string()}, processes);
  }
  std::string text(const std::string& name) const {
    std::ifstream stream(file(name));
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::vector<std::string> violin(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {VIOLIN_BINARY, "train", "--threads", "1", "--workers", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  std::vector<std::string> new_run(const std::string& run, const std::string& epochs) const {
    return violin({"--data", file("data"), "--config", file("model.json"), "--out", file(run), "--epochs", epochs,
                   "--batch-size", "8", "--lr", "2e-3", "--repeats", "1"});
  }
  // The process of that rank, a child of mpirun.
  pid_t process_of(pid_t mpirun, int rank) const {
    const std::string mark = "OMPI_COMM_WORLD_RANK=" + std::to_string(rank);
    for (const fs::directory_entry& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      std::ifstream status(entry.path() / "status");
      bool child = false;
      for (std::string line; std::getline(status, line);) child |= line == "PPid:\t" + std::to_string(mpirun);
      if (!child) continue;
      std::ifstream environment(entry.path() / "environ");
      for (std::string line; std::getline(environment, line, '\0');)
        if (line == mark) return std::stoi(name);
    }
    return -1;
  }
  TemporaryFolder folder_;
};

double largest_difference(const fs::path& a, const fs::path& b) {
  const auto left = checkpoint::TensorFile::open(a), right = checkpoint::TensorFile::open(b);
  double largest = 0;
  for (const auto& [name, tensor] : left.tensors())
    largest =
        std::max(largest, (tensor.to(at::kDouble) - right.tensor(name).to(at::kDouble)).abs().max().item<double>());
  return largest;
}

nlohmann::json last_epoch(const fs::path& run) {
  nlohmann::json last;
  for (const nlohmann::json& line : train::read_log(run))
    if (line.at("type") == "epoch") last = line;
  return last;
}

// Of a run that is being written.
unsigned epochs_done(const fs::path& run) {
  unsigned epochs = 0;
  std::ifstream log(run / "log.jsonl");
  for (std::string line; std::getline(log, line);) epochs += line.find(R"("type":"epoch")") != std::string::npos;
  return epochs;
}

constexpr double kRounding = 2e-5;

TEST_F(Together, TwoProcessesGoTheWayOfOne) {
  train::Request request = small_request(folder_.path());
  request.options.accumulate = 2;
  const train::Prepared prepared = train::prepare(request);
  train::RunFolder alone(file("alone"), train::RunFolder::Mode::kNew);
  const train::Outcome outcome = tests::train_run(prepared, &alone);

  const Finished done = workers("whole");
  ASSERT_EQ(done.code, 0) << done.err;
  const fs::path weights = "last/model.safetensors";
  EXPECT_LT(largest_difference(alone.path() / weights, file("together") / weights), kRounding);
  // The bound means something: the weights went a hundred times as far.
  const train::Prepared begin = train::prepare(request);
  double way = 0;
  for (const auto& [name, tensor] : checkpoint::TensorFile::open(alone.path() / weights).tensors())
    for (const auto& [own, initial] : nn::state(*begin.model))
      if (own == name) way = std::max(way, (tensor - initial).abs().max().item<double>());
  EXPECT_GT(way, 100 * kRounding);

  const nlohmann::json one = last_epoch(alone.path()), two = last_epoch(file("together"));
  for (const char* number : {"train_loss", "val_loss", "val_top1", "val_top5"})
    EXPECT_NEAR(one.at(number).get<double>(), two.at(number).get<double>(), 1e-3) << number;
  const nlohmann::json test = train::read_json_file(file("together") + "/result.json").at("test");
  EXPECT_EQ(test.at("images"), 9);
  EXPECT_NEAR(test.at("loss").get<double>(), outcome.test->loss, 1e-3);
}

TEST_F(Together, ARunOfTwoGoesOnWithOneAndWithFour) {
  const train::Prepared prepared = train::prepare(small_request(folder_.path()));
  train::RunFolder alone(file("alone"), train::RunFolder::Mode::kNew);
  tests::train_run(prepared, &alone);
  const Finished stopped = workers("stop");
  ASSERT_EQ(stopped.code, 0) << stopped.err;
  EXPECT_EQ(train::read_json_file(file("together") + "/last/state.json").at("step"), 7);
  fs::copy(file("together"), file("copy"), fs::copy_options::recursive);
  {
    train::RunFolder run(file("together"), train::RunFolder::Mode::kResume);
    EXPECT_TRUE(tests::train_run(tests::reopened(run.path()), &run, 0, true).finished);
  }
  const fs::path weights = "last/model.safetensors";
  EXPECT_LT(largest_difference(alone.path() / weights, file("together") / weights), kRounding);
  EXPECT_NEAR(last_epoch(alone.path()).at("train_loss").get<double>(),
              last_epoch(file("together")).at("train_loss").get<double>(), 1e-3);
  fs::remove_all(file("together"));
  fs::rename(file("copy"), file("together"));
  const Finished resumed = workers("resume", 4);
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_LT(largest_difference(alone.path() / weights, file("together") / weights), kRounding);
}

// Only the second process hears of the stop, and all go.
TEST_F(Together, AStopDuringAnEvaluationLosesNothing) {
  const train::Prepared prepared = train::prepare(small_request(folder_.path()));
  train::RunFolder alone(file("alone"), train::RunFolder::Mode::kNew);
  tests::train_run(prepared, &alone);
  const Finished stopped = workers("stop_evaluating");
  ASSERT_EQ(stopped.code, 0) << stopped.err;
  const nlohmann::json state = train::read_json_file(file("together") + "/last/state.json");
  EXPECT_EQ(state.at("epoch"), 0);
  EXPECT_EQ(state.at("batch"), state.at("step"));
  EXPECT_TRUE(last_epoch(file("together")).is_null());
  const Finished resumed = workers("resume");
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  const fs::path weights = "last/model.safetensors";
  EXPECT_LT(largest_difference(alone.path() / weights, file("together") / weights), kRounding);
  EXPECT_NEAR(last_epoch(alone.path()).at("val_loss").get<double>(),
              last_epoch(file("together")).at("val_loss").get<double>(), 1e-3);
}

// With an image per pass in each process, a broken one leaves its process a batch behind the other.
TEST_F(Together, ABrokenImageOfValCostsNothingButItself) {
  std::ofstream(file("data/val/class_0/image_100.png")) << "no image";
  // In training one of them has each, and both count.
  for (const char* name : {"image_0.png", "image_1.png"})
    std::ofstream(file("data/train/class_0/") + name) << "no image";
  std::vector<std::string> command = new_run("run", "1");
  command.insert(command.end(), {"--accumulate", "4"});
  const Finished done = mpirun(command);
  ASSERT_EQ(done.code, 0) << done.err;
  EXPECT_NE(done.err.find("skipped a bad image of val"), std::string::npos) << done.err;
  EXPECT_EQ(train::read_json_file(file("run/result.json")).at("val").at("images"), 11);
  EXPECT_EQ(train::read_json_file(file("run/result.json")).at("skipped"), 2);
}

// An epoch meets each image once: what the second process met before the stop nobody meets again.
TEST_F(Together, BrokenImagesBeforeAStopWithinAnEpochAreCounted) {
  for (const auto& entry : fs::directory_iterator(file("data/train/class_0")))
    std::ofstream(entry.path()) << "no image";
  const Finished stopped = workers("stop_in_epoch");
  ASSERT_EQ(stopped.code, 0) << stopped.err;
  EXPECT_EQ(train::read_json_file(file("together") + "/last/state.json").at("step"), 4);
  const Finished resumed = mpirun(violin({"--resume", file("together")}));
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(train::read_json_file(file("together") + "/result.json").at("skipped"), 10);
}

TEST_F(Together, RepeatedAugmentationIsThereAndSaidAndStays) {
  const auto repeats = [&] {
    return train::read_json_file(file("run/config.json")).at("options").at("repeats").get<int>();
  };
  const std::string words = "repeated augmentation";
  std::vector<std::string> command = new_run("run", "1");
  command.resize(command.size() - 2);  // without --repeats 1
  const Finished two = mpirun(command);
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_NE(two.err.find(words), std::string::npos) << two.err;
  EXPECT_EQ(repeats(), 3);
  command.push_back("--force");
  const Finished one = mpirun(command, 1);
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(one.err.find(words), std::string::npos) << one.err;
  EXPECT_EQ(repeats(), 1);
}

TEST_F(Together, NumbersOfThreadsMayDifferAndAreThoseOfTheSameNumberOfProcesses) {
  const auto with_threads = [&](std::vector<std::string> command, const char* threads) {
    *(std::find(command.begin(), command.end(), "--threads") + 1) = threads;
    return command;
  };
  const auto resume = [&](const std::string& run, int processes) {
    const Finished resumed = mpirun({VIOLIN_BINARY, "train", "--workers", "1", "--resume", file(run)}, processes);
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    return resumed.err;
  };
  const std::string words = ", as the run began";

  std::vector<std::string> command = with_threads(new_run("mixed", "1"), "1");
  const std::vector<std::string> second = with_threads(new_run("mixed", "1"), "2");
  command.insert(command.end(), {":", "-n", "1"});
  command.insert(command.end(), second.begin(), second.end());
  const Finished mixed = mpirun(command, 1);
  ASSERT_EQ(mixed.code, 0) << mixed.err;
  EXPECT_EQ(train::read_json_file(file("mixed/config.json")).at("threads"), 0);

  ASSERT_EQ(mpirun(with_threads(new_run("run", "1"), "3")).code, 0);
  EXPECT_NE(resume("run", 2).find("--threads 3" + words), std::string::npos);
  EXPECT_EQ(resume("run", 1).find(words), std::string::npos);
  EXPECT_EQ(resume("run", 4).find(words), std::string::npos);
}

TEST_F(Together, ARunWhoseBestWeightsAreGoneGoesOn) {
  ASSERT_EQ(mpirun(new_run("run", "1")).code, 0);
  fs::remove(file("run/result.json"));
  fs::remove(file("run/best/model.safetensors"));
  const Finished resumed = mpirun(violin({"--resume", file("run")}));
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("which epoch is best is decided anew"), std::string::npos) << resumed.err;
}

// A random moment of the first third of the run, told by the run's own log: a clock would be late on a fast machine.
TEST_F(Together, ADeadProcessEndsTheOtherAndTheRunGoesOn) {
  constexpr unsigned kEpochs = 150;
  const pid_t run = start(new_run("run", std::to_string(kEpochs)));
  ASSERT_GT(run, 0);
  std::random_device random;
  const unsigned epoch = 1 + random() % (kEpochs / 3);
  const unsigned pause = random() % 20;
  const std::string moment = fmt::format("{} ms after epoch {}", pause, epoch);
  for (int i = 0; i < 4000 && epochs_done(file("run")) < epoch; ++i) ::usleep(5000);
  ::usleep(pause * 1000);
  const pid_t victim = process_of(run, static_cast<int>(random() % 2));
  ASSERT_GT(victim, 0) << moment << ": " << text("err");
  ::kill(victim, SIGKILL);
  const Finished ended = wait(run);
  EXPECT_NE(ended.code, 0) << moment;
  EXPECT_NE(ended.err.find("signal 9"), std::string::npos) << ended.err;
  EXPECT_EQ(train::read_json_file(file("run/config.json")).at("options").at("epochs"), kEpochs);
  const Finished resumed = mpirun(violin({"--resume", file("run")}));
  EXPECT_EQ(resumed.code, 0) << "killed " << moment << ": " << resumed.err;
  EXPECT_EQ(train::read_json_file(file("run/result.json")).at("steps"), kEpochs * 5);
}

TEST_F(Together, AProblemOfOneProcessEndsAllWithOneLine) {
  const Finished failed = workers("throw");
  EXPECT_NE(failed.code, 0);
  EXPECT_NE(failed.err.find("process 2 fell"), std::string::npos) << failed.err;
  fs::remove_all(file("together"));
  const Finished silent = workers("silent");
  EXPECT_NE(silent.code, 0);
  EXPECT_NE(silent.err.find("no answer from another process for 2 s"), std::string::npos) << silent.err;
}

TEST_F(Together, MistakesAreSaidOnceAndASignalStopsAll) {
  const Finished odd = mpirun(new_run("odd", "1"), 3);
  EXPECT_NE(odd.code, 0);
  const std::string words = "multiple of the 3 processes";
  const std::size_t at = odd.err.find(words);
  ASSERT_NE(at, std::string::npos) << odd.err;
  EXPECT_EQ(odd.err.find(words, at + 1), std::string::npos) << odd.err;

  const pid_t run = start(new_run("run", "500"));
  for (int i = 0; i < 4000 && !fs::exists(file("run/last/state.json")); ++i) ::usleep(5000);
  const pid_t second = process_of(run, 1);
  ASSERT_GT(second, 0);
  ::kill(second, SIGUSR1);
  const Finished stopped = wait(run);
  EXPECT_EQ(stopped.code, 1);
  EXPECT_NE(stopped.err.find("stopped on request"), std::string::npos) << stopped.err;
}

struct StopsWhereItEvaluates : train::Listener {
  std::atomic<bool> stop = false;
  void on_evaluation(std::int64_t) override { stop = true; }
};

// One of the processes; the first has the run's folder.
int worker(const std::string& what, const fs::path& folder) {
  at::set_num_threads(1);
  const auto processes =
      train::join_processes(train::find_launch(), c10::kCPU, std::chrono::seconds(what == "silent" ? 2 : 60));
  try {
    if (what == "silent" && !processes->first()) {
      std::this_thread::sleep_for(std::chrono::seconds(30));
      return 0;
    }
    if (what == "throw" && !processes->first()) throw Error("process 2 fell");
    std::unique_ptr<train::RunFolder> run;
    const bool resume = what == "resume";
    if (processes->first()) {
      run = std::make_unique<train::RunFolder>(folder / "together",
                                               resume ? train::RunFolder::Mode::kResume : train::RunFolder::Mode::kNew);
    }
    train::Request request = small_request(folder);
    if (what == "whole") request.options.accumulate = 2;
    if (what == "stop_in_epoch") request.options.epochs = 1;
    train::Prepared prepared = train::prepare(request);
    // Weights that only the first one has must reach the others.
    if (!processes->first()) {
      const torch::NoGradGuard no_grad;
      for (const at::Tensor& parameter : prepared.model->parameters()) parameter.add_(1);
    }
    if (run && !resume) run->write("config.json", train::to_json(prepared.task));
    train::TrainerOptions options;
    options.workers = 1;
    options.processes = processes.get();
    options.stop_after_steps = what == "stop" ? 7 : what == "stop_in_epoch" ? 4 : 0;
    StopsWhereItEvaluates listener;
    if (what == "stop_evaluating") {
      options.stop = &listener.stop;
      if (!processes->first()) options.listener = &listener;
    }
    train::Trainer trainer(prepared.task, prepared.dataset, prepared.model, run.get(), options);
    if (resume) trainer.resume();
    trainer.train();
    std::string sum;
    for (const auto& [name, tensor] : nn::state(*trainer.model())) {
      const at::Tensor packed = tensor.detach().contiguous();
      sum.append(static_cast<const char*>(packed.const_data_ptr()), packed.nbytes());
    }
    train::expect_same(*processes, sum, "weights are others");
    processes->leave();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    processes->abort(1);
  }
  return 1;
}

}  // namespace
}  // namespace violin

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0) return violin::worker(argv[2], argv[3]);
  ::testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  const int result = RUN_ALL_TESTS();
  constexpr int kSkipped = 77;  // as ctest was told
  return result == 0 && ::testing::UnitTest::GetInstance()->skipped_test_count() > 0 ? kSkipped : result;
}
