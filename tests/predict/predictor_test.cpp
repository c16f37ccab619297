#include "violin/predict/predictor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "tests/nn/helpers.h"
#include "tests/temporary_folder.h"
#include "violin/data/file.h"
#include "violin/predict/attention_map.h"

namespace violin {
namespace {

const std::vector<std::string> kNames = {"ant", "bee", "cat", "dog", "eel"};

// A model with a mask, whose tables are built by whoever comes first.
struct Saved {
  Saved() {
    nn::ModelConfig config = tests::small_model();
    config.violin = nn::MaskConfig{};
    model = std::make_shared<nn::VisionTransformer>(config, 5);
    model->eval();
    // Initial weights give all classes almost the same probability.
    const torch::NoGradGuard no_grad;
    model->head->weight.mul_(40);
    checkpoint::save_model(path(), *model, preprocessing, kNames);
  }
  std::string path() const { return folder.file("model.safetensors"); }

  TemporaryFolder folder;
  nn::Model model;
  data::EvalOptions preprocessing{
      .size = Size::square(32), .crop_pct = 0.8, .normalisation = data::kInceptionStatistics};
};

Image test_image(std::int64_t width, std::int64_t height, int seed) {
  Image image(width, height);
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < width; ++x)
      for (int c = 0; c < 3; ++c)
        image.at(x, y)[c] = static_cast<std::uint8_t>((x * (3 + seed) + y * (5 + c) + seed * 41 * c) % 256);
  return image;
}

TEST(Predictor, UsesThePreprocessingAndNamesOfTheWeights) {
  const Saved saved;
  const Predictor predictor(saved.path());
  EXPECT_EQ(predictor.classes(), 5);
  EXPECT_EQ(predictor.preprocessing().crop_pct, 0.8);
  const Image image = test_image(50, 40, 1);
  const std::vector<Guess> guesses = predictor.classify(image, 5);

  // By hand.
  std::vector<float> values(3 * 32 * 32);
  data::normalise(data::eval_pixels(image, saved.preprocessing), data::kInceptionStatistics, values.data());
  const torch::NoGradGuard no_grad;
  const at::Tensor expected =
      at::softmax(saved.model->forward(at::from_blob(values.data(), {1, 3, 32, 32}, at::kFloat)), -1)[0];
  ASSERT_EQ(guesses.size(), 5U);
  for (std::size_t i = 0; i < guesses.size(); ++i) {
    EXPECT_EQ(guesses[i].name, kNames[static_cast<std::size_t>(guesses[i].index)]);
    EXPECT_NEAR(guesses[i].probability, expected[guesses[i].index].item<double>(), 1e-6);
    EXPECT_GE(guesses[i > 0 ? i - 1 : 0].probability, guesses[i].probability);
  }
}

TEST(Predictor, FilesBuffersAndPixelsAgree) {
  const Saved saved;
  const Predictor predictor(saved.path());
  const Image image = test_image(40, 33, 2);
  const Bytes png = encode_png(image);
  const std::string file = saved.folder.file("image.png");
  write_file_atomically(file, png);
  const auto from_pixels = predictor.classify(image, 2);
  ASSERT_EQ(from_pixels.size(), 2U);
  for (const auto& guesses : {predictor.classify_file(file, 2), predictor.classify_encoded(png, 2)}) {
    ASSERT_EQ(guesses.size(), 2U);
    EXPECT_EQ(guesses[0].index, from_pixels[0].index);
    EXPECT_EQ(guesses[0].probability, from_pixels[0].probability);
  }
}

TEST(Predictor, BatchesOfAnySizeGiveTheSameClasses) {
  const Saved saved;
  const Predictor one(saved.path(), {.batch = 1});
  const Predictor three(saved.path(), {.batch = 3});
  std::vector<Image> images;
  for (int i = 0; i < 7; ++i) images.push_back(test_image(32 + i, 40 - i, i));
  const auto left = one.classify(images, 5), right = three.classify(images, 5);
  ASSERT_EQ(left.size(), 7U);
  ASSERT_EQ(right.size(), 7U);
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i][0].index, right[i][0].index);
    EXPECT_NEAR(left[i][0].probability, right[i][0].probability, 1e-6);
  }
  EXPECT_TRUE(one.classify(std::span<const Image>(), 5).empty());
}

TEST(Predictor, ThreadsGetTheSameBits) {
  const Saved saved;
  std::vector<Image> images;
  for (int i = 0; i < 6; ++i) images.push_back(test_image(36, 36, i));
  std::vector<std::vector<Guess>> expected;
  {
    const Predictor predictor(saved.path());
    for (const Image& image : images) expected.push_back(predictor.classify(image, 5));
  }
  const Predictor predictor(saved.path());  // its tables are not built yet
  std::atomic<int> differences = 0;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t round = 0; round < 12; ++round) {
        const std::size_t i = (t + round) % images.size();
        const std::vector<Guess> guesses = predictor.classify(images[i], 5);
        for (std::size_t k = 0; k < guesses.size(); ++k) {
          if (guesses[k].index != expected[i][k].index || guesses[k].probability != expected[i][k].probability)
            ++differences;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(differences, 0);
}

TEST(Predictor, GoesWhereTheModelIs) {
  const Saved saved;
  const Predictor predictor(checkpoint::load_model(saved.path()), {.load = {.device = at::kMeta}});
  EXPECT_EQ(predictor.classify(test_image(40, 40, 1), 1)[0].index,
            Predictor(saved.path()).classify(test_image(40, 40, 1), 1)[0].index);
}

TEST(Predictor, NumbersClassesWithoutNames) {
  const Saved saved;
  checkpoint::save_model(saved.path(), *saved.model, saved.preprocessing);
  const Predictor predictor(saved.path());
  EXPECT_EQ(predictor.class_name(3), "class 3");
}

TEST(Predictor, EqualProbabilitiesComeByNumberAndTopIsBounded) {
  const Saved saved;
  const Predictor predictor(saved.path());
  const auto guesses = predictor.best(at::tensor({0.2, 0.3, 0.2, 0.3, 0.0}), 99);
  ASSERT_EQ(guesses.size(), 5U);
  EXPECT_EQ(guesses[0].index, 1);
  EXPECT_EQ(guesses[1].index, 3);
  EXPECT_EQ(guesses[2].index, 0);
  EXPECT_TRUE(predictor.best(at::tensor({0.2, 0.3, 0.2, 0.3, 0.0}), 0).empty());
}

TEST(Predictor, RefusesWeightsWithoutClassesAndBrokenImages) {
  const Saved saved;
  EXPECT_THROW(Predictor(saved.path(), {.load = {.num_classes = 0}}), Error);
  const Predictor predictor(saved.path());
  const std::string file = saved.folder.file("broken.jpg");
  write_file_atomically(file, std::string_view("not an image"));
  try {
    predictor.classify_file(file);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("broken.jpg"), std::string::npos) << error.what();
  }
}

TEST(Predictor, PreparesRectanglesForWeightsThatTakeThem) {
  const Saved saved;
  const Predictor predictor(saved.path(), {.load = {.img_size = Size{64, 32}}});
  EXPECT_EQ(predictor.preprocessing().size, (Size{64, 32}));
  const Image image = test_image(50, 40, 1);
  EXPECT_EQ(predictor.prepare(image).sizes(), (at::IntArrayRef{3, 64, 32}));
  data::EvalOptions preprocessing = saved.preprocessing;
  preprocessing.size = {64, 32};
  std::vector<float> values(3 * 64 * 32);
  data::normalise(data::eval_pixels(image, preprocessing), data::kInceptionStatistics, values.data());
  EXPECT_TRUE(at::equal(predictor.prepare(image), at::from_blob(values.data(), {3, 64, 32}, at::kFloat)));
  const checkpoint::LoadedModel loaded = checkpoint::load_model(saved.path(), {.img_size = Size{64, 32}});
  EXPECT_EQ(attention_map(*loaded.model, predictor.prepare(image)).values.size(), 8U * 4U);
  EXPECT_EQ(predictor.classify(image, 5).size(), 5U);
}

TEST(Predictor, Bf16IsCloseToFp32) {
  const Saved saved;
  const Predictor full(saved.path());
  const Predictor half(saved.path(), {.precision = nn::Precision::kBf16});
  const Image image = test_image(40, 40, 3);
  const double difference = full.classify(image, 1)[0].probability - half.classify(image, 1)[0].probability;
  EXPECT_NE(difference, 0);
  EXPECT_LT(std::abs(difference), 0.05);
}

}  // namespace
}  // namespace violin
