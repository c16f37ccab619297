#include "violin/curves/rank_cache.h"

#include <utility>

namespace violin::curves {
namespace {

std::size_t size_of(const Ranks& ranks) {
  return ranks.size() * sizeof(Ranks::value_type);
}

}  // namespace

std::shared_ptr<const Ranks> RankCache::find(const Key& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->ranks;
}

void RankCache::forget_oldest() {
  bytes_ -= size_of(*entries_.back().ranks);
  index_.erase(entries_.back().key);
  entries_.pop_back();
}

std::shared_ptr<const Ranks> RankCache::get(const Curve& curve, const Grid& grid,
                                            const std::function<Ranks()>& compute) {
  const Key key = {curve.kind,  curve.transposed, curve.per_frame, curve.kind == Kind::kRandom ? curve.seed : 0,
                   grid.frames, grid.height,      grid.width};
  {
    const std::lock_guard lock(mutex_);
    if (auto ranks = find(key)) return ranks;
  }
  auto computed = std::make_shared<const Ranks>(compute());
  const std::lock_guard lock(mutex_);
  if (auto ranks = find(key)) return ranks;
  const std::size_t size = size_of(*computed);
  if (size > limit_bytes_) return computed;
  while (bytes_ + size > limit_bytes_) forget_oldest();
  entries_.push_front({key, computed});
  index_.emplace(key, entries_.begin());
  bytes_ += size;
  return computed;
}

std::size_t RankCache::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace violin::curves
