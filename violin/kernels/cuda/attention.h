// Launchers of the attention kernels on CUDA. What they compute: violin/kernels/attention.h.
//
// A launcher neither allocates nor synchronises: it enqueues kernels on the stream, works inside a graph capture, and
// gives the same bits on every run on the same kind of device. Scratch is device memory of scratch_bytes(), aligned to
// 256 bytes, contents free to be anything before and after.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "violin/kernels/attention.h"

namespace violin::kernels::cuda {

// kSm80: mma.sync kernels (float16, bfloat16) and plain kernels (float32, float64) for every device from sm_80 on.
// kSm90: Hopper kernels where they apply, the former elsewhere. It needs a device of compute capability 9.0.
enum class Path { kSm80, kSm90 };

// The best path of the current device.
Path best_path();

std::size_t scratch_bytes(const AttentionForward& p, Path path);
cudaError_t launch(const AttentionForward& p, Path path, void* scratch, cudaStream_t stream);
// A backward pass whose images would take more scratch than `room` bytes works on some of them after others. By
// default, 0, room is twice the tables, or 64 MiB if that is more, as far as the pieces still fill the device. Both
// functions are to be given the same.
std::size_t scratch_bytes(const AttentionBackward& p, Path path, std::size_t room = 0);
cudaError_t launch(const AttentionBackward& p, Path path, void* scratch, cudaStream_t stream, std::size_t room = 0);

// Brings a float table into its packed form beside float16 or bfloat16, in both of which it can stand for a gain.
cudaError_t pack_gain(const Table& gain, const AttentionShape& s, DType dtype, void* to, cudaStream_t stream);

// Whether the Hopper kernels themselves would be used for these parameters on kSm90.
bool has_sm90_kernel(const AttentionForward& p);
bool has_sm90_kernel(const AttentionBackward& p);

}  // namespace violin::kernels::cuda
