// Batches are opened by the caller's thread (which alone touches torch), filled image by image by the workers, and
// handed out in order. A batch is a slot with a buffer; workers take places of the oldest slot that has some left.

#include "violin/data/loader.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "violin/error.h"

namespace violin::data {
namespace {

constexpr int kReplacementTries = 100;

// Decoded images, up to a number of bytes; the first ones stay.
class Cache {
 public:
  Cache(std::int64_t images, std::int64_t limit) : limit_(limit) {
    if (limit > 0) images_.resize(static_cast<std::size_t>(images));
  }

  std::shared_ptr<const Image> find(std::int64_t index) const {
    if (images_.empty()) return nullptr;
    const std::lock_guard lock(mutex_);
    return images_[static_cast<std::size_t>(index)];
  }

  void keep(std::int64_t index, std::shared_ptr<const Image> image) {
    if (images_.empty()) return;
    const std::int64_t bytes = std::ssize(image->pixels);
    const std::lock_guard lock(mutex_);
    std::shared_ptr<const Image>& place = images_[static_cast<std::size_t>(index)];
    if (place != nullptr || used_ + bytes > limit_) return;
    place = std::move(image);
    used_ += bytes;
  }

  std::int64_t used() const {
    const std::lock_guard lock(mutex_);
    return used_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Image>> images_;
  std::int64_t limit_;
  std::int64_t used_ = 0;
};

// One batch in the making. Places are written by one worker each; the counters belong to the loader's mutex.
struct Slot {
  std::int64_t number = 0;
  std::vector<Pick> picks;
  torch::Tensor images;
  float* pixels = nullptr;
  std::vector<std::int64_t> indices, labels;
  std::vector<std::uint8_t> filled;
  std::int64_t taken = 0;
  std::int64_t done = 0;
  std::int64_t error_at = -1;
  std::exception_ptr error;  // of the first place that failed

  std::int64_t size() const { return std::ssize(picks); }
};

}  // namespace

class Loader::State {
 public:
  State(SampleSet samples, std::shared_ptr<const Transform> steps, const LoaderOptions& choices)
      : set(std::move(samples)), transform(std::move(steps)), options(choices), cache(set.size(), choices.cache_bytes) {
    if (set.empty()) throw Error("there are no images to load");
    if (options.workers < 0 || options.workers > 1024) {
      throw Error("workers " + std::to_string(options.workers) + " must be 0 to 1024");
    }
    options.prefetch = std::max<std::int64_t>(options.prefetch, 1);
    try {
      for (int i = 0; i < options.workers; ++i) workers.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      end_workers();
      throw Error("cannot start " + std::to_string(options.workers) + " workers: " + error.what() + "; choose fewer");
    }
  }

  State(const State&) = delete;
  State& operator=(const State&) = delete;

  ~State() { end_workers(); }

  void start(std::vector<Pick> order, std::int64_t size, std::int64_t new_epoch, std::int64_t first) {
    if (size < 1) throw Error("batch size " + std::to_string(size) + " must be at least 1");
    for (const Pick& pick : order) {
      if (pick.index < 0 || pick.index >= set.size()) {
        throw Error("image " + std::to_string(pick.index) + " of a set of " + std::to_string(set.size()));
      }
    }
    drop_epoch();
    picks = std::move(order);
    batch_size = std::min(size, std::max<std::int64_t>(std::ssize(picks), 1));  // no number is too large to count with
    epoch = new_epoch;
    next_number = std::max<std::int64_t>(first, 0);
    fill_queue();
  }

  std::optional<Batch> next() {
    for (;;) {
      const std::shared_ptr<Slot> slot = finished();
      if (slot == nullptr) return std::nullopt;
      if (slot->error) {
        drop_epoch();
        next_number = batches();
        std::rethrow_exception(slot->error);
      }
      fill_queue();
      if (std::optional<Batch> batch = packed(*slot)) return batch;
    }
  }

  std::int64_t batches() const { return (std::ssize(picks) + batch_size - 1) / batch_size; }

  std::vector<BadImage> bad_images() const {
    const std::lock_guard lock(bad_mutex);
    std::vector<BadImage> list;
    for (const auto& [index, message] : bad) list.push_back({set[index].name(), message, index});
    return list;
  }

  const SampleSet set;
  const std::shared_ptr<const Transform> transform;
  LoaderOptions options;
  Cache cache;

 private:
  void end_workers() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
      cancelled = true;
    }
    work_left.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  // The buffer of a batch that the caller has dropped is used again: fresh memory of this size is slow. Page-locked
  // memory is kept by torch itself, which knows when a copy to the GPU has ended.
  torch::Tensor buffer(std::int64_t count) {
    const std::vector<std::int64_t> shape = {count, 3, transform->size().height, transform->size().width};
    if (options.pin) return torch::empty(shape, torch::TensorOptions().pinned_memory(true));
    for (const torch::Tensor& candidate : buffers) {
      if (candidate.use_count() == 1 && candidate.storage().use_count() == 1 && candidate.size(0) == count) {
        return candidate;
      }
    }
    std::erase_if(buffers, [](const torch::Tensor& unused) { return unused.use_count() == 1; });
    return buffers.emplace_back(torch::empty(shape));
  }

  void fill_queue() {
    while (std::ssize(queue) < options.prefetch && next_number < batches()) {
      auto slot = std::make_shared<Slot>();
      slot->number = next_number++;
      const std::int64_t begin = slot->number * batch_size;
      const std::int64_t end = std::min(begin + batch_size, std::ssize(picks));
      slot->picks.assign(picks.begin() + begin, picks.begin() + end);
      slot->images = buffer(end - begin);
      slot->pixels = slot->images.data_ptr<float>();
      slot->indices.resize(slot->picks.size());
      slot->labels.resize(slot->picks.size());
      slot->filled.assign(slot->picks.size(), 0);
      {
        const std::lock_guard lock(mutex);
        queue.push_back(std::move(slot));
      }
      work_left.notify_all();
    }
  }

  // Takes the oldest slot out of the queue once it is complete; null at the end of the epoch.
  std::shared_ptr<Slot> finished() {
    std::unique_lock lock(mutex);
    if (queue.empty()) return nullptr;
    const std::shared_ptr<Slot> slot = queue.front();
    if (workers.empty()) {
      lock.unlock();
      for (std::int64_t place = 0; place < slot->size(); ++place) {
        try {
          fill(*slot, place);
        } catch (...) {
          slot->error = std::current_exception();
          break;
        }
      }
      lock.lock();
    } else {
      slot_done.wait(lock, [&] { return slot->done == slot->size(); });
    }
    queue.pop_front();
    return slot;
  }

  void drop_epoch() {
    std::unique_lock lock(mutex);
    cancelled = true;
    slot_done.wait(lock, [&] { return busy == 0; });
    queue.clear();
    cancelled = false;
  }

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      std::shared_ptr<Slot> slot;
      work_left.wait(lock, [&] { return stop || (!cancelled && (slot = slot_with_work()) != nullptr); });
      if (stop) return;
      // Several at once where images are small and many, so that workers seldom meet at the mutex.
      const std::int64_t chunk = std::clamp<std::int64_t>(slot->size() / (8 * std::ssize(workers)), 1, 16);
      const std::int64_t begin = slot->taken;
      const std::int64_t end = std::min(begin + chunk, slot->size());
      slot->taken = end;
      ++busy;
      lock.unlock();
      std::exception_ptr error;
      std::int64_t place = begin;
      try {
        for (; place < end && !cancelled; ++place) fill(*slot, place);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      --busy;
      if (error && (slot->error_at < 0 || place < slot->error_at)) {
        slot->error = error;
        slot->error_at = place;
      }
      slot->done += end - begin;
      if (slot->done == slot->size() || cancelled) slot_done.notify_all();
    }
  }

  std::shared_ptr<Slot> slot_with_work() const {
    for (const std::shared_ptr<Slot>& slot : queue) {
      if (slot->taken < slot->size()) return slot;
    }
    return nullptr;
  }

  // Null for an image that cannot be decoded, where those are skipped.
  std::shared_ptr<const Image> decoded(std::int64_t index) {
    if (auto image = cache.find(index)) return image;
    if (options.on_bad_image == OnBadImage::kSkip) {
      const std::lock_guard lock(bad_mutex);
      if (bad.contains(index)) return nullptr;
    }
    try {
      auto image = std::make_shared<const Image>(set.decode(index));
      cache.keep(index, image);
      return image;
    } catch (const Error& error) {
      if (options.on_bad_image == OnBadImage::kFatal) throw;
      const std::lock_guard lock(bad_mutex);
      bad.emplace(index, error.what());
      return nullptr;
    }
  }

  void fill(Slot& slot, std::int64_t place) {
    const Pick& pick = slot.picks[static_cast<std::size_t>(place)];
    std::int64_t index = pick.index;
    try {
      std::shared_ptr<const Image> image = decoded(index);
      if (image == nullptr) {
        if (!options.replace_bad) return;
        Random other(options.seed, Purpose::kReplace, {epoch, pick.index, pick.repeat});
        for (int i = 0; image == nullptr && i < kReplacementTries; ++i) {
          index = other.below(set.size());
          image = decoded(index);
        }
        if (image == nullptr) throw Error("cannot be decoded, nor can the images drawn in its place");
      }
      Random random(options.seed, Purpose::kAugment, {epoch, pick.index, pick.repeat});
      transform->apply(*image, random, slot.pixels + place * 3 * transform->size().area());
    } catch (const std::exception& error) {
      const std::string name = set[index].name();
      const std::string message = error.what();
      throw Error(message.find(name) != std::string::npos ? message : "'" + name + "': " + message);
    }
    slot.indices[static_cast<std::size_t>(place)] = index;
    slot.labels[static_cast<std::size_t>(place)] = set[index].label;
    slot.filled[static_cast<std::size_t>(place)] = 1;
  }

  // Without the places that were skipped; nothing when all were.
  std::optional<Batch> packed(const Slot& slot) const {
    std::vector<std::int64_t> kept;
    for (std::int64_t place = 0; place < slot.size(); ++place) {
      if (slot.filled[static_cast<std::size_t>(place)] != 0) kept.push_back(place);
    }
    if (kept.empty()) return std::nullopt;
    Batch batch;
    batch.images = slot.images;
    batch.labels = torch::tensor(slot.labels, torch::kInt64);
    batch.indices = torch::tensor(slot.indices, torch::kInt64);
    batch.epoch = epoch;
    batch.number = slot.number;
    if (std::ssize(kept) < slot.size()) {
      const torch::Tensor places = torch::tensor(kept, torch::kInt64);
      batch.images = batch.images.index_select(0, places);
      if (options.pin) batch.images = batch.images.pin_memory();
      batch.labels = batch.labels.index_select(0, places);
      batch.indices = batch.indices.index_select(0, places);
    }
    return batch;
  }

  // Of the caller's thread; workers read epoch, which changes only while none is busy.
  std::vector<Pick> picks;
  std::int64_t batch_size = 1;
  std::int64_t epoch = 0;
  std::int64_t next_number = 0;
  std::vector<torch::Tensor> buffers;

  mutable std::mutex bad_mutex;
  std::map<std::int64_t, std::string> bad;

  std::mutex mutex;
  std::condition_variable work_left, slot_done;
  std::deque<std::shared_ptr<Slot>> queue;
  std::int64_t busy = 0;
  bool stop = false;
  std::atomic<bool> cancelled = false;
  std::vector<std::thread> workers;
};

std::string_view on_bad_image_name(OnBadImage policy) {
  return policy == OnBadImage::kSkip ? "skip" : "fatal";
}

OnBadImage parse_on_bad_image(std::string_view name) {
  if (name == "skip") return OnBadImage::kSkip;
  if (name == "fatal") return OnBadImage::kFatal;
  throw Error("unknown policy '" + std::string(name) + "' for bad images: choose skip or fatal");
}

Loader::Loader(SampleSet set, std::shared_ptr<const Transform> transform, const LoaderOptions& options)
    : state_(std::make_unique<State>(std::move(set), std::move(transform), options)) {}

Loader::~Loader() = default;

void Loader::start(std::vector<Pick> picks, std::int64_t batch_size, std::int64_t epoch, std::int64_t first_batch) {
  state_->start(std::move(picks), batch_size, epoch, first_batch);
}

std::optional<Batch> Loader::next() {
  return state_->next();
}

std::int64_t Loader::batches() const {
  return state_->batches();
}

const SampleSet& Loader::set() const {
  return state_->set;
}

std::vector<BadImage> Loader::bad_images() const {
  return state_->bad_images();
}

std::int64_t Loader::cached_bytes() const {
  return state_->cache.used();
}

std::vector<Pick> in_order(std::int64_t size) {
  std::vector<Pick> picks(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) picks[static_cast<std::size_t>(i)].index = i;
  return picks;
}

}  // namespace violin::data
