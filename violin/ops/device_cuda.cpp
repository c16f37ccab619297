#include "violin/ops/device_cuda.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "violin/ops/device.h"

namespace violin::ops {

cudaStream_t current_stream(const at::Device& device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return static_cast<cudaStream_t>(guard.getStream(device).native_handle());
}

bool is_captured(const c10::Device& device) {
  if (!device.is_cuda()) return false;
  const c10::DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(current_stream(device), &status) != cudaSuccess) {
    cudaGetLastError();  // the default stream while another one is captured: nobody else has to hear of it
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace violin::ops
