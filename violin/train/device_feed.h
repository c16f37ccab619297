// Batches on the device that trains: while one is worked on, the next one is copied over on a stream of its own.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "violin/data/loader.h"

namespace violin::train {

class DeviceFeed {
 public:
  DeviceFeed(data::Loader& loader, c10::Device device);

  // After the loader was started.
  void restart();
  // The loader's next batch with its tensors on the device; nothing at the end of the epoch.
  std::optional<data::Batch> next();

 private:
  struct Copied {
    data::Batch batch;
    std::unique_ptr<c10::Event> ready;
  };
  std::optional<Copied> fetch();

  data::Loader& loader_;
  c10::Device device_;
  std::optional<c10::Stream> side_;
  std::optional<Copied> ahead_;
  bool primed_ = false;
};

}  // namespace violin::train
