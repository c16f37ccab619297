// Tensor files, and models out of them:
//   model_file.h     load and save a model with its preprocessing and class names
//   tensor_file.h    open a safetensors or torch file, list and take its tensors
//   safetensors.h    write a safetensors file
//   translate.h      other people's names to ours
//   architecture.h   what model a file's tensors belong to
//   preprocessing.h  what is done to images, as JSON
//   value.h          the tree of plain data that a torch file holds
#pragma once

#include "violin/checkpoint/model_file.h"
#include "violin/checkpoint/safetensors.h"
#include "violin/checkpoint/tensor_file.h"
#include "violin/checkpoint/value.h"
