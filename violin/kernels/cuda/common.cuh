// Small things that the kernels of this folder share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "violin/kernels/attention.h"

namespace violin::kernels::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T>
__device__ __forceinline__ const T* head_of(const ConstHeads& x, std::int64_t b, std::int64_t h) {
  return static_cast<const T*>(x.data) + b * x.batch + h * x.head;
}
template <class T>
__device__ __forceinline__ T* head_of(const MutableHeads& x, std::int64_t b, std::int64_t h) {
  return static_cast<T*>(x.data) + b * x.batch + h * x.head;
}
// The [Nq,Nk] slice of a table that image b and head h use, or null.
template <class T>
__device__ __forceinline__ const T* slice_of(const Table& t, std::int64_t g, std::int64_t h) {
  return t.data == nullptr ? nullptr : static_cast<const T*>(t.data) + g * t.group + h * t.head;
}

__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], std::uint32_t row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
  }
}

// 16 bytes into shared memory while the thread goes on; zeros where they are not valid. Copies up to a commit() are a
// group; wait<n>() waits until at most n of the thread's groups are on their way.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Two numbers as T in one register, x in its lower half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(v);
  }
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
constexpr std::size_t align256(std::size_t n) {
  return (n + 255) / 256 * 256;
}

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute, int otherwise) {
  int device = 0;
  int value = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    return otherwise;
  }
  return value;
}
inline int processors() {
  return device_attribute(cudaDevAttrMultiProcessorCount, 132);
}
// Shared memory that a block can ask for.
inline std::size_t most_shared() {
  return static_cast<std::size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 48 * 1024));
}

// Lets every launch of a kernel have as much dynamic shared memory as the device has, `beside` bytes of its own aside.
// The limit is the kernel's, not a launch's: two threads that each set what theirs needs would take it from each other.
template <class Kernel>
cudaError_t allow_most_shared(Kernel kernel, std::size_t beside = 0) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(most_shared() - beside));
}

// In 16 bits D = rowsum(dO o O) comes of a rounded output. A softmax over a handful of keys is often all but one-hot;
// then dP - D is a difference of near numbers, and D is measured anew, by sm80.
inline constexpr std::int64_t kFewKeys = 16;
// Whether sm80 does so: a gate of both signs makes the roundings of O large beside that sum too.
inline bool measures_delta(const AttentionBackward& p) {
  return p.gate.data != nullptr || p.shape.keys <= kFewKeys;
}

// The paths; sm80 is given D, or room for it; sm90 can add to the gain's gradient instead of writing it.
cudaError_t launch_simt(const AttentionForward& p, cudaStream_t stream);
cudaError_t launch_simt(const AttentionBackward& p, void* scratch, cudaStream_t stream);
cudaError_t launch_sm80(const AttentionForward& p, void* scratch, cudaStream_t stream);
cudaError_t launch_sm80(const AttentionBackward& p, float* delta, void* scratch, cudaStream_t stream);
cudaError_t launch_sm90(const AttentionForward& p, void* scratch, cudaStream_t stream);
cudaError_t launch_sm90(const AttentionBackward& p, bool adds, void* scratch, cudaStream_t stream);
// Scratch; for sm80, beside D.
std::size_t scratch_simt(const AttentionBackward& p);
std::size_t scratch_sm80(const AttentionForward& p);
std::size_t scratch_sm80(const AttentionBackward& p);
std::size_t scratch_sm90(const AttentionForward& p);
std::size_t scratch_sm90(const AttentionBackward& p, bool adds);

}  // namespace violin::kernels::cuda
