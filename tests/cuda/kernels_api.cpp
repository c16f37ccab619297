// The CUDA launchers behind C names, so that tests/cuda/kernels.py can call them on torch tensors without the
// operators.
#include "violin/kernels/cuda/attention.h"
#include "violin/kernels/cuda/decay_mask.h"
#include "violin/kernels/cuda/rows.h"

namespace cuda = violin::kernels::cuda;
using violin::kernels::AttentionBackward;
using violin::kernels::AttentionForward;
using violin::kernels::DecayGainBackward;
using violin::kernels::DecayGainForward;
using violin::kernels::DecayMaskBackward;
using violin::kernels::DecayMaskForward;

namespace {
cuda::Path path_of(int path) {
  return path == 90 ? cuda::Path::kSm90 : cuda::Path::kSm80;
}
cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
}  // namespace

extern "C" {
std::size_t attention_forward_scratch(const AttentionForward* p, int path) {
  return cuda::scratch_bytes(*p, path_of(path));
}
std::size_t attention_backward_scratch(const AttentionBackward* p, int path, std::size_t room) {
  return cuda::scratch_bytes(*p, path_of(path), room);
}
int attention_forward_uses_sm90(const AttentionForward* p) {
  return cuda::has_sm90_kernel(*p);
}
int attention_backward_uses_sm90(const AttentionBackward* p) {
  return cuda::has_sm90_kernel(*p);
}
int attention_forward(const AttentionForward* p, int path, void* scratch, void* stream) {
  return cuda::launch(*p, path_of(path), scratch, stream_of(stream));
}
int attention_backward(const AttentionBackward* p, int path, std::size_t room, void* scratch, void* stream) {
  return cuda::launch(*p, path_of(path), scratch, stream_of(stream), room);
}
std::size_t decay_mask_forward_scratch(const DecayMaskForward* p) {
  return cuda::scratch_bytes(*p);
}
std::size_t decay_mask_backward_scratch(const DecayMaskBackward* p) {
  return cuda::scratch_bytes(*p);
}
int decay_mask_forward(const DecayMaskForward* p, void* scratch, void* stream) {
  return cuda::launch(*p, scratch, stream_of(stream));
}
int decay_mask_backward(const DecayMaskBackward* p, void* scratch, void* stream) {
  return cuda::launch(*p, scratch, stream_of(stream));
}
std::size_t decay_gain_forward_scratch(const DecayGainForward*) {
  return 0;
}
std::size_t decay_gain_backward_scratch(const DecayGainBackward* p) {
  return cuda::scratch_bytes(*p);
}
int decay_gain_forward(const DecayGainForward* p, void*, void* stream) {
  return cuda::launch(*p, stream_of(stream));
}
int decay_gain_backward(const DecayGainBackward* p, void* scratch, void* stream) {
  return cuda::launch(*p, scratch, stream_of(stream));
}
std::size_t layer_norm_forward_scratch(const cuda::LayerNormForward*) {
  return 0;
}
std::size_t layer_norm_backward_scratch(const cuda::LayerNormBackward* p) {
  return cuda::scratch_bytes(*p);
}
std::size_t column_sums_scratch(const cuda::ColumnSums* p) {
  return cuda::scratch_bytes(*p);
}
int layer_norm_forward(const cuda::LayerNormForward* p, void*, void* stream) {
  return cuda::launch(*p, stream_of(stream));
}
int layer_norm_backward(const cuda::LayerNormBackward* p, void* scratch, void* stream) {
  return cuda::launch(*p, scratch, stream_of(stream));
}
int column_sums(const cuda::ColumnSums* p, void* scratch, void* stream) {
  return cuda::launch(*p, scratch, stream_of(stream));
}
}
