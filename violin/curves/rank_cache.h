// Ranks that were asked for lately, bounded in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "violin/curves/curves.h"

namespace violin::curves {

// Safe to use from any thread. The cache forgets what was used least recently; whoever holds ranks keeps them alive.
class RankCache {
 public:
  explicit RankCache(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // The ranks kept for this curve on this grid, else those that `compute` returns. It runs outside of the lock: threads
  // that ask at the same time may compute the same ranks, and all of them receive those that were finished first.
  std::shared_ptr<const Ranks> get(const Curve& curve, const Grid& grid, const std::function<Ranks()>& compute);

  std::size_t bytes() const;

 private:
  using Key = std::tuple<Kind, bool, bool, std::uint64_t, std::int64_t, std::int64_t, std::int64_t>;
  struct Entry {
    Key key;
    std::shared_ptr<const Ranks> ranks;
  };

  std::shared_ptr<const Ranks> find(const Key& key);  // and make it the most recent; with the lock held
  void forget_oldest();

  const std::size_t limit_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // most recent first
  std::map<Key, std::list<Entry>::iterator> index_;
  std::size_t bytes_ = 0;
};

}  // namespace violin::curves
