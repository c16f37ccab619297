// Launchers of the decay-mask kernels on CUDA. What they compute: violin/kernels/decay_mask.h. The rules of attention.h
// hold.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "violin/kernels/decay_mask.h"

namespace violin::kernels::cuda {

std::size_t scratch_bytes(const DecayMaskForward& p);
std::size_t scratch_bytes(const DecayMaskBackward& p);
cudaError_t launch(const DecayMaskForward& p, void* scratch, cudaStream_t stream);
cudaError_t launch(const DecayMaskBackward& p, void* scratch, cudaStream_t stream);

std::size_t scratch_bytes(const DecayGainBackward& p);
cudaError_t launch(const DecayGainForward& p, cudaStream_t stream);
cudaError_t launch(const DecayGainBackward& p, void* scratch, cudaStream_t stream);

}  // namespace violin::kernels::cuda
