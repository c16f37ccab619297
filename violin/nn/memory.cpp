#include "violin/nn/memory.h"

#include "violin/error.h"

namespace violin::nn {

bool out_of_memory(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return true;
  const std::string_view text = error.what_without_backtrace();
  for (const char* words : {"out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED"})
    if (text.find(words) != std::string_view::npos) return true;
  return false;
}

std::int64_t images_that_fit(std::int64_t tried, const std::function<void(std::int64_t images)>& pass) {
  for (std::int64_t images = tried / 2; images > 0; images /= 2) {
    try {
      pass(images);
      return images;
    } catch (const c10::Error& error) {
      if (!out_of_memory(error)) throw;
    }
  }
  return 0;
}

void explain_memory(const c10::Error& reason, std::int64_t tried, std::int64_t fits, const std::string& advice) {
  if (fits < 1) {
    const std::string text = reason.what_without_backtrace();
    throw Error("not even one image fits into memory: " + text.substr(0, text.find('\n')));
  }
  throw Error("a pass of " + std::to_string(tried) + " images does not fit into memory, " + std::to_string(fits) +
              (fits == 1 ? " does" : " do") + (advice.empty() ? "" : ": " + advice));
}

}  // namespace violin::nn
