#include "violin/checkpoint/pickle_globals.h"

#include <string>
#include <unordered_map>

namespace violin::checkpoint {
namespace {

using Table = std::unordered_map<std::string, GlobalInfo>;

Table make_table() {
  using enum GlobalRole;
  Table table = {
      {"collections.OrderedDict", {kDict}},
      {"collections.Counter", {kDict}},
      {"collections.defaultdict", {kDefaultDict}},
      {"_codecs.encode", {kEncodeLatin1}},
      {"torch.Size", {kTuple}},
      {"torch.Tensor", {kTensorType}},
      {"torch.nn.parameter.Parameter", {kTensorType}},
      {"torch._utils._rebuild_tensor", {kRebuildTensor}},
      {"torch._utils._rebuild_tensor_v2", {kRebuildTensor}},
      {"torch._utils._rebuild_tensor_v3", {kRebuildTensorV3}},
      {"torch._utils._rebuild_parameter", {kRebuildParameter}},
      {"torch._utils._rebuild_parameter_with_state", {kRebuildParameter}},
      {"torch._tensor._rebuild_from_type_v2", {kRebuildFromType}},
      {"torch.UntypedStorage", {kStorageType, DType::kU8}},
      {"torch.storage.UntypedStorage", {kStorageType, DType::kU8}},
      {"torch.storage._UntypedStorage", {kStorageType, DType::kU8}},
  };
  // Configurations that are dictionaries with another name.
  for (const char* name :
       {"yacs.config.CfgNode", "easydict.EasyDict", "addict.addict.Dict",
        "pytorch_lightning.utilities.parsing.AttributeDict", "lightning_fabric.utilities.data.AttributeDict"}) {
    table[name] = {kDict};
  }
  for (const char* name : {"argparse.Namespace", "types.SimpleNamespace", "torch.device", "numpy.dtype",
                           "numpy.ndarray", "datetime.datetime", "datetime.date", "datetime.timedelta"}) {
    table[name] = {kInert};
  }
  for (const char* name : {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}) {
    for (const char* module : {"pathlib.", "pathlib._local."}) table[std::string(module) + name] = {kInert};
  }
  // Renamed in numpy 2.
  for (const char* package : {"numpy.core.", "numpy._core."}) {
    table[std::string(package) + "multiarray.scalar"] = {kNumpyScalar};
    table[std::string(package) + "multiarray._reconstruct"] = {kInert};
    table[std::string(package) + "numeric._frombuffer"] = {kInert};
  }
  // Protocol 2 writes Python 2's name of the module. The plain types occur as factories of a defaultdict.
  for (const char* module : {"builtins.", "__builtin__."}) {
    for (const char* name : {"int", "float", "bool", "str", "bytes", "complex", "range", "slice"}) {
      table[std::string(module) + name] = {kInert};
    }
    table[std::string(module) + "dict"] = {kDict};
    table[std::string(module) + "list"] = {kList};
    table[std::string(module) + "tuple"] = {kTuple};
    table[std::string(module) + "set"] = {kSet};
    table[std::string(module) + "frozenset"] = {kSet};
    table[std::string(module) + "bytearray"] = {kBytes};
  }
  for (int i = 0; i <= static_cast<int>(DType::kC128); ++i) {
    const DTypeInfo& type = info(static_cast<DType>(i));
    table["torch." + std::string(type.torch)] = {kTorchDType, type.dtype};
    if (type.storage.empty()) continue;
    table["torch." + std::string(type.storage)] = {kStorageType, type.dtype};
    table["torch.cuda." + std::string(type.storage)] = {kStorageType, type.dtype};
  }
  return table;
}

}  // namespace

const GlobalInfo* find_global(std::string_view name) {
  static const Table table = make_table();
  const auto found = table.find(std::string(name));
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace violin::checkpoint
