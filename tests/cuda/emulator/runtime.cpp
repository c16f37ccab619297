// The part of CUDA's runtime that Violin's launchers and nvcc's host code call, on a device that runs PTX on this
// machine's processor; and what tests need to steer it. A library that links this instead of the real runtime works
// without a device.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <fstream>
#include <regex>
#include <sstream>
#include <utility>

#include "bulk.h"
#include "machine.h"

namespace violin::emulator {
namespace {

constexpr int kProcessors = 4;  // few, so that small problems have several rounds

class Device {
 public:
  static Device& one() {
    static Device device;
    return device;
  }

  // Kernels register themselves before main, when nothing of this is made yet but what is made on demand.
  void add(const void* host, const char* name) { names_[host] = plain_name(name); }

  cudaError_t launch(const void* host, dim3 grid, dim3 block, void** args, std::size_t shared) {
    try {
      const Program& program = program_of(host);
      const Function& f = *program.function;
      Launch launch;
      launch.program = &program;
      launch.grid = {grid.x, grid.y, grid.z};
      launch.block = {block.x, block.y, block.z};
      launch.dynamic_shared = shared;
      launch.memory = &memory;
      launch.params.resize(f.param_bytes);
      for (std::size_t n = 0; n < f.params.size(); ++n) {
        std::memcpy(launch.params.data() + f.params[n].offset, args[n], f.params[n].bytes);
      }
      const std::size_t threads = std::size_t{block.x} * block.y * block.z;
      if (threads > 1024 || (f.max_threads > 0 && threads > static_cast<std::size_t>(f.max_threads))) {
        throw Error(f.name + ": a block of " + std::to_string(threads) + " threads");
      }
      const auto most = dynamic_shared_.find(host);
      const std::size_t allowed = most == dynamic_shared_.end() ? 48 * 1024 : most->second;
      if (shared > allowed || shared + f.static_shared > most_shared) {
        throw Error(f.name + ": " + std::to_string(shared) + " bytes of shared memory, " + std::to_string(allowed) +
                    " allowed");
      }
      if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) throw Error(f.name + ": an empty grid");
      if (grid.x > 0x7fffffff || grid.y > 0xffff || grid.z > 0xffff) throw Error(f.name + ": too large a grid");
      run(launch, order);
    } catch (const std::exception& problem) {
      if (error.empty()) error = problem.what();
      return last = cudaErrorLaunchFailure;
    }
    return cudaSuccess;
  }
  cudaError_t allow_shared(const void* host, std::size_t bytes) {
    try {
      if (bytes + program_of(host).function->static_shared > most_shared) return last = cudaErrorInvalidValue;
    } catch (const std::exception& problem) {
      if (error.empty()) error = problem.what();
      return last = cudaErrorInvalidValue;
    }
    // On a real device other threads may launch the kernel between this call and its launch.
    if (dynamic_shared_.try_emplace(host, bytes).first->second != bytes) {
      if (error.empty()) error = names_[host] + ": a limit of shared memory that changes from launch to launch";
      return last = cudaErrorInvalidValue;
    }
    return cudaSuccess;
  }
  // Another kind of device from here on.
  void offer_shared(std::size_t bytes) {
    most_shared = bytes;
    dynamic_shared_.clear();
  }
  void load(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    if (!file) throw Error("cannot read " + path);
    modules_.push_back(std::make_unique<Module>(text.str()));
    for (const std::string& name : modules_.back()->entries())
      entries_[plain_name(name)] = {modules_.back().get(), name};
  }

  std::size_t most_shared = 227 * 1024;  // that a block can have
  Memory memory;
  Order order;
  std::string error;
  cudaError_t last = cudaSuccess;
  struct Configuration {
    dim3 grid, block;
    std::size_t shared;
    cudaStream_t stream;
  };
  std::vector<Configuration> configurations;

 private:
  // Names of unnamed namespaces have numbers that differ between compilations of a file.
  static std::string plain_name(const std::string& name) {
    static const std::regex unnamed("_GLOBAL__N__[0-9a-f]{8}_([0-9]+_[A-Za-z0-9_]+?_cu)_[0-9a-f]{8}");
    return std::regex_replace(name, unnamed, "$1");
  }
  const Program& program_of(const void* host) {
    const auto known = programs_.find(host);
    if (known != programs_.end()) return *known->second;
    const auto name = names_.find(host);
    if (name == names_.end()) throw Error("a kernel that was not registered");
    const auto entry = entries_.find(name->second);
    if (entry == entries_.end()) throw Error("no PTX was loaded for " + name->second);
    const auto [module, ptx_name] = entry->second;
    return *(programs_[host] = decoded(*module, ptx_name));
  }
  const Program* decoded(Module& module, const std::string& name) {
    const auto known = functions_.find({&module, name});
    if (known != functions_.end()) return known->second.get();
    const auto function = module.function(name);
    if (function == nullptr) return nullptr;
    auto program =
        std::make_unique<Program>(decode(function, [&](const std::string& callee) { return decoded(module, callee); }));
    return (functions_[{&module, name}] = std::move(program)).get();
  }

  std::map<const void*, std::string> names_;
  std::map<const void*, std::size_t> dynamic_shared_;
  std::vector<std::unique_ptr<Module>> modules_;
  std::map<std::string, std::pair<Module*, std::string>> entries_;
  std::map<std::pair<Module*, std::string>, std::unique_ptr<Program>> functions_;
  std::map<const void*, const Program*> programs_;
};

CUresult encode_map(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap map{};
  map.mark = kMapMark;
  map.data = reinterpret_cast<std::uint64_t>(data);
  map.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  map.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 0;
  // What the driver refuses.
  if (rank != 4 || map.data % 16 != 0 ||
      (swizzle != CU_TENSOR_MAP_SWIZZLE_128B && swizzle != CU_TENSOR_MAP_SWIZZLE_NONE)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (int d = 0; d < 4; ++d) {
    map.sizes[d] = sizes[d];
    map.box[d] = box[d];
    if (sizes[d] == 0 || sizes[d] > (1ull << 32) || box[d] == 0 || box[d] > 256 || steps[d] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    if (d == 3) break;
    map.strides[d] = strides[d];
    if (strides[d] % 16 != 0 || strides[d] >= (1ull << 40)) return CUDA_ERROR_INVALID_VALUE;
  }
  if (map.box[0] * map.element % 16 != 0 || (map.swizzle == 128 && map.box[0] * map.element > 128)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memset(out, 0, sizeof(*out));
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace violin::emulator

using violin::emulator::Device;

extern "C" {
// Registration and launches, as nvcc's host code does them.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  Device::one().add(host, name);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, struct CUstream_st* stream) {
  Device::one().configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  auto& all = Device::one().configurations;
  if (all.empty()) return cudaErrorMissingConfiguration;
  *grid = all.back().grid;
  *block = all.back().block;
  *shared = all.back().shared;
  *static_cast<cudaStream_t*>(stream) = all.back().stream;
  all.pop_back();
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, std::size_t shared,
                               cudaStream_t) {
  return Device::one().launch(kernel, grid, block, args, shared);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, std::size_t shared, cudaStream_t) {
  return Device::one().launch(host, grid, block, args, shared);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** args) {
  return Device::one().launch(host, config->gridDim, config->blockDim, args, config->dynamicSmemBytes);
}

cudaError_t cudaGetLastError() {
  return std::exchange(Device::one().last, cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = violin::emulator::kProcessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(Device::one().most_shared);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    default:
      return Device::one().last = cudaErrorInvalidValue;
  }
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  return Device::one().allow_shared(host, static_cast<std::size_t>(value));
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                   unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::string_view(symbol) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(violin::emulator::encode_map) : nullptr;
  if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// For tests.
const char* emulator_ptx_list() {  // a file with the names of those to load, one per line
  return VIOLIN_PTX_LIST;
}
int emulator_load(const char* path) {
  try {
    Device::one().load(path);
    return 0;
  } catch (const std::exception& problem) {
    Device::one().error = problem.what();
    return 1;
  }
}
void emulator_allow(const void* data, std::size_t bytes) {
  Device::one().memory.allow(reinterpret_cast<std::uint64_t>(data), bytes);
}
void emulator_forget() {
  Device::one().memory.forget();
}
void emulator_order(std::uint64_t seed) {
  Device::one().order.seed = seed;
}
void emulator_offer_shared(std::size_t bytes) {
  Device::one().offer_shared(bytes);
}
// What went wrong since the last call, or an empty string.
const char* emulator_error() {
  static std::string text;
  text = std::exchange(Device::one().error, {});
  Device::one().last = cudaSuccess;
  return text.c_str();
}
}
