#include "violin/checkpoint/tensor_file.h"

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "violin/checkpoint/mapped_file.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return at::kBool;
    case DType::kU8:
      return at::kByte;
    case DType::kI8:
      return at::kChar;
    case DType::kU16:
      return at::kUInt16;
    case DType::kI16:
      return at::kShort;
    case DType::kU32:
      return at::kUInt32;
    case DType::kI32:
      return at::kInt;
    case DType::kU64:
      return at::kUInt64;
    case DType::kI64:
      return at::kLong;
    case DType::kF8E4M3:
      return at::kFloat8_e4m3fn;
    case DType::kF8E5M2:
      return at::kFloat8_e5m2;
    case DType::kF8E4M3Fnuz:
      return at::kFloat8_e4m3fnuz;
    case DType::kF8E5M2Fnuz:
      return at::kFloat8_e5m2fnuz;
    case DType::kF8E8M0:
      return at::kFloat8_e8m0fnu;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF32:
      return at::kFloat;
    case DType::kF64:
      return at::kDouble;
    case DType::kC32:
      return at::kComplexHalf;
    case DType::kC64:
      return at::kComplexFloat;
    case DType::kC128:
      return at::kComplexDouble;
  }
  throw Error("no such dtype");
}

struct TensorFile::State {
  std::string name;
  OpenOptions options;
  std::shared_ptr<const MappedFile> file;
  Document document;
  std::mutex mutex;
  std::unordered_map<std::size_t, c10::Storage> storages;

  // One per storage of the file, however many tensors lie on it.
  c10::Storage storage(std::size_t index) {
    const std::scoped_lock lock(mutex);
    const auto found = storages.find(index);
    if (found != storages.end()) return found->second;
    return storages.emplace(index, make_storage(document.storages.at(index))).first->second;
  }

  c10::Storage make_storage(const StorageBytes& source) const {
    // Legacy files and hand-made safetensors may place a storage anywhere; elements must be aligned in memory.
    const bool aligned = reinterpret_cast<std::uintptr_t>(source.bytes.data()) % source.alignment == 0;
    const auto by_size = c10::Storage::use_byte_size_t();
    if (options.copy || !aligned) {
      c10::DataPtr memory = c10::GetCPUAllocator()->allocate(source.bytes.size());
      file->read(source.bytes, {static_cast<std::byte*>(memory.get()), source.bytes.size()});
      return {by_size, source.bytes.size(), std::move(memory), nullptr, /*resizable=*/false};
    }
    auto* data = const_cast<std::byte*>(source.bytes.data());  // mapped writable
    auto keep = std::make_unique<std::shared_ptr<const MappedFile>>(file);
    c10::DataPtr view(
        data, keep.release(), [](void* kept) { delete static_cast<std::shared_ptr<const MappedFile>*>(kept); },
        at::kCPU);
    return {by_size, source.bytes.size(), std::move(view), nullptr, /*resizable=*/false};
  }

  // Any other byte than 0 and 1 is no bool, and undefined behaviour to load as one.
  void check_bools(const TensorRef& reference) const {
    const StorageBytes& source = document.storages.at(reference.storage);
    const bool good =
        std::all_of(source.bytes.begin(), source.bytes.end(), [](std::byte b) { return b <= std::byte{1}; });
    if (good) return;
    throw Error("cannot read " + file_in_quotes(name) + ": storage " + in_quotes(source.name) +
                " holds bytes above 1 in a bool tensor");
  }
};

TensorFile TensorFile::open(const std::filesystem::path& path, const OpenOptions& options) {
  auto state = std::make_shared<State>();
  state->name = path.string();
  state->options = options;
  state->file = MappedFile::open(path);
  state->document = parse_document(state->file->bytes(), state->name);
  return TensorFile(std::move(state));
}

FileFormat TensorFile::format() const {
  return state_->document.format;
}

std::size_t TensorFile::bytes() const {
  return state_->file->bytes().size();
}

const Value& TensorFile::root() const {
  return state_->document.root;
}

const Metadata& TensorFile::metadata() const {
  return state_->document.metadata;
}

std::vector<NamedRef> TensorFile::list() const {
  return flatten(root());
}

at::Tensor TensorFile::tensor(const TensorRef& reference) const {
  const auto options = at::TensorOptions().dtype(scalar_type(reference.dtype));
  if (std::find(reference.sizes.begin(), reference.sizes.end(), 0) != reference.sizes.end()) {
    return at::empty(reference.sizes, options);
  }
  if (reference.dtype == DType::kBool) state_->check_bools(reference);
  return at::empty({0}, options)
      .set_(state_->storage(reference.storage), reference.offset, reference.sizes, reference.strides);
}

at::Tensor TensorFile::tensor(const std::string& name) const {
  for (const NamedRef& entry : list()) {
    if (entry.name == name) return tensor(entry.tensor);
  }
  throw Error(file_in_quotes(state_->name) + " has no tensor " + in_quotes(name) +
              "; 'violin inspect' lists what it has");
}

NamedTensors TensorFile::tensors() const {
  return tensors(root());
}

NamedTensors TensorFile::tensors(const Value& branch) const {
  NamedTensors all;
  for_each_tensor(
      branch, [&](const std::string& name, const TensorRef& reference) { all.emplace_back(name, tensor(reference)); });
  return all;
}

}  // namespace violin::checkpoint
