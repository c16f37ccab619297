#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "tests/curves/helpers.h"
#include "violin/curves/rank_cache.h"

namespace violin::curves {
namespace {

const Grid kPlane = {0, 2, 5};  // 40 bytes of ranks

std::shared_ptr<const Ranks> put(RankCache& cache, std::uint64_t seed, int& computed) {
  return cache.get({.kind = Kind::kRandom, .seed = seed}, kPlane, [&] {
    ++computed;
    return Ranks(10, static_cast<std::int32_t>(seed));
  });
}

TEST(RankCache, ComputesOnce) {
  RankCache cache(1000);
  int computed = 0;
  const auto first = put(cache, 1, computed);
  EXPECT_EQ(put(cache, 1, computed).get(), first.get());
  EXPECT_EQ(computed, 1);
  EXPECT_EQ(cache.bytes(), 40U);
}

TEST(RankCache, ForgetsWhatWasUsedLeastRecently) {
  RankCache cache(100);
  int computed = 0;
  const auto first = put(cache, 1, computed);
  put(cache, 2, computed);
  put(cache, 1, computed);
  put(cache, 3, computed);
  EXPECT_EQ(cache.bytes(), 80U);
  EXPECT_EQ(computed, 3);
  EXPECT_EQ(put(cache, 1, computed).get(), first.get()) << "was used after 2";
  EXPECT_EQ(computed, 3);
  put(cache, 2, computed);
  EXPECT_EQ(computed, 4) << "2 had been forgotten";
}

TEST(RankCache, WhatIsForgottenStaysAliveWhereItIsHeld) {
  RankCache cache(40);
  int computed = 0;
  const auto first = put(cache, 1, computed);
  put(cache, 2, computed);
  EXPECT_EQ(*first, Ranks(10, 1));
  EXPECT_EQ(cache.bytes(), 40U);
}

TEST(RankCache, DoesNotKeepWhatIsLargerThanItself) {
  RankCache cache(39);
  int computed = 0;
  EXPECT_EQ(*put(cache, 1, computed), Ranks(10, 1));
  EXPECT_EQ(cache.bytes(), 0U);
}

TEST(RankCache, AFailedComputationLeavesNothingBehind) {
  RankCache cache(1000);
  EXPECT_THROW(cache.get({}, kPlane, []() -> Ranks { throw Error("no"); }), Error);
  EXPECT_EQ(*cache.get({}, kPlane, [] { return Ranks{4}; }), Ranks{4});
}

TEST(RankCache, ThreadsThatAskAtOnceReceiveTheSameRanks) {
  RankCache cache(1000);
  constexpr std::size_t kThreads = 8;
  std::barrier all_computing(kThreads);  // every thread has missed before any has finished
  std::vector<std::shared_ptr<const Ranks>> found(kThreads);
  {
    std::vector<std::jthread> threads;
    threads.reserve(kThreads);
    for (std::size_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        found[i] = cache.get({}, kPlane, [&] {
          all_computing.arrive_and_wait();
          return Ranks{1, 2, 3};
        });
      });
    }
  }
  for (const auto& ranks : found) EXPECT_EQ(ranks.get(), found.front().get());
  EXPECT_EQ(cache.bytes(), 12U);
}

TEST(CachedRanks, AreTheSameObjectEachTime) {
  const Grid grid = {0, 31, 17};
  for (const Curve& curve : parse_curves("violin,frame:hilbert,random:9")) {
    EXPECT_EQ(ranks(curve, grid).get(), ranks(curve, grid).get()) << curve.name();
  }
  EXPECT_EQ(ranks(parse_curve("frame:hilbert"), {3, 5, 5}).get(), ranks(parse_curve("frame:hilbert"), {3, 5, 5}).get());
}

TEST(CachedRanks, DifferWithSeedGridAndCurve) {
  const Grid grid = {0, 4, 6};
  EXPECT_NE(*ranks(parse_curve("random:1"), grid), *ranks(parse_curve("random:2"), grid));
  EXPECT_NE(*ranks(parse_curve("snake"), grid), *ranks(parse_curve("snake_T"), grid));
  EXPECT_NE(*ranks(parse_curve("snake"), grid), *ranks(parse_curve("snake"), {0, 6, 4}));
  EXPECT_NE(*ranks(parse_curve("snake"), {2, 2, 6}), *ranks(parse_curve("frame:snake"), {2, 2, 6}));
}

TEST(CachedRanks, AreRightFromManyThreadsAtOnce) {
  const auto curves = parse_curves("violin,z,random:4");
  std::vector<Ranks> expected;
  expected.reserve(curves.size());
  for (const Curve& curve : curves) expected.push_back(*ranks(curve, {0, 61, 47}));
  constexpr int kThreads = 8;
  std::vector<int> wrong(kThreads, 0);
  {
    std::vector<std::jthread> threads;
    threads.reserve(kThreads);
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < 50; ++round) {
          for (std::size_t c = 0; c < curves.size(); ++c) {
            if (*ranks(curves[c], {0, 61, 47}) != expected[c]) ++wrong[static_cast<std::size_t>(i)];
            if (!is_permutation(*ranks(curves[c], {0, 60, 10 + round}))) ++wrong[static_cast<std::size_t>(i)];
          }
        }
      });
    }
  }
  EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
}

}  // namespace
}  // namespace violin::curves
