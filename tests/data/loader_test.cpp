#include "violin/data/loader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <set>

#include "tests/data/pictures.h"
#include "tests/temporary_folder.h"
#include "violin/data/mixup.h"
#include "violin/error.h"

namespace violin::data {
namespace {

// Images made from their number; some are broken. Counts how often it is asked.
class MadeUp : public Source {
 public:
  explicit MadeUp(std::set<std::int64_t> broken = {}) : broken_(std::move(broken)) {}
  Image decode(const Sample& sample) const override {
    ++decoded;
    if (broken_.contains(sample.record)) throw Error("cannot decode '" + sample.name() + "': broken");
    return noise(20 + sample.record % 5, 24, static_cast<unsigned>(sample.record));
  }
  mutable std::atomic<int> decoded = 0;

 private:
  std::set<std::int64_t> broken_;
};

SampleSet made_up(const std::shared_ptr<const MadeUp>& source, std::int64_t count) {
  std::vector<Sample> samples;
  for (std::int64_t i = 0; i < count; ++i) samples.push_back({"made_up", i, i % 3});
  return {source, samples, 3, ""};
}

SampleSet made_up(std::int64_t count, std::set<std::int64_t> broken = {}) {
  return made_up(std::make_shared<MadeUp>(std::move(broken)), count);
}

std::shared_ptr<const Transform> augmentation() {
  return std::make_shared<TrainTransform>(deit_augmentation(Size::square(16)));
}

std::vector<Batch> all_batches(Loader& loader) {
  std::vector<Batch> batches;
  while (auto batch = loader.next()) batches.push_back(*batch);
  return batches;
}

TEST(Loader, BatchesDoNotDependOnTheNumberOfWorkers) {
  const SampleSet set = made_up(75);
  const Sampler sampler(75, {.seed = 3, .batch = 8});
  std::vector<Batch> expected;
  for (const int workers : {0, 1, 2, 5}) {
    Loader loader(set, augmentation(), {.workers = workers, .prefetch = workers + 1, .seed = 11});
    for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
      loader.start(sampler.epoch(epoch), 8, epoch);
      const std::vector<Batch> batches = all_batches(loader);
      ASSERT_EQ(batches.size(), 9u);
      for (std::size_t i = 0; i < batches.size(); ++i) {
        EXPECT_EQ(batches[i].number, static_cast<std::int64_t>(i));
        EXPECT_EQ(batches[i].images.sizes(), (torch::IntArrayRef{8, 3, 16, 16}));
        EXPECT_EQ(batches[i].images.scalar_type(), torch::kFloat32);
        if (workers == 0) {
          expected.push_back({batches[i].images.clone(), batches[i].labels, batches[i].indices, epoch});
          continue;
        }
        const Batch& same = expected[static_cast<std::size_t>(epoch) * 9 + i];
        EXPECT_TRUE(torch::equal(batches[i].images, same.images));
        EXPECT_TRUE(torch::equal(batches[i].labels, same.labels));
        EXPECT_TRUE(torch::equal(batches[i].indices, same.indices));
      }
    }
  }
  EXPECT_FALSE(torch::equal(expected[0].images, expected[9].images));
}

TEST(Loader, ValuesAreTheTransformsAndLabelsBelongToIndices) {
  const SampleSet set = made_up(10);
  const auto transform = std::make_shared<EvalTransform>(EvalOptions{.size = {12, 20}});
  Loader loader(set, transform, {.workers = 2});
  loader.start(in_order(10), 4, 0);
  EXPECT_EQ(loader.batches(), 3);
  std::int64_t index = 0;
  std::vector<float> expected(3 * 12 * 20);
  for (const Batch& batch : all_batches(loader)) {
    EXPECT_EQ(batch.images.sizes().slice(1), (torch::IntArrayRef{3, 12, 20}));
    for (std::int64_t i = 0; i < batch.size(); ++i, ++index) {
      EXPECT_EQ(batch.indices[i].item<std::int64_t>(), index);
      EXPECT_EQ(batch.labels[i].item<std::int64_t>(), index % 3);
      Random random(0, Purpose::kAugment);
      transform->apply(set.decode(index), random, expected.data());
      EXPECT_TRUE(torch::equal(batch.images[i].flatten(), torch::tensor(expected)));
    }
  }
  EXPECT_EQ(index, 10);
}

TEST(Loader, ResumesInTheMiddleOfAnEpochWithoutDecodingWhatWasSeen) {
  const Sampler sampler(60, {.seed = 1, .batch = 6});
  Loader whole(made_up(60), augmentation(), {.workers = 2, .seed = 2});
  whole.start(sampler.epoch(5), 6, 5);
  const std::vector<Batch> batches = all_batches(whole);
  const auto source = std::make_shared<MadeUp>();
  Loader resumed(made_up(source, 60), augmentation(), {.workers = 2, .seed = 2});
  resumed.start(sampler.epoch(5), 6, 5, 7);
  const std::vector<Batch> rest = all_batches(resumed);
  ASSERT_EQ(rest.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(rest[i].number, static_cast<std::int64_t>(i) + 7);
    EXPECT_TRUE(torch::equal(rest[i].images, batches[i + 7].images));
  }
  EXPECT_EQ(source->decoded, 18);
}

TEST(Loader, BatchesThatAreKeptAreNotOverwritten) {
  Loader loader(made_up(64), augmentation(), {.workers = 3, .prefetch = 2});
  loader.start(in_order(64), 4, 0);
  std::vector<torch::Tensor> kept;
  std::vector<torch::Tensor> copies;
  while (auto batch = loader.next()) {
    if (batch->number % 3 != 0) continue;  // the others are dropped and their buffers used again
    kept.push_back(batch->images[1]);      // a view must hold the buffer too
    copies.push_back(batch->images[1].clone());
  }
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(torch::equal(kept[i], copies[i]));
}

TEST(Loader, CacheDecodesOnceWithinItsLimit) {
  const auto source = std::make_shared<MadeUp>();
  const Sampler sampler(40, {.batch = 10});
  Loader loader(made_up(source, 40), augmentation(), {.workers = 2, .cache_bytes = 1 << 20});
  Loader plain(made_up(40), augmentation(), {.workers = 2});
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    loader.start(sampler.epoch(epoch), 10, epoch);
    plain.start(sampler.epoch(epoch), 10, epoch);
    while (auto batch = loader.next()) EXPECT_TRUE(torch::equal(batch->images, plain.next()->images));
  }
  EXPECT_EQ(source->decoded, 40);

  const auto other = std::make_shared<MadeUp>();
  Loader small(made_up(other, 40), augmentation(), {.workers = 2, .cache_bytes = 16000});
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    small.start(in_order(40), 10, epoch);
    all_batches(small);
  }
  EXPECT_LE(small.cached_bytes(), 16000);
  EXPECT_GT(small.cached_bytes(), 10000);
  EXPECT_LT(other->decoded, 80);
  EXPECT_GT(other->decoded, 60);
}

TEST(Loader, SkipsBadImagesAndNamesThem) {
  for (const int workers : {0, 3}) {
    Loader loader(made_up(12, {2, 3, 4, 5, 9}), augmentation(), {.workers = workers});
    std::vector<std::int64_t> seen;
    for (int epoch = 0; epoch < 2; ++epoch) {
      seen.clear();
      loader.start(in_order(12), 2, epoch);
      for (const Batch& batch : all_batches(loader)) {
        EXPECT_EQ(batch.images.size(0), batch.size());
        for (std::int64_t i = 0; i < batch.size(); ++i) seen.push_back(batch.indices[i].item<std::int64_t>());
      }
    }
    EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 6, 7, 8, 10, 11}));
    const std::vector<BadImage> bad = loader.bad_images();
    ASSERT_EQ(bad.size(), 5u);
    EXPECT_EQ(bad[4].name, "made_up[9]");
    EXPECT_EQ(bad[4].index, 9);
    EXPECT_TRUE(contains(bad[4].message, "broken"));
  }
}

TEST(Loader, ReplacesBadImagesTheSameWayWithAnyNumberOfWorkers) {
  std::vector<Batch> expected;
  for (const int workers : {0, 4}) {
    Loader loader(made_up(12, {2, 3, 9}), augmentation(), {.workers = workers, .replace_bad = true, .seed = 4});
    loader.start(in_order(12), 4, 0);
    const std::vector<Batch> batches = all_batches(loader);
    ASSERT_EQ(batches.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(batches[i].size(), 4);
      EXPECT_TRUE(torch::equal(batches[i].labels, batches[i].indices.remainder(3)));
      if (workers > 0) {
        EXPECT_TRUE(torch::equal(batches[i].images, expected[i].images));
      }
    }
    expected = batches;
  }
  Loader hopeless(made_up(3, {0, 1, 2}), augmentation(), {.workers = 2, .replace_bad = true});
  hopeless.start(in_order(3), 3, 0);
  EXPECT_TRUE(contains(error_of([&] { hopeless.next(); }), "made_up["));
}

TEST(Loader, ABadImageIsFatalWhereAskedForAndTheFirstOneIsNamed) {
  for (const int workers : {0, 1, 4}) {
    Loader loader(made_up(40, {13, 17, 30}), augmentation(), {.workers = workers, .on_bad_image = OnBadImage::kFatal});
    for (int round = 0; round < 3; ++round) {  // the loader can be used again afterwards
      loader.start(in_order(40), 10, 0);
      EXPECT_TRUE(loader.next().has_value());
      EXPECT_TRUE(contains(error_of([&] { loader.next(); }), "made_up[13]"));
      EXPECT_FALSE(loader.next().has_value());
    }
  }
}

TEST(Loader, TruncatedFilesAreReportedByName) {
  const TemporaryFolder folder;
  write_classes(folder.path(), {"a", "b"}, {4, 4});
  const Bytes whole = read_file(folder.path() / "b/1.png", 1 << 20);
  write_file_atomically(folder.path() / "b/1.png", std::span(whole).first(whole.size() - 40));
  const SampleSet set = open_dataset(folder.path(), {.held_out = 0}).train;
  Loader loader(set, augmentation(), {.workers = 2, .on_bad_image = OnBadImage::kFatal});
  loader.start(in_order(set.size()), 8, 0);
  EXPECT_TRUE(contains(error_of([&] { loader.next(); }), "b/1.png"));
}

TEST(Loader, CanBeDestroyedAndRestartedAtAnyMoment) {
  const SampleSet set = made_up(200);
  for (int taken = 0; taken < 6; ++taken) {
    Loader loader(set, augmentation(), {.workers = 4, .prefetch = 4});
    loader.start(in_order(200), 8, 0);
    for (int i = 0; i < taken; ++i) loader.next();
  }
  {
    const Loader never_started(set, augmentation(), {.workers = 4});
  }
  Loader loader(set, augmentation(), {.workers = 4});
  EXPECT_FALSE(loader.next().has_value());
  for (int round = 0; round < 5; ++round) {
    loader.start(in_order(200), 8, round);
    EXPECT_EQ(loader.next()->epoch, round);
  }
  loader.start({}, 8, 0);
  EXPECT_FALSE(loader.next().has_value());
}

TEST(Loader, RefusesWhatMakesNoSense) {
  EXPECT_THROW(Loader({}, augmentation(), {}), Error);
  EXPECT_THROW(Loader(made_up(3), augmentation(), {.workers = -1}), Error);
  Loader loader(made_up(3), augmentation(), {.workers = 1});
  EXPECT_THROW(loader.start({{3, 0}}, 1, 0), Error);
  EXPECT_THROW(loader.start(in_order(3), 0, 0), Error);
  EXPECT_EQ(parse_on_bad_image("fatal"), OnBadImage::kFatal);
  EXPECT_THROW(parse_on_bad_image("ignore"), Error);
}

TEST(Mixup, TargetsSumToOneAndSayWhatIsInTheImage) {
  const Mixup mixup({.classes = 7, .seed = 3});
  const torch::Tensor labels = torch::tensor({0, 1, 2, 3, 4, 5}, torch::kInt64);
  int cut = 0;
  for (std::int64_t number = 0; number < 400; ++number) {
    const Mix mix = mixup.draw(12, 10, 1, number);
    cut += mix.cutmix ? 1 : 0;
    // Image i holds i everywhere, so that its mean tells the shares.
    torch::Tensor images = torch::arange(6, torch::kFloat32).view({6, 1, 1, 1}).expand({6, 3, 12, 10}).clone();
    const torch::Tensor targets = mixup.apply(images, labels, 1, number);
    EXPECT_TRUE(torch::allclose(targets.sum(1), torch::ones(6)));
    for (std::int64_t i = 0; i < 6; ++i) {
      const double expected = static_cast<double>(i) * mix.lambda + static_cast<double>(5 - i) * (1 - mix.lambda);
      EXPECT_NEAR(images[i].mean().item<double>(), expected, 1e-4);
      EXPECT_NEAR(targets[i][i].item<double>(), 0.9 * mix.lambda + 0.1 / 7, 1e-5);
      EXPECT_NEAR(targets[i][5 - i].item<double>(), 0.9 * (1 - mix.lambda) + 0.1 / 7, 1e-5);
    }
  }
  EXPECT_NEAR(cut, 200, 40);
}

TEST(Mixup, CoefficientsAreDistributedAsTimms) {
  const Mixup mixup({.classes = 7, .seed = 3});
  double lambda = 0;
  for (std::int64_t number = 0; number < 20000; ++number) lambda += mixup.draw(12, 10, 1, number).lambda;
  EXPECT_NEAR(lambda / 20000, 0.604, 0.008);  // above one half: boxes are cut off at the border
}

TEST(Mixup, CutMixTakesTheBoxFromThePartner) {
  const Mixup mixup({.mixup = 0, .classes = 2});
  torch::Tensor images = torch::rand({4, 3, 8, 8});
  const torch::Tensor before = images.clone();
  const Mix mix = {.lambda = 1 - 6.0 / 64, .cutmix = true, .box = {5, 1, 3, 2}};
  mixup.apply(images, torch::tensor({0, 1, 0, 1}, torch::kInt64), mix);
  using torch::indexing::Slice;
  const auto inside = [](const torch::Tensor& t) { return t.index({Slice(), Slice(), Slice(1, 3), Slice(5, 8)}); };
  EXPECT_TRUE(torch::equal(inside(images), inside(before).flip(0)));
  inside(images).copy_(inside(before));
  EXPECT_TRUE(torch::equal(images, before));
}

TEST(Mixup, DependsOnSeedEpochAndNumberOnly) {
  const Mixup one({.classes = 2, .seed = 1});
  const Mixup two({.classes = 2, .seed = 2});
  EXPECT_EQ(one.draw(8, 8, 3, 4).lambda, one.draw(8, 8, 3, 4).lambda);
  EXPECT_NE(one.draw(8, 8, 3, 4).lambda, one.draw(8, 8, 3, 5).lambda);
  EXPECT_NE(one.draw(8, 8, 3, 4).lambda, two.draw(8, 8, 3, 4).lambda);
  EXPECT_EQ(Mixup({.probability = 0, .classes = 2}).draw(8, 8, 0, 0).lambda, 1);
  EXPECT_FALSE(Mixup({.mixup = 0, .cutmix = 0, .classes = 2}).active());
  EXPECT_THROW(Mixup({.classes = 0}), Error);
  EXPECT_THROW(Mixup({.mixup = -1, .classes = 2}), Error);
}

TEST(SoftTargets, SmoothTheLabel) {
  const torch::Tensor targets = soft_targets(torch::tensor({1, 0}, torch::kInt64), 4, 0.2);
  EXPECT_TRUE(torch::allclose(targets, torch::tensor({{0.05, 0.85, 0.05, 0.05}, {0.85, 0.05, 0.05, 0.05}})));
}

}  // namespace
}  // namespace violin::data
