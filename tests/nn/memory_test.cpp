#include "violin/nn/memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "violin/error.h"

namespace violin::nn {
namespace {

// A forward pass for which memory suffices with up to `fits` images.
auto pass_of(std::int64_t fits, std::vector<std::int64_t>& asked) {
  return [&asked, fits](const at::Tensor& images) {
    asked.push_back(images.size(0));
    TORCH_CHECK_WITH(OutOfMemoryError, images.size(0) <= fits, "CUDA out of memory. Tried to allocate 2 GiB.\nMore.");
    return images.sum(1);
  };
}

std::string complaint(std::int64_t images, std::int64_t fits, const char* option = "--batch") {
  std::vector<std::int64_t> asked;
  try {
    within_memory(at::ones({images, 2}), option, pass_of(fits, asked));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Memory, ABatchThatFitsIsComputedOnce) {
  std::vector<std::int64_t> asked;
  EXPECT_EQ(within_memory(at::ones({7, 2}), "--batch", pass_of(7, asked)).sum().item<float>(), 14);
  EXPECT_EQ(asked, std::vector<std::int64_t>{7});
}

TEST(Memory, AnErrorSaysHowManyImagesFit) {
  EXPECT_EQ(complaint(64, 20), "a pass of 64 images does not fit into memory, 16 do: take --batch 16");
  EXPECT_EQ(complaint(7, 6, ""), "a pass of 7 images does not fit into memory, 3 do");
  EXPECT_EQ(complaint(3, 1), "a pass of 3 images does not fit into memory, 1 does: take --batch 1");
  for (const std::int64_t images : {1, 5})
    EXPECT_EQ(complaint(images, 0),
              "not even one image fits into memory: CUDA out of memory. Tried to allocate 2 GiB.");
}

TEST(Memory, OtherErrorsStayWhatTheyAre) {
  const auto wrong = [](const at::Tensor&) -> at::Tensor { TORCH_CHECK(false, "sizes differ"); };
  EXPECT_THROW(within_memory(at::ones({2, 2}), "--batch", wrong), c10::Error);
  // One that shows when fewer images are tried.
  const auto both = [](const at::Tensor& images) -> at::Tensor {
    TORCH_CHECK_WITH(OutOfMemoryError, images.size(0) < 8, "CUDA out of memory");
    TORCH_CHECK(false, "sizes differ");
  };
  EXPECT_THROW(within_memory(at::ones({8, 2}), "--batch", both), c10::Error);
}

TEST(Memory, ProcessorsRunOutOfItToo) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer ends the process";
#endif
  try {
    at::empty({std::int64_t{1} << 58});
    FAIL() << "so much memory cannot be";
  } catch (const c10::Error& error) {
    EXPECT_TRUE(out_of_memory(error)) << error.what_without_backtrace();
  }
}

}  // namespace
}  // namespace violin::nn
