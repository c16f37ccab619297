// The names that a pickle may ask for, and what each becomes.
#pragma once

#include <string_view>

#include "violin/checkpoint/dtype.h"

namespace violin::checkpoint {

enum class GlobalRole : std::uint8_t {
  kInert,  // a class or function that becomes an Object: its name and the data it was given
  kDict,   // OrderedDict, Counter, …: a dictionary, perhaps of a list of pairs
  kDefaultDict,
  kList,
  kTuple,  // torch.Size
  kSet,
  kBytes,         // bytearray
  kEncodeLatin1,  // how protocol 2 writes bytes
  kNumpyScalar,
  kStorageType,    // of a storage; carries a dtype
  kTensorType,     // torch.Tensor, Parameter
  kTorchDType,     // torch.float32; carries a dtype
  kRebuildTensor,  // storage, offset, sizes, strides, …
  kRebuildTensorV3,
  kRebuildParameter,
  kRebuildFromType,
};

struct GlobalInfo {
  GlobalRole role = GlobalRole::kInert;
  DType dtype = DType::kU8;
};

// By "module.name"; null for everything that is refused.
const GlobalInfo* find_global(std::string_view name);

}  // namespace violin::checkpoint
