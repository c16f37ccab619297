// Tensor files:
//   tensor_file.h   open a safetensors or torch file, list and take its tensors
//   safetensors.h   write a safetensors file
//   value.h         the tree of plain data that a torch file holds
#pragma once

#include "violin/checkpoint/safetensors.h"
#include "violin/checkpoint/tensor_file.h"
#include "violin/checkpoint/value.h"
