#include "violin/train/device_feed.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace violin::train {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

DeviceFeed::DeviceFeed(data::Loader& loader, c10::Device device) : loader_(loader), device_(device) {
  if (!device.is_cpu()) side_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, false);
}

void DeviceFeed::restart() {
  ahead_.reset();
  primed_ = false;
}

std::optional<DeviceFeed::Copied> DeviceFeed::fetch() {
  std::optional<data::Batch> batch = loader_.next();
  if (!batch) return std::nullopt;
  Copied copied;
  const c10::StreamGuard guard(*side_);
  // Torch does not give page-locked memory to anybody else before the copy out of it is done.
  batch->images = batch->images.to(device_, /*non_blocking=*/true);
  batch->labels = batch->labels.pin_memory().to(device_, /*non_blocking=*/true);
  copied.ready = std::make_unique<c10::Event>(device_.type());
  copied.ready->record(*side_);
  copied.batch = std::move(*batch);
  return copied;
}

std::optional<data::Batch> DeviceFeed::next() {
  if (!side_) return loader_.next();
  if (!primed_) ahead_ = fetch();
  primed_ = true;
  if (!ahead_) return std::nullopt;
  Copied copied = std::move(*ahead_);
  const c10::Stream stream = current_stream(device_);
  copied.ready->block(stream);
  // The memory belongs to the side stream; it is not given to another batch before this one's work is done.
  copied.batch.images.record_stream(stream);
  copied.batch.labels.record_stream(stream);
  ahead_ = fetch();
  return std::move(copied.batch);
}

}  // namespace violin::train
