// What to say where memory does not suffice for a pass over a batch of images: how many it does suffice for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace violin::nn {

bool out_of_memory(const c10::Error& error);

// The most images with which `pass` does not run out of memory, found by halving `tried`, with which it did; 0: it does
// with one.
std::int64_t images_that_fit(std::int64_t tried, const std::function<void(std::int64_t images)>& pass);

// Throws violin::Error: `tried` images do not fit, `fits` do, and what to do then.
[[noreturn]] void explain_memory(const c10::Error& reason, std::int64_t tried, std::int64_t fits,
                                 const std::string& advice);

// forward(images). Where that runs out of memory it is tried with fewer of them, for an error that says how many fit;
// `option`, unless empty, is the one that sets their number.
template <class Forward>
auto within_memory(const at::Tensor& images, std::string_view option, const Forward& forward) {
  try {
    return forward(images);
  } catch (const c10::Error& error) {
    if (!out_of_memory(error)) throw;
    const std::int64_t tried = images.size(0);
    const std::int64_t fits = images_that_fit(tried, [&](std::int64_t count) { forward(images.narrow(0, 0, count)); });
    explain_memory(error, tried, fits,
                   option.empty() ? "" : "take " + std::string(option) + " " + std::to_string(fits));
  }
}

}  // namespace violin::nn
