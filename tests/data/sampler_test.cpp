#include "violin/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "violin/data/random.h"
#include "violin/error.h"

namespace violin::data {
namespace {

std::vector<std::int64_t> indices(const std::vector<Pick>& picks) {
  std::vector<std::int64_t> result;
  result.reserve(picks.size());
  for (const Pick& pick : picks) result.push_back(pick.index);
  return result;
}

TEST(Random, FollowsFromItsKeyAlone) {
  Random a(1, Purpose::kAugment, {2, 3});
  Random b(1, Purpose::kAugment, {2, 3});
  EXPECT_EQ(a.bits(), b.bits());
  std::set<std::uint64_t> first;
  for (std::int64_t epoch = 0; epoch < 30; ++epoch) {
    for (std::int64_t index = 0; index < 30; ++index) {
      first.insert(Random(1, Purpose::kAugment, {epoch, index}).bits());
      first.insert(Random(1, Purpose::kMix, {epoch, index}).bits());
    }
  }
  EXPECT_EQ(first.size(), 1800u);
}

TEST(Random, DistributionsHaveTheirMoments) {
  Random random(4, Purpose::kAugment);
  constexpr int kDraws = 200000;
  double normal = 0, normal2 = 0, beta = 0, beta2 = 0, one = 0;
  std::array<int, 7> counts = {};
  for (int i = 0; i < kDraws; ++i) {
    const double n = random.normal();
    normal += n;
    normal2 += n * n;
    const double b = random.beta(0.8, 0.8);
    ASSERT_GE(b, 0);
    ASSERT_LE(b, 1);
    beta += b;
    beta2 += b * b;
    one += random.beta(1, 1) < 0.25 ? 1 : 0;
    ++counts[static_cast<std::size_t>(random.below(7))];
  }
  EXPECT_NEAR(normal / kDraws, 0, 0.01);
  EXPECT_NEAR(normal2 / kDraws, 1, 0.02);
  EXPECT_NEAR(beta / kDraws, 0.5, 0.005);
  EXPECT_NEAR(beta2 / kDraws - 0.25, 0.25 / 2.6, 0.003);  // variance 1 / (4 (2a + 1))
  EXPECT_NEAR(one / kDraws, 0.25, 0.01);
  for (const int count : counts) EXPECT_NEAR(count, kDraws / 7.0, 1000);
}

TEST(Sampler, VisitsEveryImageOnceInADifferentOrderEachEpoch) {
  const Sampler sampler(103, {.seed = 5, .batch = 10, .drop_last = false});
  auto first = indices(sampler.epoch(0));
  auto second = indices(sampler.epoch(1));
  EXPECT_NE(first, second);
  EXPECT_EQ(first, indices(sampler.epoch(0)));
  EXPECT_EQ(sampler.batches(), 11);
  std::sort(first.begin(), first.end());
  for (std::int64_t i = 0; i < 103; ++i) EXPECT_EQ(first[static_cast<std::size_t>(i)], i);
  const Sampler plain(5, {.shuffle = false, .batch = 2, .drop_last = false});
  EXPECT_EQ(indices(plain.epoch(3)), (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(Sampler, DropsTheIncompleteBatch) {
  const Sampler sampler(103, {.batch = 10});
  EXPECT_EQ(sampler.epoch(0).size(), 100u);
  EXPECT_EQ(sampler.batches(), 10);
  EXPECT_THROW(Sampler(9, {.batch = 10}), Error);
  EXPECT_THROW(Sampler(19, {.batch = 10, .world = 2}), Error);
  EXPECT_THROW(Sampler(9, {.batch = 0}), Error);
  EXPECT_THROW(Sampler(9, {.batch = 1, .rank = 2, .world = 2}), Error);
  EXPECT_THROW(Sampler(0, {}), Error);
}

TEST(Sampler, CommonBatchesDoNotDependOnTheNumberOfProcesses) {
  for (const std::int64_t repeats : {1, 3}) {
    const Sampler alone(1000, {.seed = 2, .repeats = repeats, .batch = 24});
    const auto whole = alone.epoch(4);
    for (const std::int64_t world : {2, 3, 4}) {
      std::vector<std::vector<Pick>> parts;
      for (std::int64_t rank = 0; rank < world; ++rank) {
        parts.push_back(
            Sampler(1000, {.seed = 2, .repeats = repeats, .batch = 24 / world, .rank = rank, .world = world}).epoch(4));
        ASSERT_EQ(parts.back().size() * static_cast<std::size_t>(world), whole.size());
      }
      for (std::size_t batch = 0; batch < whole.size() / 24; ++batch) {
        std::set<std::pair<std::int64_t, std::int64_t>> expected, got;
        for (std::size_t i = batch * 24; i < (batch + 1) * 24; ++i) expected.emplace(whole[i].index, whole[i].repeat);
        const std::size_t share = 24 / static_cast<std::size_t>(world);
        for (const auto& part : parts) {
          for (std::size_t i = batch * share; i < (batch + 1) * share; ++i) got.emplace(part[i].index, part[i].repeat);
        }
        EXPECT_EQ(got, expected);
      }
    }
  }
}

TEST(Sampler, WithoutDroppingProcessesShareEveryImageOnce) {
  std::vector<std::int64_t> all;
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const Sampler sampler(100, {.batch = 8, .drop_last = false, .rank = rank, .world = 3});
    const auto own = indices(sampler.epoch(0));
    EXPECT_EQ(std::ssize(own), sampler.picks());
    all.insert(all.end(), own.begin(), own.end());
  }
  std::sort(all.begin(), all.end());
  for (std::int64_t i = 0; i < 100; ++i) EXPECT_EQ(all[static_cast<std::size_t>(i)], i);
}

// As DeiT: three visits of a third of the images, each by another process, 256 images counted at a time.
TEST(Sampler, RepeatsGoToDifferentProcesses) {
  const Sampler sampler(1000, {.seed = 1, .repeats = 3, .batch = 16, .rank = 1, .world = 3});
  EXPECT_EQ(sampler.global_epoch(0).size(), 1000u / 256 * 256 / 48 * 48);
  EXPECT_EQ(sampler.batches(), 16);
  const auto global = sampler.global_epoch(0);
  for (std::size_t i = 0; i < global.size(); ++i) {
    EXPECT_EQ(global[i].index, global[i / 3 * 3].index);
    EXPECT_EQ(global[i].repeat, static_cast<std::int64_t>(i % 3));
  }
  std::set<std::int64_t> own;
  for (const Pick& pick : sampler.epoch(0)) own.insert(pick.index);
  EXPECT_EQ(std::ssize(own), sampler.picks());
}

TEST(Sampler, BalancedDrawsEveryClassEquallyOften) {
  std::vector<std::int64_t> labels(1000, 0);
  for (std::size_t i = 900; i < 990; ++i) labels[i] = 1;
  for (std::size_t i = 990; i < 1000; ++i) labels[i] = 3;  // class 2 has no images
  const Sampler sampler(1000, {.seed = 1, .balanced = true, .batch = 10}, labels);
  std::map<std::int64_t, int> counts;
  std::map<std::int64_t, std::int64_t> visits;
  for (std::int64_t epoch = 0; epoch < 10; ++epoch) {
    visits.clear();
    for (const Pick& pick : sampler.epoch(epoch)) {
      ++counts[labels[static_cast<std::size_t>(pick.index)]];
      EXPECT_EQ(pick.repeat, visits[pick.index]++);
    }
  }
  EXPECT_EQ(counts.size(), 3u);
  for (const auto& [label, count] : counts) EXPECT_NEAR(count, 10000 / 3, 250);
  EXPECT_THROW(Sampler(1000, {.balanced = true, .batch = 10}), Error);
}

TEST(Sampler, RepeatsLeaveABatchWhereThereIsOne) {
  EXPECT_EQ(Sampler(314, {.repeats = 3, .batch = 300}).batches(), 1);
  EXPECT_EQ(Sampler(314, {.repeats = 3, .batch = 100}).batches(), 2);  // of 256
}

}  // namespace
}  // namespace violin::data
