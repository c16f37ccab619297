// Chooses the kernels of an attention call, and holds the small one that the backward pass of sm80 starts with.
#include "violin/kernels/cuda/attention.h"

#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda {
namespace {

std::int64_t rows(const AttentionBackward& p) {
  return p.shape.batch * p.shape.heads * p.shape.queries;
}

// One warp per row.
template <class T>
__global__ void delta_kernel(const __grid_constant__ AttentionBackward p, float* delta) {
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(blockDim.x / 32) + threadIdx.x / 32;
  if (row >= p.shape.batch * p.shape.heads * p.shape.queries) return;
  const std::int64_t i = row % p.shape.queries;
  const std::int64_t h = row / p.shape.queries % p.shape.heads;
  const std::int64_t b = row / p.shape.queries / p.shape.heads;
  const T* o = head_of<T>(p.out, b, h) + i * p.out.token;
  const T* g = head_of<T>(p.dout, b, h) + i * p.dout.token;
  float sum = 0;
  for (std::int64_t c = threadIdx.x % 32; c < p.shape.dim; c += 32) {
    sum += static_cast<float>(o[c]) * static_cast<float>(g[c]);
  }
  for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, s);
  if (threadIdx.x % 32 == 0) delta[row] = sum;
}

// D [B,h,Nq] = rowsum(dO o O), of 16-bit tensors.
cudaError_t launch_delta(const AttentionBackward& p, float* delta, cudaStream_t stream) {
  const auto kernel = p.dtype == DType::kBFloat16 ? delta_kernel<__nv_bfloat16> : delta_kernel<__half>;
  kernel<<<static_cast<unsigned>(ceil_div(rows(p), 8)), 256, 0, stream>>>(p, delta);
  return cudaGetLastError();
}

std::size_t delta_bytes(const AttentionBackward& p) {
  return align256(static_cast<std::size_t>(rows(p)) * sizeof(float));
}

bool empty(const AttentionShape& s) {
  return s.batch == 0 || s.heads == 0 || s.queries == 0;
}
bool is_wide(DType t) {
  return t == DType::kFloat32 || t == DType::kFloat64;
}
template <class Pass>
bool on_sm90(const Pass& p, Path path) {
  return path == Path::kSm90 && has_sm90_kernel(p);
}

}  // namespace

Path best_path() {
  int device = 0;
  int major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    return Path::kSm80;
  }
  return major == 9 ? Path::kSm90 : Path::kSm80;
}

std::size_t scratch_bytes(const AttentionForward& p, Path path) {
  if (is_wide(p.dtype)) return 0;
  return on_sm90(p, path) ? scratch_sm90(p) : scratch_sm80(p);
}

std::size_t scratch_bytes(const AttentionBackward& p, Path path) {
  if (is_wide(p.dtype)) return scratch_simt(p);
  return on_sm90(p, path) ? scratch_sm90(p) : delta_bytes(p) + scratch_sm80(p);
}

cudaError_t launch(const AttentionForward& p, Path path, void* scratch, cudaStream_t stream) {
  if (empty(p.shape)) return cudaSuccess;
  if (is_wide(p.dtype)) return launch_simt(p, stream);
  if (on_sm90(p, path)) return launch_sm90(p, scratch, stream);
  return launch_sm80(p, scratch, stream);
}

cudaError_t launch(const AttentionBackward& p, Path path, void* scratch, cudaStream_t stream) {
  if (empty(p.shape)) return cudaSuccess;
  if (is_wide(p.dtype)) return launch_simt(p, scratch, stream);
  if (on_sm90(p, path)) return launch_sm90(p, scratch, stream);
  float* const delta = static_cast<float*>(scratch);
  const cudaError_t e = measures_delta(p) ? cudaSuccess : launch_delta(p, delta, stream);
  if (e != cudaSuccess) return e;
  return launch_sm80(p, delta, static_cast<unsigned char*>(scratch) + delta_bytes(p), stream);
}

}  // namespace violin::kernels::cuda
