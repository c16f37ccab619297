// Which implementation computes: the reference in plain tensor operations, or kernels for an instruction set.
//
// The environment variable VIOLIN_PATH (auto, reference, plain, avx2, avx512, sm80, sm90, torch) is read once; `auto`,
// the default, takes the best that the machine has. A CPU path says nothing about tensors on other devices, and the
// other way round. `torch` leaves attention without tables to torch's own scaled_dot_product_attention, for comparisons
// with models as they are without Violin; everything else is as with `auto`.
#pragma once

#include <c10/core/DeviceType.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace violin::ops {

enum class Path { kReference, kPlain, kAvx2, kAvx512, kSm80, kSm90, kTorch };

const char* path_name(Path path);

// "avx2" and so on; nothing for "auto". Throws violin::Error on anything else and lists the choices.
std::optional<Path> parse_path(std::string_view name);

// The path for tensors of this type of device, never kTorch. Throws violin::Error where one is asked for that this
// machine lacks.
Path choose_path(c10::DeviceType device);

// Whether attention without tables is torch's own.
bool leaves_attention_to_torch();

// Whether attention in 16 bits on CUDA reads gains that are packed: all its kernels do, the reference does not.
bool packs_gains();

// Overrides VIOLIN_PATH from now on, for tests and benchmarks; nothing: back to VIOLIN_PATH.
void set_path(std::optional<Path> path);

// Every path that can run on this CPU, the reference first and the best last.
std::vector<Path> cpu_paths();

}  // namespace violin::ops
