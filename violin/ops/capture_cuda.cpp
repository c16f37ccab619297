#include "violin/ops/capture.h"

#include "violin/ops/device_cuda.h"

namespace violin::ops {

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
