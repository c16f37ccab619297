// Chooses the kernels of an attention call and cuts a backward pass over many images into pieces; holds the small
// kernels that this takes and that the backward pass of sm80 starts with.
#include "violin/kernels/cuda/attention.h"

#include <algorithm>

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
std::size_t bytes_of(DType t) {
  return t == DType::kFloat64 ? 8 : t == DType::kFloat32 ? 4 : 2;
}
// Of a table's numbers and the log-sum-exp.
std::size_t wide_bytes(DType t) {
  return t == DType::kFloat64 ? 8 : 4;
}

template <class T>
__global__ void __launch_bounds__(256) add_kernel(T* to, const T* more, std::int64_t size) {
  const std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x;
  if (i < size) to[i] += more[i];
}

cudaError_t add(void* to, const void* more, std::int64_t size, DType dtype, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>(ceil_div(size, 256));
  if (dtype == DType::kFloat64) {
    add_kernel<<<blocks, 256, 0, stream>>>(static_cast<double*>(to), static_cast<const double*>(more), size);
  } else {
    add_kernel<<<blocks, 256, 0, stream>>>(static_cast<float*>(to), static_cast<const float*>(more), size);
  }
  return cudaGetLastError();
}

std::int64_t table_numbers(const AttentionShape& s) {
  return s.groups * s.heads * s.queries * s.keys;
}
std::size_t table_bytes(const AttentionBackward& p) {
  return align256(static_cast<std::size_t>(table_numbers(p.shape)) * wide_bytes(p.dtype));
}

// Images that are worked on together. `adds`: what the tables' gradients get is added to what is there.
std::size_t scratch_of_piece(const AttentionBackward& p, bool sm90, bool adds) {
  if (sm90) return scratch_sm90(p, adds);
  const std::size_t beside =
      adds ? ((p.dgain != nullptr) + (p.dbias != nullptr) + (p.dgate != nullptr)) * table_bytes(p) : 0;
  return beside + (is_wide(p.dtype) ? scratch_simt(p) : delta_bytes(p) + scratch_sm80(p));
}

cudaError_t launch_piece(AttentionBackward p, bool sm90, bool adds, void* scratch, cudaStream_t stream) {
  if (sm90) return launch_sm90(p, adds, scratch, stream);
  unsigned char* base = static_cast<unsigned char*>(scratch);
  void** const gradients[3] = {&p.dgain, &p.dbias, &p.dgate};
  void* const results[3] = {p.dgain, p.dbias, p.dgate};
  for (int i = 0; i < 3 && adds; ++i) {
    if (results[i] == nullptr) continue;
    *gradients[i] = base;
    base += table_bytes(p);
  }
  cudaError_t e = cudaSuccess;
  if (is_wide(p.dtype)) {
    e = launch_simt(p, base, stream);
  } else {
    float* const delta = reinterpret_cast<float*>(base);
    if (!measures_delta(p)) e = launch_delta(p, delta, stream);
    if (e == cudaSuccess) e = launch_sm80(p, delta, base + delta_bytes(p), stream);
  }
  for (int i = 0; i < 3 && e == cudaSuccess; ++i) {
    if (*gradients[i] != results[i]) e = add(results[i], *gradients[i], table_numbers(p.shape), p.dtype, stream);
  }
  return e;
}

// The images from `first` on. Both are whole rounds of the groups, so that image b still has table b mod G.
AttentionBackward piece_of(AttentionBackward p, std::int64_t first, std::int64_t images) {
  const auto move = [&](auto& x) {
    if (x.data == nullptr) return;
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(x.data)>>, const unsigned char,
                                    unsigned char>;
    x.data = static_cast<Byte*>(x.data) + first * x.batch * static_cast<std::int64_t>(bytes_of(p.dtype));
  };
  for (ConstHeads* x : {&p.q, &p.k, &p.v, &p.out, &p.dout}) move(*x);
  for (MutableHeads* x : {&p.dq, &p.dk, &p.dv}) move(*x);
  p.lse = static_cast<const unsigned char*>(p.lse) +
          first * p.shape.heads * p.shape.queries * static_cast<std::int64_t>(wide_bytes(p.dtype));
  p.shape.batch = images;
  return p;
}

// How the images of a backward pass are cut.
struct Pieces {
  bool sm90;            // one choice for all
  std::int64_t images;  // of a piece; the last may have fewer
  std::size_t scratch;
};

// Scratch that a call may take: twice its tables, 64 MiB if that is more.
std::size_t default_room(const AttentionBackward& p) {
  const int tables = (p.gain.data != nullptr) + (p.bias.data != nullptr) + (p.gate.data != nullptr);
  return std::max(std::size_t{64} << 20, 2 * static_cast<std::size_t>(tables) * table_bytes(p));
}

// What grows with the number of images is 4 to 12 bytes for each query and what a tail's shares take, a twelfth of the
// images themselves at most. Pieces are not made so small that they would leave the device idle, unless a room is
// given: what is left then, strips over few heads and many tokens, any number of images takes, and a cut that does not
// fit is taken only where it saves a quarter.
Pieces pieces_of(const AttentionBackward& p, Path path, std::size_t room) {
  const AttentionShape& s = p.shape;
  const bool sm90 = on_sm90(p, path);
  const Pieces whole{sm90, s.batch, scratch_of_piece(p, sm90, false)};
  const std::int64_t blocks = s.heads * ceil_div(s.queries, 128);  // of an image
  const std::int64_t fewest = room == 0 ? ceil_div(std::int64_t{8} * processors(), blocks) : 1;
  if (room == 0) room = default_room(p);
  const std::int64_t rounds = s.batch / s.groups;
  Pieces best = whole;
  for (std::int64_t n = 2; best.scratch > room && n < 2 * rounds; n *= 2) {
    const std::int64_t images = ceil_div(rounds, n) * s.groups;
    if (images < fewest) break;
    const std::int64_t last = s.batch % images;
    std::size_t scratch = scratch_of_piece(piece_of(p, 0, images), sm90, true);
    if (last > 0) scratch = std::max(scratch, scratch_of_piece(piece_of(p, 0, last), sm90, true));
    if (scratch < best.scratch) best = {sm90, images, scratch};
  }
  return best.scratch <= room || best.scratch < whole.scratch / 4 * 3 ? best : whole;
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

std::size_t scratch_bytes(const AttentionBackward& p, Path path, std::size_t room) {
  return pieces_of(p, path, room).scratch;
}

cudaError_t launch(const AttentionForward& p, Path path, void* scratch, cudaStream_t stream) {
  if (empty(p.shape)) return cudaSuccess;
  if (is_wide(p.dtype)) return launch_simt(p, stream);
  if (on_sm90(p, path)) return launch_sm90(p, scratch, stream);
  return launch_sm80(p, scratch, stream);
}

cudaError_t launch(const AttentionBackward& p, Path path, void* scratch, cudaStream_t stream, std::size_t room) {
  if (empty(p.shape)) return cudaSuccess;
  const Pieces pieces = pieces_of(p, path, room);
  cudaError_t e = cudaSuccess;
  for (std::int64_t first = 0; first < p.shape.batch && e == cudaSuccess; first += pieces.images) {
    const AttentionBackward piece = piece_of(p, first, std::min(pieces.images, p.shape.batch - first));
    e = launch_piece(piece, pieces.sm90, first > 0, scratch, stream);
  }
  return e;
}

}  // namespace violin::kernels::cuda
