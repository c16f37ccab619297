// The schedule of dQ and the table's gradient on Hopper: every item once, every sum complete, every strip written.
#include "violin/kernels/cuda/schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

namespace violin::kernels::cuda {
namespace {

void expect_complete(int units, int items_per_unit, int most_clusters) {
  const Schedule x = make_schedule(units, items_per_unit, most_clusters);
  SCOPED_TRACE(testing::Message() << units << " units of " << items_per_unit << " items for " << most_clusters);
  ASSERT_GE(x.clusters, 1);
  ASSERT_LE(x.clusters, most_clusters);
  std::vector<int> taken(static_cast<std::size_t>(units) * items_per_unit);
  std::map<int, int> writers;           // of a unit's own sums
  std::map<int, std::set<int>> strips;  // clusters that leave one for a unit
  int most = 0;
  for (int cluster = 0; cluster < x.clusters; ++cluster) {
    const int count = count_items(x, cluster);
    EXPECT_GE(count, 1);
    most = std::max(most, count);
    int strip_for = -1;
    std::set<int> begun;
    for (int n = 0; n < count; ++n) {
      const Item item = item_of(x, cluster, n);
      ASSERT_TRUE(item.unit >= 0 && item.unit < units && item.number >= 0 && item.number < items_per_unit);
      ++taken[static_cast<std::size_t>(item.unit) * items_per_unit + item.number];
      // Whoever comes first writes, and the others add.
      EXPECT_EQ(item.first, begun.insert(item.unit).second);
      if (item.strip) {
        EXPECT_TRUE(strip_for < 0 || strip_for == item.unit) << "cluster " << cluster << " needs two strips";
        strip_for = item.unit;
        strips[item.unit].insert(cluster);
      } else if (item.first) {
        ++writers[item.unit];
      }
    }
  }
  for (const int times : taken) ASSERT_EQ(times, 1);
  EXPECT_LE(most, x.share);
  std::set<std::int64_t> places;
  for (int unit = 0; unit < units; ++unit) {
    EXPECT_EQ(writers[unit], 1);
    const Strips left = strips_of(x, unit);
    std::set<int> said;
    for (int n = 0; n < left.count(); ++n) said.insert(left.cluster(n));
    EXPECT_EQ(static_cast<int>(said.size()), left.count());
    EXPECT_EQ(said, strips[unit]) << "unit " << unit;
    for (const int cluster : said) {
      const std::int64_t place = strip_of(x, cluster);
      EXPECT_TRUE(place >= 0 && place < count_strips(x) && places.insert(place).second) << "cluster " << cluster;
    }
  }
}

TEST(Schedule, CoversEverythingOnce) {
  for (const int most : {1, 2, 3, 16, 39, 57, 66, 72})
    for (int units = 1; units <= 60; ++units)
      for (int items = 1; items <= 70; ++items) {
        expect_complete(units, items, most);
        if (HasFatalFailure() || HasNonfatalFailure()) return;
      }
}

TEST(Schedule, LargeShapes) {
  expect_complete(384, 1, 66);  // 4 images of 4096 tokens and 12 heads
  expect_complete(48, 16, 66);  // 64 images of 1024 tokens and 6 heads
  expect_complete(24, 32, 66);  // 128 images, 3 heads
  expect_complete(6, 23, 66);   // 92 images of 197 tokens, 3 heads: more clusters than work for them
  expect_complete(1, 100000, 66);
  expect_complete(100000, 1, 66);
}

}  // namespace
}  // namespace violin::kernels::cuda
