// Opens every kind of tensor file that Violin reads, and gives out its tensors.
//
//   const TensorFile file = TensorFile::open("deit_small.pth");
//   for (const auto& [name, tensor] : file.tensors()) …             all of them, by path: "model.blocks.0.norm1.weight"
//   const Value* model = file.root().get_if<Dict>()->find("model");
//   for (const auto& [name, tensor] : file.tensors(*model)) …       those of one branch: "blocks.0.norm1.weight"
//
// A tensor is a view of the mapped file: opening costs nothing, unused tensors are never read, tensors that share a
// storage in the file share memory. Writing to one changes neither the file nor another process. The file must not be
// changed in place meanwhile (a program that replaces files by renaming, as ours do, does no harm); whoever keeps
// tensors for long opens with `copy`.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "violin/checkpoint/document.h"

namespace violin::checkpoint {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

at::ScalarType scalar_type(DType dtype);

struct OpenOptions {
  bool copy = false;  // tensors get memory of their own and do not keep the file open
};

class TensorFile {
 public:
  // Tells the format by content. Throws violin::Error naming the file and what in it is wrong.
  static TensorFile open(const std::filesystem::path& path, const OpenOptions& options = {});

  FileFormat format() const;
  std::size_t bytes() const;           // of the file
  const Value& root() const;           // for safetensors a dictionary of tensors
  const Metadata& metadata() const;    // of safetensors
  std::vector<NamedRef> list() const;  // names, shapes and dtypes; touches no data

  // Of this file's tree. Safe to call from several threads.
  at::Tensor tensor(const TensorRef& reference) const;
  at::Tensor tensor(const std::string& name) const;  // by path; throws when there is none
  NamedTensors tensors() const;
  NamedTensors tensors(const Value& branch) const;  // paths begin at the branch

 private:
  struct State;
  explicit TensorFile(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace violin::checkpoint
