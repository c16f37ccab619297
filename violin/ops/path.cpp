#include "violin/ops/path.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "violin/error.h"
#include "violin/kernels/cpu/attention.h"

namespace violin::ops {
namespace {

using kernels::cpu::Level;

struct Name {
  Path path;
  const char* name;
};
constexpr Name kNames[] = {{Path::kReference, "reference"}, {Path::kPlain, "plain"}, {Path::kAvx2, "avx2"},
                           {Path::kAvx512, "avx512"},       {Path::kSm80, "sm80"},   {Path::kSm90, "sm90"},
                           {Path::kTorch, "torch"}};

// What set_path asked for, as a number; -1: nothing.
std::atomic<int> g_override{-1};

std::optional<Path> requested() {
  static const std::optional<Path> from_environment = [] {
    const char* value = std::getenv("VIOLIN_PATH");
    return value == nullptr || *value == '\0' ? std::nullopt : parse_path(value);
  }();
  const int value = g_override.load(std::memory_order_relaxed);
  return value >= 0 ? std::optional(static_cast<Path>(value)) : from_environment;
}

bool is_cuda_path(Path path) {
  return path == Path::kSm80 || path == Path::kSm90;
}

Path from_level(Level level) {
  return level == Level::kAvx512 ? Path::kAvx512 : level == Level::kAvx2 ? Path::kAvx2 : Path::kPlain;
}

}  // namespace

const char* path_name(Path path) {
  return std::find_if(std::begin(kNames), std::end(kNames), [&](const Name& n) { return n.path == path; })->name;
}

std::optional<Path> parse_path(std::string_view name) {
  if (name == "auto") return std::nullopt;
  std::string choices = "auto";
  for (const Name& known : kNames) {
    if (name == known.name) return known.path;
    choices += std::string(", ") + known.name;
  }
  throw Error("VIOLIN_PATH is '" + std::string(name) + "'; choose one of " + choices);
}

std::vector<Path> cpu_paths() {
  std::vector<Path> paths = {Path::kReference};
  for (const Path path : {Path::kPlain, Path::kAvx2, Path::kAvx512}) {
    if (path <= from_level(kernels::cpu::best_level())) paths.push_back(path);
  }
  return paths;
}

Path choose_path(c10::DeviceType device) {
  std::optional<Path> path = requested();
  if (path == Path::kTorch) path.reset();
  if (path == Path::kReference) return Path::kReference;
  // The best for a CUDA device is up to the device, which may be one of several: sm90 means "as far as it goes".
  if (device == c10::DeviceType::CUDA) return path.has_value() && is_cuda_path(*path) ? *path : Path::kSm90;
  if (device != c10::DeviceType::CPU) return Path::kReference;
  const Path best = from_level(kernels::cpu::best_level());
  if (!path.has_value() || is_cuda_path(*path)) return best;
  if (*path > best) {
    throw Error(std::string("VIOLIN_PATH is '") + path_name(*path) + "', which this CPU does not have; its best is '" +
                path_name(best) + "'");
  }
  return *path;
}

bool leaves_attention_to_torch() {
  return requested() == Path::kTorch;
}

bool packs_gains() {
#ifdef VIOLIN_HAVE_CUDA
  return choose_path(c10::DeviceType::CUDA) != Path::kReference;
#else
  return false;
#endif
}

void set_path(std::optional<Path> path) {
  g_override.store(path.has_value() ? static_cast<int>(*path) : -1, std::memory_order_relaxed);
}

}  // namespace violin::ops
