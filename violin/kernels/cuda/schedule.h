// How the queries' side is cut for dQ and the gain's gradient: units of (group, head, two query tiles), each with
// items_per_unit items of four images, of two where heads have two parts; a cluster of two blocks, one per query tile,
// takes some of them. Most clusters take `share` items of one unit, the same images as others do in the units of the
// same head, which then find K and V in L2. What is left of the units, `rest` items of each, is cut into equal ranges
// for the other clusters.
//
// The sums of a unit go to their place from the cluster that takes the unit's first item; every other cluster that has
// items of the unit leaves its sums in a strip of its own. A cluster has one strip: of the units it takes items of, it
// starts inside the first at most.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define VIOLIN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define VIOLIN_HOST_DEVICE inline
#endif

namespace violin::kernels::cuda {

struct Schedule {
  int clusters = 0;
  int share = 0;
  int parts = 0;  // of a unit that have a cluster each
  int rest = 0;
  int units = 0;
};

inline Schedule make_schedule(std::int64_t units, std::int64_t items_per_unit, std::int64_t most_clusters) {
  Schedule x;
  const std::int64_t items = units * items_per_unit;
  const std::int64_t clusters = std::min(items, most_clusters);
  const std::int64_t share = (items + clusters - 1) / clusters;
  x.units = static_cast<int>(units);
  x.share = static_cast<int>(share);
  x.parts = static_cast<int>(items_per_unit / share);
  x.rest = static_cast<int>(items_per_unit % share);
  // No range is empty: who is said to have left a strip has done so.
  x.clusters = static_cast<int>(std::min(clusters, units * (x.parts + x.rest)));
  return x;
}

// Clusters with a part of one unit come first.
VIOLIN_HOST_DEVICE int owners(const Schedule& x) {
  return x.units * x.parts;
}
// The first item of the rests, all in a row, that a cluster beyond the owners takes.
VIOLIN_HOST_DEVICE std::int64_t first_of_rest(const Schedule& x, int cluster) {
  return static_cast<std::int64_t>(x.units) * x.rest * (cluster - owners(x)) / (x.clusters - owners(x));
}
VIOLIN_HOST_DEVICE int count_items(const Schedule& x, int cluster) {
  if (cluster < owners(x)) return x.share;
  return static_cast<int>(first_of_rest(x, cluster + 1) - first_of_rest(x, cluster));
}

struct Item {
  int unit;
  int number;  // in the unit
  bool first;  // of those that add to the same sums
  bool strip;  // sums go to the cluster's strip
};
// What a cluster does n-th.
VIOLIN_HOST_DEVICE Item item_of(const Schedule& x, int cluster, int n) {
  Item item;
  if (cluster < owners(x)) {
    item.unit = cluster / x.parts;
    item.number = x.rest + cluster % x.parts * x.share + n;
    item.first = n == 0;
    item.strip = item.number - n > 0;
    return item;
  }
  // Items of the unit that the range starts in come last: all clusters then walk over the images in the same direction
  // at about the same time.
  const int first = static_cast<int>(first_of_rest(x, cluster));
  const int count = count_items(x, cluster);
  const int inside = (x.rest - first % x.rest) % x.rest;
  const int at = first + (n + (inside < count ? inside : 0)) % count;
  item.unit = at / x.rest;
  item.number = at % x.rest;
  item.first = at == first || item.number == 0;
  item.strip = first % x.rest != 0 && item.unit == first / x.rest;
  return item;
}

// The clusters that leave strips for a unit, in the order in which they are added: n-th of count().
struct Strips {
  int first_owner, owners, first_sharer, sharers;

  VIOLIN_HOST_DEVICE int count() const { return owners + sharers; }
  VIOLIN_HOST_DEVICE int cluster(int n) const { return n < owners ? first_owner + n : first_sharer + n - owners; }
};
VIOLIN_HOST_DEVICE Strips strips_of(const Schedule& x, int unit) {
  Strips strips;
  const int skipped = x.rest == 0 ? 1 : 0;  // the cluster that takes the unit's first item
  strips.first_owner = unit * x.parts + skipped;
  strips.owners = x.parts - skipped;
  strips.first_sharer = x.clusters;
  strips.sharers = 0;
  if (x.rest == 0) return strips;
  const std::int64_t begin = static_cast<std::int64_t>(unit) * x.rest;
  int cluster = owners(x) + static_cast<int>(begin * (x.clusters - owners(x)) / (std::int64_t{x.units} * x.rest));
  while (cluster < x.clusters && first_of_rest(x, cluster) <= begin) ++cluster;
  strips.first_sharer = cluster;
  while (cluster < x.clusters && first_of_rest(x, cluster) < begin + x.rest) ++cluster;
  strips.sharers = cluster - strips.first_sharer;
  return strips;
}

// Where the strips are: those of clusters that leave none take no memory, where that is easy to tell.
inline std::int64_t count_strips(const Schedule& x) {
  if (x.parts == 0 && x.rest == 1) return 0;  // nobody shares a unit of one item
  return x.rest == 0 ? owners(x) - x.units : x.clusters;
}
VIOLIN_HOST_DEVICE int strip_of(const Schedule& x, int cluster) {
  return x.rest == 0 ? cluster - cluster / x.parts - 1 : cluster;
}

}  // namespace violin::kernels::cuda
