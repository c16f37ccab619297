// train, finetune, eval and predict, end to end, as a user runs them.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "tests/cli/training.h"

namespace violin {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

TEST_F(Training, FromAFolderToPredictions) {
  const Outcome trained = run_violin(with(train_arguments("run"), {"--json"}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const json result = json::parse(trained.out);
  EXPECT_EQ(result.at("epochs"), 3);
  EXPECT_EQ(result.at("steps"), 15);
  EXPECT_EQ(result.at("test").at("images"), 12);
  for (const char* name : {"config.json", "log.jsonl", "log.csv", "result.json", "README.md", "last/model.safetensors",
                           "last/optimizer.safetensors", "last/state.json", "best/model.safetensors"})
    EXPECT_TRUE(fs::exists(folder_.path() / "run" / name)) << name;
  // Nothing outside the run folder.
  EXPECT_EQ(folder_.entries(), 3U);  // data, model.json, run

  const Outcome evaluated = run_violin({"eval", file("run"), "--data", file("data"), "--json", "--per-class"});
  ASSERT_EQ(evaluated.code, 0) << evaluated.err;
  const json metrics = json::parse(evaluated.out);
  EXPECT_EQ(metrics.at("split"), "test");
  EXPECT_EQ(metrics.at("images"), 12);
  EXPECT_EQ(metrics.at("classes").size(), 4U);
  EXPECT_NEAR(metrics.at("top1").get<double>(), result.at("test").at("top1").get<double>(), 1e-9);
  EXPECT_NEAR(metrics.at("loss").get<double>(), result.at("test").at("loss").get<double>(), 1e-5);

  const Outcome sizes = run_violin({"eval", file("run"), "--data", file("data"), "--resolutions", "12,16,24", "--split",
                                    "val", "--confusion", file("confusion.csv"), "--json"});
  ASSERT_EQ(sizes.code, 0) << sizes.err;
  EXPECT_EQ(json::parse(sizes.out).at("resolutions").size(), 3U);
  EXPECT_TRUE(fs::exists(file("confusion.csv")));

  // What it said about each image, and the same model against itself.
  const Outcome written =
      run_violin({"eval", file("run"), "--data", file("data"), "--predictions", file("predictions.csv")});
  ASSERT_EQ(written.code, 0) << written.err;
  const Outcome against =
      run_violin({"eval", file("run"), "--data", file("data"), "--against", file("predictions.csv"), "--json"});
  ASSERT_EQ(against.code, 0) << against.err;
  const json compared = json::parse(against.out).at("against");
  EXPECT_EQ(compared.at("both_right").get<int>() + compared.at("neither_right").get<int>(), 12);
  EXPECT_EQ(compared.at("mcnemar_p"), 1.0);
  const Outcome other =
      run_violin({"eval", file("run"), "--data", file("data"), "--split", "val", "--against", file("predictions.csv")});
  EXPECT_EQ(other.code, 1);
  EXPECT_NE(other.err.find("only the same images can be compared"), std::string::npos) << other.err;

  const std::string image = file("data/test/class_2/image_200.png");
  const Outcome predicted =
      run_violin({"predict", file("run"), image, file("data/val"), "--json", "--attention", file("looked.png")});
  ASSERT_EQ(predicted.code, 0) << predicted.err;
  const json list = json::parse(predicted.out);
  ASSERT_EQ(list.size(), 13U);
  EXPECT_EQ(list[0].at("image"), image);
  double sum = 0;
  for (const json& entry : list[0].at("classes")) sum += entry.at("probability").get<double>();
  EXPECT_NEAR(sum, 1, 1e-5);
  EXPECT_TRUE(load_image(file("looked.png")).width > 100);
}

TEST_F(Training, RectanglesFromAFolderToPredictions) {
  ASSERT_EQ(run_violin(with(train_arguments("run"), {"--img-size", "8x24"})).code, 0);
  const json config = json::parse(std::ifstream(file("run/config.json")));
  EXPECT_EQ(config.at("model").at("img_size"), json({8, 24}));
  EXPECT_EQ(config.at("preprocessing").at("size"), json({8, 24}));
  std::ifstream card(file("run/README.md"));
  EXPECT_NE(std::string(std::istreambuf_iterator<char>(card), {}).find("8x24 px"), std::string::npos);

  const Outcome resumed = run_violin({"train", "--resume", file("run")});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  const Outcome repeated = run_violin({"train", "--data", file("data"), "--options", file("run/config.json"), "--out",
                                       file("again"), "--threads", "1"});
  ASSERT_EQ(repeated.code, 0) << repeated.err;
  expect_same_tensors(file("run/last/model.safetensors"), file("again/last/model.safetensors"));

  const Outcome evaluated =
      run_violin({"eval", file("run"), "--data", file("data"), "--resolutions", "8x24,16x48,12x12", "--json"});
  ASSERT_EQ(evaluated.code, 0) << evaluated.err;
  const json result = json::parse(std::ifstream(file("run/result.json")));
  EXPECT_NEAR(json::parse(evaluated.out).at("loss").get<double>(), result.at("test").at("loss").get<double>(), 1e-5);
  EXPECT_EQ(json::parse(evaluated.out).at("resolutions").size(), 3U);

  // Pictures keep the proportions: images three times as wide as high give lower rows than squares.
  const std::string image = file("data/test/class_2/image_200.png");
  ASSERT_EQ(run_violin({"predict", file("run"), image, "--attention", file("wide.png")}).code, 0);
  ASSERT_EQ(run_violin({"predict", file("run"), image, "--img-size", "16", "--attention", file("square.png")}).code, 0);
  EXPECT_EQ(load_image(file("wide.png")).width, load_image(file("square.png")).width);
  EXPECT_LT(load_image(file("wide.png")).height, load_image(file("square.png")).height);
  const Outcome report = run_violin({"report", file("run")});
  EXPECT_EQ(report.code, 0) << report.err;
  std::ifstream page(file("run/report.html"));
  EXPECT_NE(std::string(std::istreambuf_iterator<char>(page), {}).find("aspect-ratio:24/8"), std::string::npos);

  const Outcome tuned = run_violin({"finetune", "--weights", file("run"), "--data", file("data"), "--img-size", "16x12",
                                    "--epochs", "1", "--batch-size", "8", "--out", file("tuned")});
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  EXPECT_NE(tuned.err.find("positions resampled (timm): 2x6 to 4x3"), std::string::npos) << tuned.err;
}

TEST_F(Training, NumbersOfARunAgree) {
  // Fewer images than a batch: one smaller step per epoch.
  const Outcome trained = run_violin({"train", "--data", file("data"), "--config", file("model.json"), "--out",
                                      file("run"), "--epochs", "2", "--batch-size", "64", "--json"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const std::regex progress("train (\\d+)/(\\d+) images  ([0-9.]+)/s"), epoch("epoch 1/2 .* (\\d+) images/s");
  std::smatch speed;
  ASSERT_TRUE(std::regex_search(trained.err, speed, epoch)) << trained.err;
  std::vector<std::string> done;
  for (std::sregex_iterator line(trained.err.begin(), trained.err.end(), progress), end; line != end; ++line) {
    done.push_back((*line)[1]);
    EXPECT_EQ((*line)[2], "80") << trained.err;
    // A clock that starts after the first step would find millions.
    EXPECT_LT(std::stod((*line)[3]), 20 * std::stod(speed[1]) + 20) << trained.err;
  }
  ASSERT_FALSE(done.empty()) << trained.err;
  EXPECT_EQ(done.front(), "40");
  EXPECT_EQ(done.back(), "80");

  std::ifstream stream(file("run/result.json"));
  const json printed = json::parse(trained.out), written = json::parse(stream);
  for (const char* key : {"best_epoch", "best_val_top1"}) EXPECT_EQ(printed.at(key), written.at(key)) << key;
}

TEST_F(Training, TheCardNamesTheWeightsThatThereAre) {
  const auto card_of = [&](const std::string& data, const std::string& run) {
    const Outcome trained = run_violin({"train", "--data", file(data), "--config", file("model.json"), "--out",
                                        file(run), "--epochs", "1", "--batch-size", "8", "--held-out", "0"});
    EXPECT_EQ(trained.code, 0) << trained.err;
    std::ifstream stream(file(run + "/README.md"));
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  EXPECT_NE(card_of("data", "with_val").find("best/model.safetensors"), std::string::npos);
  const std::string card = card_of("data/train", "without_val");
  EXPECT_FALSE(fs::exists(file("without_val/best")));
  EXPECT_EQ(card.find("best/model.safetensors"), std::string::npos) << card;
  EXPECT_NE(card.find("last/model.safetensors"), std::string::npos) << card;
}

TEST_F(Training, TheConfigurationOfARunWithAdaptersRepeatsIt) {
  std::vector<std::string> arguments = with(train_arguments("run"), {"--recipe", "lora", "--rank", "2"});
  ASSERT_EQ(run_violin(arguments).code, 0);
  const Outcome again = run_violin({"train", "--data", file("data"), "--options", file("run/config.json"), "--out",
                                    file("again"), "--threads", "1", "--workers", "1"});
  ASSERT_EQ(again.code, 0) << again.err;
  expect_same_tensors(file("run/last/model.safetensors"), file("again/last/model.safetensors"));
}

TEST_F(Training, AMaskThatWasTrainedStaysUnlessOtherThanItIsAskedFor) {
  ASSERT_EQ(run_violin(with(train_arguments("base"), {"--curves", "hilbert,z", "--init", "spread"})).code, 0);
  const auto tune = [&](const std::string& run, const std::vector<std::string>& more) {
    const Outcome outcome =
        run_violin(with({"finetune", "--weights", file("base"), "--data", file("data"), "--epochs", "1", "--batch-size",
                         "8", "--lr", "1e-9", "--out", file(run), "--threads", "1"},
                        more));
    EXPECT_EQ(outcome.code, 0) << run << ": " << outcome.err;
    return outcome.err;
  };
  const auto mask_of = [&](const std::string& run) {
    std::ifstream stream(file(run + "/config.json"));
    return json::parse(stream).at("model").value("violin", json());
  };
  const auto decay_of = [&](const std::string& run) {
    const auto weights = checkpoint::TensorFile::open(file(run + "/best/model.safetensors"));
    return weights.tensor("blocks.0.attn.violin.beta").clone();
  };
  const json own = mask_of("base");
  for (const auto& [run, more] : std::map<std::string, std::vector<std::string>>{
           {"kept", {}},
           {"same_curves", {"--curves", "hilbert,z"}},
           {"same_strategy", {"--strategy", "mul_v1", "--parameterisation", "sigmoid"}},
           {"same_config", {"--options", file("base/config.json")}}}) {
    const std::string said = tune(run, more);
    EXPECT_EQ(said.find("the mask of the weights"), std::string::npos) << run << ": " << said;
    EXPECT_EQ(mask_of(run), own) << run;
    EXPECT_TRUE(at::allclose(decay_of(run), decay_of("base"), 0, 1e-4)) << run;
  }
  const std::string changed = tune("changed", {"--strategy", "mul_v2"});
  EXPECT_NE(changed.find("the mask of the weights (hilbert,z, mul_v1) is replaced by a fresh one (hilbert,z, mul_v2)"),
            std::string::npos)
      << changed;
  EXPECT_EQ(mask_of("changed").at("curves"), own.at("curves"));
  EXPECT_NE(tune("fresh", {"--init", "identity"}).find("is replaced by a fresh one"), std::string::npos);
  EXPECT_NE(tune("dropped", {"--no-violin"}).find("the mask of the weights (hilbert,z, mul_v1) is dropped"),
            std::string::npos);
  EXPECT_TRUE(mask_of("dropped").is_null());
}

TEST_F(Training, NothingIsWrittenAmongTheImagesOrOverOtherFiles) {
  const auto expect_refused = [&](const std::string& data, const std::string& out, const std::string& words) {
    for (const std::vector<std::string>& force : {std::vector<std::string>{}, std::vector<std::string>{"--force"}}) {
      const Outcome outcome =
          run_violin(with({"train", "--data", data, "--out", out, "--config", file("model.json")}, force));
      EXPECT_EQ(outcome.code, 1) << outcome.err;
      EXPECT_NE(outcome.err.find(words), std::string::npos) << outcome.err;
      EXPECT_NE(outcome.err.find("--out"), std::string::npos) << outcome.err;
    }
  };
  fs::create_directory_symlink(folder_.path() / "data", folder_.path() / "link");
  expect_refused(file("data"), file("data/runs/1"), "inside of the data folder");
  expect_refused(file("data"), file("data"), "inside of the data folder");
  expect_refused(file("data/../data/"), file("link/run"), "inside of the data folder");
  // The default place is below the folder one stands in.
  const fs::path here = fs::current_path();
  fs::current_path(file("data"));
  const Outcome standing_there = run_violin({"train", "--data", ".", "--config", file("model.json")});
  fs::current_path(here);
  EXPECT_EQ(standing_there.code, 1);
  EXPECT_NE(standing_there.err.find("'runs/train-1' lies inside of the data folder '.'"), std::string::npos)
      << standing_there.err;
  EXPECT_FALSE(fs::exists(file("data/runs")) || fs::exists(file("data/run")));
  // A model of another program.
  fs::create_directories(file("other/best"));
  std::ofstream(file("other/config.json")) << R"({"model_type": "vit"})";
  std::ofstream(file("other/README.md")) << "# ViT";
  expect_refused(file("data"), file("other"), "holds no run");
  EXPECT_EQ(std::distance(fs::directory_iterator(file("other")), {}), 3);
  EXPECT_EQ(run_violin({"train", "--resume", file("other")}).code, 1);
  // Beside the data, even with a name that begins alike, there is place.
  const Outcome beside = run_violin(train_arguments("database"));
  EXPECT_EQ(beside.code, 0) << beside.err;
}

TEST_F(Training, ARunFollowsImagesThatWereMoved) {
  ASSERT_EQ(run_violin(train_arguments("run")).code, 0);
  const auto data_of_run = [&] {
    std::ifstream stream(file("run/config.json"));
    return json::parse(stream).at("data").get<std::string>();
  };
  fs::rename(file("data"), file("moved"));
  EXPECT_EQ(run_violin({"train", "--resume", file("run")}).code, 1);
  const Outcome resumed = run_violin({"train", "--resume", file("run"), "--data", file("moved")});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(data_of_run(), file("moved"));
  EXPECT_EQ(run_violin({"train", "--resume", file("run")}).code, 0);
  // Other images are not taken for them, and the run forgets nothing.
  tests::write_images(folder_.path() / "other/train", 4, 9);
  const Outcome others = run_violin({"train", "--resume", file("run"), "--data", file("other")});
  EXPECT_EQ(others.code, 1);
  EXPECT_NE(others.err.find("not those that the run began with"), std::string::npos) << others.err;
  EXPECT_EQ(data_of_run(), file("moved"));
}

TEST_F(Training, PathsNeedNotBeUtf8) {
  const std::string data = file("d\xe9t"), run = file("r\xfcn");
  fs::rename(file("data"), data);
  const Outcome trained = run_violin({"train", "--data", data, "--config", file("model.json"), "--out", run, "--epochs",
                                      "1", "--batch-size", "8", "--json"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_EQ(json::parse(trained.out).at("epochs"), 1);
  const Outcome resumed = run_violin({"train", "--resume", run, "--data", data});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
}

TEST_F(Training, FinetuneWithEveryRecipeAndARateThatIsSearched) {
  ASSERT_EQ(run_violin(train_arguments("base")).code, 0);
  tests::write_images(folder_.path() / "other/train", 3, 10, 16, 300);
  tests::write_images(folder_.path() / "more", 3, 5, 16, 400);
  for (const std::string recipe : {"finetune", "vtab", "lora", "dora", "head", "mask"}) {
    const Outcome outcome =
        run_violin({"finetune", "--weights", file("base"), "--data", file("other"), "--recipe", recipe, "--epochs", "1",
                    "--batch-size", "8", "--out", file(recipe), "--json", "--threads", "1"});
    ASSERT_EQ(outcome.code, 0) << recipe << ": " << outcome.err;
    const Outcome evaluated = run_violin({"eval", file(recipe), "--data", file("more"), "--json"});
    EXPECT_EQ(evaluated.code, 0) << recipe << ": " << evaluated.err;
    const bool adapts = recipe == "lora" || recipe == "dora";
    const std::string plain = file(recipe + ".safetensors");
    const Outcome merged = run_violin({"convert", file(recipe), plain, "--merge-adapters", "--json"});
    EXPECT_EQ(merged.code, adapts ? 0 : 2) << recipe << ": " << merged.err;
    EXPECT_EQ(fs::exists(plain), adapts) << recipe;
    if (!adapts) continue;
    EXPECT_FALSE(json::parse(merged.out).at("model").contains("adapters"));
    const Outcome again = run_violin({"eval", plain, "--data", file("more"), "--json"});
    ASSERT_EQ(again.code, 0) << again.err;
    EXPECT_NEAR(json::parse(again.out).at("loss").get<double>(), json::parse(evaluated.out).at("loss").get<double>(),
                1e-5);
  }
  const Outcome searched =
      run_violin({"finetune", "--weights", file("base/best/model.safetensors"), "--data", file("other"), "--lr", "auto",
                  "--epochs", "1", "--batch-size", "8", "--out", file("searched"), "--threads", "1"});
  ASSERT_EQ(searched.code, 0) << searched.err;
  std::ifstream stream(file("searched/lr_search.json"));
  EXPECT_EQ(json::parse(stream).at("trials").size(), 5U);
  EXPECT_FALSE(fs::exists(file("searched/initial.safetensors")));
}

TEST_F(Training, AFileOfOptionsMayAskForARateAndTiesAreCalledSo) {
  std::ofstream(file("options.json")) << R"({"lr": "auto", "epochs": 1, "batch_size": 8})";
  const auto train = [&](const std::string& run, const std::vector<std::string>& more) {
    return run_violin(with({"train", "--data", file("data"), "--config", file("model.json"), "--options",
                            file("options.json"), "--out", file(run), "--threads", "1"},
                           more));
  };
  const Outcome searched = train("searched", {});
  ASSERT_EQ(searched.code, 0) << searched.err;
  std::ifstream stream(file("searched/lr_search.json"));
  const json trials = json::parse(stream).at("trials");
  ASSERT_EQ(trials.size(), 5U);
  std::vector<double> top1;
  for (const json& trial : trials) top1.push_back(trial.at("top1"));
  const bool ties = std::count(top1.begin(), top1.end(), *std::max_element(top1.begin(), top1.end())) > 1;
  EXPECT_NE(searched.err.find(ties ? "did best together with" : "did best;"), std::string::npos) << searched.err;
  // The command line overrides the file.
  const Outcome given = train("given", {"--lr", "1e-3"});
  ASSERT_EQ(given.code, 0) << given.err;
  EXPECT_FALSE(fs::exists(file("given/lr_search.json")));
}

TEST_F(Training, TheConfigurationOfARunRepeatsItAndMistakesLeaveNoFolder) {
  ASSERT_EQ(run_violin(with(train_arguments("run"), {"--curves", "snake", "--strategy", "log", "--mixup", "0"})).code,
            0);
  const Outcome again = run_violin({"train", "--data", file("data"), "--options", file("run/config.json"), "--out",
                                    file("again"), "--threads", "1", "--workers", "1"});
  ASSERT_EQ(again.code, 0) << again.err;
  expect_same_tensors(file("again/last/model.safetensors"), file("run/last/model.safetensors"));
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{"--rand-augment", "rand-m9-x1"}, {"--img-size", "5000"}}) {
    EXPECT_NE(run_violin(with(train_arguments("wrong"), wrong)).code, 0);
    EXPECT_FALSE(fs::exists(file("wrong/config.json")));
  }
  std::ifstream card(file("run/README.md"));
  const std::string text((std::istreambuf_iterator<char>(card)), {});
  EXPECT_NE(text.find("| data | `data`, 40 training images |"), std::string::npos) << text;
}

TEST_F(Training, AFineTuningKilledBeforeItsFirstCheckpointBeginsWithTheSameWeights) {
  ASSERT_EQ(run_violin(train_arguments("base")).code, 0);
  const auto finetune = [&](const std::string& run) {
    return std::vector<std::string>{"finetune", "--weights", file("base"), "--data",       file("data"), "--out",
                                    file(run),  "--epochs",  "1",          "--batch-size", "8",          "--lr",
                                    "1e-3",     "--threads", "1",          "--workers",    "1",          "--force"};
  };
  ASSERT_EQ(run_violin(finetune("whole")).code, 0);
  bool early = false;
  for (int attempt = 0; attempt < 20 && !early; ++attempt) {
    const pid_t child = start(finetune("killed"));
    while (!fs::exists(file("killed/config.json")) && waitpid(child, nullptr, WNOHANG) == 0) usleep(200);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    early = fs::exists(file("killed/config.json")) && !fs::exists(file("killed/last"));
    if (!early) fs::remove_all(file("killed"));
  }
  ASSERT_TRUE(early) << "the first checkpoint was always there already";
  // What cannot go on now loses nothing.
  fs::copy(file("data"), file("kept"), fs::copy_options::recursive);
  for (const auto& entry : fs::recursive_directory_iterator(file("data/train")))
    if (entry.is_regular_file()) std::ofstream(entry.path()) << "no image";
  EXPECT_EQ(run_violin({"finetune", "--resume", file("killed")}).code, 1);
  EXPECT_TRUE(fs::exists(file("killed/config.json")) && fs::exists(file("killed/initial.safetensors")));
  fs::copy(file("kept"), file("data"), fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  const Outcome resumed = run_violin({"finetune", "--resume", file("killed"), "--threads", "1", "--workers", "1"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("no checkpoint yet"), std::string::npos) << resumed.err;
  expect_same_tensors(file("killed/last/model.safetensors"), file("whole/last/model.safetensors"));
  EXPECT_FALSE(fs::exists(file("killed/initial.safetensors")));

  fs::remove_all(file("killed/last"));
  const Outcome lost = run_violin({"finetune", "--resume", file("killed")});
  EXPECT_EQ(lost.code, 1);
  EXPECT_NE(lost.err.find("neither a checkpoint nor initial weights"), std::string::npos) << lost.err;
}

TEST_F(Training, MistakesAreOneLineWithARemedy) {
  const auto expect = [&](const std::vector<std::string>& arguments, int code, const std::string& words) {
    const Outcome outcome = run_violin(arguments);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_NE(outcome.err.find(words), std::string::npos) << outcome.err;
    EXPECT_TRUE(outcome.out.empty());
  };
  expect({"train"}, 2, "--data is missing");
  expect({"train", "--data", file("nowhere"), "--model", "vit_micro_patch4_32", "--out", file("x")}, 1, "nowhere");
  expect({"train", "--data", file("data"), "--model", "vit_mikro_patch4_32", "--out", file("x")}, 1,
         "vit_micro_patch4_32");
  expect({"train", "--data", file("data"), "--out", file("x")}, 2, "--model is missing");
  expect(with(train_arguments("x"), {"--rank", "4"}), 2, "--rank is one of adapters: add --recipe lora");
  expect(with(train_arguments("x"), {"--recipe", "lora", "--adapter-targets", "qkv, fc3"}), 2,
         "option adapter_targets is 'fc3'; expected one of qkv");
  expect(with(train_arguments("x"), {"--recipe", "lora", "--adapter-targets", ","}), 2, "adapter_targets is ','");
  expect(with(train_arguments("x"), {"--mixup", "-1"}), 2, "mixup is -1");
  expect(with(train_arguments("x"), {"--recipe", "diet"}), 2, "did you mean 'deit'");
  expect(with(train_arguments("x"), {"--init", "identical"}), 2, "init");
  expect({"finetune", "--data", file("data")}, 2, "--weights is missing");
  expect({"train", "--resume", file("data")}, 1, "no run");
  // What would be ignored is not accepted.
  expect({"train", "--resume", file("a"), "--out", file("b")}, 2, "name two folders: give one");
  expect(with(train_arguments("x"), {"--model", "vit_micro_patch4_32"}), 2, "--model and --config");
  expect(with(train_arguments("x"), {"--violin", "--no-violin"}), 2, "--violin");
  expect(with(train_arguments("x"), {"--decay-per-axis"}), 2, "decay_per_axis has no effect");
  expect({"train", "--resume", file("a"), "--branch", "ema"}, 2, "a run keeps its options");
  expect(with(train_arguments("x"), {"--branch", "ema"}), 2, "add --weights");
  expect({"train", "--resume", file("a"), "--lr", "auto"}, 2, "a run keeps its options");
  expect(with(train_arguments("x"), {"--weight-decay", "inf"}), 2, "weight_decay is inf; expected a finite number");
  expect(with(train_arguments("x"), {"--cache-mb", "9223372036854775807"}), 2, "cache_mb is 9223372036854775807");
  // What torch throws brings a trace of the calls, which nobody needs: here 2^54 bytes of weights.
  std::ofstream(file("huge.json")) << R"({"img_size": 65536, "patch_size": 65536, "in_chans": 1024, "embed_dim": 1024,
      "depth": 1, "num_heads": 1})";
  const Outcome huge = run_violin({"train", "--data", file("data"), "--config", file("huge.json"), "--out", file("x")});
  EXPECT_EQ(huge.code, 1);
  EXPECT_NE(huge.err.find("allocate"), std::string::npos) << huge.err;
  EXPECT_EQ(huge.err.find("frame #"), std::string::npos) << huge.err;
  expect(with(train_arguments("x"), {"--class-weights", "inverse", "--balanced"}), 2, "none beside balanced");
  expect(with(train_arguments("x"), {"--img-size", "17x24"}), 1, "whole patches of 4x4 pixels, as in 16x24");
  expect(with(train_arguments("x"), {"--img-size", "5000x24"}), 2, "img_size is 5000x24");
  expect({"eval", file("model.json"), "--data", file("data")}, 1, "model.json");
  expect({"predict", file("nothing"), file("data/val")}, 1, "nothing");
  EXPECT_FALSE(fs::exists(file("x")));
  // A broken image is named; --on-bad-image fatal makes it an error.
  std::ofstream(file("data/train/class_0/broken.png")) << "\x89PNG\r\n\x1a\nrubbish";
  const Outcome skipped = run_violin(train_arguments("skipping"));
  EXPECT_EQ(skipped.code, 0) << skipped.err;
  EXPECT_NE(skipped.err.find("broken.png"), std::string::npos) << skipped.err;
  EXPECT_NE(skipped.out.find("skipped 1 bad image of train\n"), std::string::npos) << skipped.out;
  EXPECT_EQ(train::read_json_file(file("skipping/result.json")).at("skipped"), 1);
  std::ifstream card(file("skipping/README.md"));
  const std::string card_text{std::istreambuf_iterator<char>(card), {}};
  EXPECT_NE(card_text.find("41 training images (1 of them unreadable)"), std::string::npos) << card_text;
  // Also those that were met before a run was interrupted.
  fs::remove(file("skipping/result.json"));
  const Outcome resumed = run_violin({"train", "--resume", file("skipping"), "--json"});
  EXPECT_EQ(json::parse(resumed.out).at("skipped"), 1) << resumed.err;
  expect(with(train_arguments("fatal"), {"--on-bad-image", "fatal"}), 1, "broken.png");
}

}  // namespace
}  // namespace violin