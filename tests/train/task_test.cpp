#include "tests/train/helpers.h"
#include "violin/checkpoint/model_file.h"

namespace violin::tests {
namespace {

namespace fs = std::filesystem;

TEST(Task, ADecayPerAxisIsOneOfManhattan) {
  train::Request request = tiny_request("nowhere");
  request.config->violin->decay_per_axis = true;
  EXPECT_THROW(train::check(request), Error);
  request.config->violin->curves.clear();
  EXPECT_THROW(train::check(request), Error);
  request.config->violin->curves = "snake,manhattan";
  train::check(request);
  request.config->violin->decay = 0.9;  // one for all axes
  EXPECT_THROW(train::check(request), Error);
}

TEST(Task, DecaysNeedACurve) {
  train::Request request = tiny_request("nowhere");
  nn::MaskConfig& mask = *request.config->violin;
  mask.curves.clear();
  mask.alpha = true;
  train::check(request);
  mask.learned_prefix_decay = true;
  EXPECT_THROW(train::check(request), Error);
  mask.learned_prefix_decay = false;
  mask.decay = 0.9;
  EXPECT_THROW(train::check(request), Error);
  mask.curves = "snake";
  train::check(request);
}

TEST(Task, SquareWeightsAreFinetunedAtARectangle) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  const nn::VisionTransformer square(tiny_model(), 1);
  checkpoint::save_model(folder.path() / "w.safetensors", square, {.size = Size::square(16), .crop_pct = 0.8});
  train::Request request = tiny_request(folder.path() / "data");
  request.config.reset();
  request.weights = folder.path() / "w.safetensors";
  request.options.img_size = {8, 24};
  const train::Prepared prepared = train::prepare(request);
  EXPECT_EQ(prepared.task.preprocessing.size, (Size{8, 24}));
  EXPECT_EQ(prepared.task.preprocessing.crop_pct, 0.8);
  EXPECT_TRUE(at::equal(prepared.model->pos_embed,
                        nn::resample_positions(square.pos_embed.detach(), {4, 4}, {2, 6}, 0, "timm")));
}

TEST(Task, SmallImagesAreTakenAsTheyAreWhateverTheWeightsDid) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  const auto crop_after = [&](std::int64_t before, std::int64_t after, data::EvalCrop crop) {
    nn::ModelConfig config = tiny_model();
    config.img_size = Size::square(before);
    const nn::VisionTransformer model(config, 1);
    const data::EvalOptions prepared = {.size = config.img_size, .crop_pct = 0.9, .crop = crop};
    checkpoint::save_model(folder.path() / "w.safetensors", model, prepared);
    train::Request request = tiny_request(folder.path() / "data");
    request.config.reset();
    request.weights = folder.path() / "w.safetensors";
    request.options.img_size = Size::square(after);
    const data::EvalOptions result = train::prepare(request).task.preprocessing;
    EXPECT_EQ(result.size, Size::square(after));
    EXPECT_EQ(result.crop, crop);
    return result.crop_pct;
  };
  EXPECT_EQ(crop_after(40, 32, data::EvalCrop::kCentre), 1);
  EXPECT_EQ(crop_after(40, 36, data::EvalCrop::kCentre), 0.9);
  EXPECT_EQ(crop_after(32, 24, data::EvalCrop::kCentre), 0.9);  // they were small, and scaled all the same
  EXPECT_EQ(crop_after(40, 32, data::EvalCrop::kSquash), 0.9);
}

TEST(Task, StatisticsAreGivenMeasuredOrTheWeights) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  const data::Normalisation own = {{0.1, 0.2, 0.3}, {0.4, 0.5, 0.6}};
  checkpoint::save_model(folder.path() / "w.safetensors", nn::VisionTransformer(tiny_model(), 1),
                         {.size = Size::square(16), .normalisation = own});
  for (const bool from_weights : {false, true}) {
    train::Request request = tiny_request(folder.path() / "data");
    if (from_weights) {
      request.config.reset();
      request.weights = folder.path() / "w.safetensors";
    }
    const auto prepared = [&](const char* statistics) {
      request.options.statistics = statistics;
      return train::prepare(request);
    };
    EXPECT_EQ(prepared("auto").task.preprocessing.normalisation, from_weights ? own : data::kCifar100Statistics);
    EXPECT_EQ(prepared("imagenet").task.preprocessing.normalisation, data::kImageNetStatistics);
    EXPECT_EQ(prepared("0.1,0.2,0.3:0.4,0.5,0.6").task.preprocessing.normalisation, own);
    const train::Prepared measured = prepared("data");
    EXPECT_EQ(measured.task.preprocessing.normalisation,
              data::measure_statistics(measured.dataset.train, 1).normalisation);
    EXPECT_NE(measured.task.notes.back().find("training images"), std::string::npos);
    EXPECT_THROW(prepared("mnist"), Error);
  }
}

TEST(Task, SeveralProcessesRepeatAugmentationAsDeitDoes) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  train::Request request = tiny_request(folder.path() / "data");
  const auto repeats = [&](std::int64_t processes) {
    request.processes = processes;
    const train::Prepared prepared = train::prepare(request);
    const auto said = [](const std::string& note) { return note.find("repeated") != std::string::npos; };
    EXPECT_EQ(std::ranges::any_of(prepared.task.notes, said),
              request.options.repeats == 0 && prepared.task.options.repeats > 1);
    return prepared.task.options.repeats;
  };
  EXPECT_EQ(repeats(1), 1);
  EXPECT_EQ(repeats(2), 3);
  request.options.repeats = 2;
  EXPECT_EQ(repeats(1), 2);
  EXPECT_EQ(repeats(2), 2);
  train::Options plain;
  train::apply_recipe("finetune", plain);
  request.options.repeats = plain.repeats;
  EXPECT_EQ(repeats(2), 1);
}

TEST(Task, ASizeIsMadeOfWholePatches) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 4, 6);
  train::Request request = tiny_request(folder.path() / "data");
  request.options.img_size = {17, 24};
  try {
    train::prepare(request);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "option img_size is 17x24; expected whole patches of 4x4 pixels, as in 16x24");
  }
}

TEST(Task, SmallImagesOfTheirSizeAreShifted) {
  const auto crop = [](const Size& size, const Image& first) {
    return train::train_transform({}, {.size = size}, first).crop;
  };
  EXPECT_EQ(crop({16, 32}, Image(32, 16)), data::TrainCrop::kPadded);
  EXPECT_EQ(crop({16, 32}, Image(16, 32)), data::TrainCrop::kRandomResized);
  EXPECT_EQ(crop({16, 64}, Image(64, 16)), data::TrainCrop::kRandomResized);
}

TEST(Task, FrozenWeightsThatAreRandomAreSaid) {
  const TemporaryFolder folder;
  write_images(folder.path() / "data", 3, 6);
  train::Request request = tiny_request(folder.path() / "data");
  const auto said = [&] {
    const std::vector<std::string> notes = train::prepare(request).task.notes;
    return std::any_of(notes.begin(), notes.end(),
                       [](const std::string& line) { return line.find("the others are random") != std::string::npos; });
  };
  EXPECT_FALSE(said());
  train::apply_recipe("head", request.options);
  EXPECT_TRUE(said());
}

// config.json of runs from before it was checked.
TEST(Task, TargetsOfAdaptersMatterOnlyWhereThereAreAdapters) {
  train::Options options;
  for (const char* targets : {"", "qkv, fc3"}) {
    options.adapter_targets = targets;
    options.adapter = "";
    EXPECT_NO_THROW(train::check(options));
    options.adapter = "lora";
    EXPECT_THROW(train::check(options), Error);
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
  EXPECT_THROW(train::match_classes({"a", "b", "a"}, {"a"}), Error);  // which of the two is meant?
  EXPECT_EQ(train::match_classes({"a", "b", "a"}, {"b"}), (std::vector<std::int64_t>{1}));
  // ImageNet: folders have ids, names begin with them.
  EXPECT_EQ(train::match_classes({"n01440764 tench", "n01443537 goldfish"}, {"n01443537"}),
            (std::vector<std::int64_t>{1}));
  EXPECT_THROW(train::match_classes({"apple pie"}, {"apple"}), Error);
}

}  // namespace
}  // namespace violin::tests
