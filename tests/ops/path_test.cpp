// Paths, strategies, ranks as tensors, and what the library says about itself.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/ops/formula.h"
#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/version.h"

namespace violin::tests {
namespace {

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Path, IsTheBestUnlessOneIsChosen) {
  const std::vector<ops::Path> paths = ops::cpu_paths();
  ASSERT_GE(paths.size(), 2U);
  EXPECT_EQ(paths.front(), ops::Path::kReference);
  for (const ops::Path path : paths) {
    const PathGuard guard(path);
    EXPECT_EQ(ops::choose_path(at::kCPU), path);
    EXPECT_NE(version_text().find(std::string("CPU path ") + ops::path_name(path)), std::string::npos);
  }
  // A path of another device says nothing about this one.
  const PathGuard guard(ops::Path::kSm90);
  EXPECT_NE(ops::choose_path(at::kCPU), ops::Path::kReference);
}

TEST(Path, NamesAreParsedAndUnknownOnesListTheChoices) {
  EXPECT_EQ(ops::parse_path("auto"), std::nullopt);
  for (const ops::Path path : {ops::Path::kReference, ops::Path::kPlain, ops::Path::kAvx2, ops::Path::kAvx512,
                               ops::Path::kSm80, ops::Path::kSm90, ops::Path::kTorch}) {
    EXPECT_EQ(ops::parse_path(ops::path_name(path)), path);
  }
  const std::string message = error_of([] { ops::parse_path("sse9"); });
  EXPECT_NE(message.find("sse9"), std::string::npos);
  EXPECT_NE(message.find("auto, reference, plain, avx2, avx512, sm80, sm90, torch"), std::string::npos);
}

TEST(Path, ALevelThatTheCpuLacksIsAnError) {
  const std::vector<ops::Path> paths = ops::cpu_paths();
  for (const ops::Path path : {ops::Path::kPlain, ops::Path::kAvx2, ops::Path::kAvx512}) {
    const PathGuard guard(path);
    const bool available = std::find(paths.begin(), paths.end(), path) != paths.end();
    EXPECT_EQ(error_of([] { ops::choose_path(at::kCPU); }).empty(), available) << ops::path_name(path);
  }
}

TEST(Path, TorchAttendsWhereThereIsNoTable) {
  torch::manual_seed(2);
  const at::Tensor qkv = at::randn({2, 9, 3, 2, 8}).requires_grad_();
  const at::Tensor gain = at::rand({2, 9, 9});
  const auto both = [&](const ops::MaybeTensor& table) {
    const at::Tensor out = ops::attention_qkv(qkv, table);
    return std::pair(out, torch::autograd::grad({out}, {qkv}, {at::ones_like(out)})[0]);
  };
  const auto ours = both({}), masked = both(gain);
  const PathGuard guard(ops::Path::kTorch);
  EXPECT_NE(ops::choose_path(at::kCPU), ops::Path::kTorch);
  const auto torchs = both({});
  EXPECT_EQ(torchs.first.grad_fn()->name().find("violin"), std::string::npos);  // not our operator
  EXPECT_TRUE(torchs.first.is_contiguous());
  EXPECT_LE(difference(torchs.first, ours.first), 1e-5);
  EXPECT_LE(difference(torchs.second, ours.second), 1e-5);
  const at::Tensor q = qkv.select(2, 0).transpose(1, 2);
  EXPECT_LE(difference(ops::attention(q, q, q), at::scaled_dot_product_attention(q, q, q)), 0);
  EXPECT_TRUE(at::equal(both(gain).first, masked.first));
}

TEST(Strategies, NamesAreParsedAndUnknownOnesSuggestTheNearest) {
  for (const std::string& name : ops::strategy_names()) {
    EXPECT_EQ(ops::strategy_name(ops::parse_strategy(name)), name);
  }
  EXPECT_NE(error_of([] { ops::parse_strategy("mul_v3"); }).find("'mul_v1'"), std::string::npos);
  EXPECT_NE(error_of([] { ops::parse_strategy("mul_after_softmax"); }).find("'mul_after_sm'"), std::string::npos);
}

TEST(Strategies, WithoutAlphaEqualOnesWithAlphaOne) {
  torch::manual_seed(1);
  const at::Tensor mask = ops::decay_mask(published_ranks(16), spread_log_decay(8, 2, 0, 6));
  const auto heads = [] { return at::randn({4, 2, 16, 8}, at::kDouble); };
  const at::Tensor q = heads(), k = heads(), v = heads();
  for (const std::string& name : ops::strategy_names()) {
    const ops::Strategy strategy = ops::parse_strategy(name);
    const at::Tensor bare = ops::masked_attention(q, k, v, ops::compose(strategy, mask));
    const at::Tensor scaled = ops::masked_attention(q, k, v, ops::compose(strategy, mask, at::ones({2}, at::kDouble)));
    EXPECT_TRUE(at::equal(bare, scaled)) << name;
    // With a group dimension: image b uses mask b mod G.
    const at::Tensor groups = at::stack({mask, mask * 0.5});
    const at::Tensor grouped = ops::masked_attention(q, k, v, ops::compose(strategy, groups));
    EXPECT_LE(difference(grouped[0], bare[0]), 1e-14) << name;
    const at::Tensor halved = ops::masked_attention(q, k, v, ops::compose(strategy, mask * 0.5));
    EXPECT_LE(difference(grouped[3], halved[3]), 1e-14) << name;
  }
}

TEST(CurveRanks, AreTheCoordinatesOfTheCurves) {
  const at::Tensor ranks = ops::curve_ranks("violin", {3, 5});
  ASSERT_EQ(ranks.sizes(), (at::IntArrayRef{8, 1, 15}));
  ASSERT_EQ(ranks.scalar_type(), at::kInt);
  const auto hilbert = curves::ranks(curves::parse_curve("hilbert"), {.height = 3, .width = 5});
  for (std::int64_t i = 0; i < 15; ++i) EXPECT_EQ(ranks[2][0][i].item<int>(), (*hilbert)[i]);
  EXPECT_EQ(ops::curve_ranks("manhattan,snake", {3, 5}).sizes(), (at::IntArrayRef{2, 2, 15}));
  EXPECT_EQ(ops::curve_ranks("hilbert", {2, 3, 5}).sizes(), (at::IntArrayRef{1, 1, 30}));
}

TEST(Version, NamesTheLibrariesAndThePath) {
  const std::string text = version_text();
  EXPECT_EQ(text.find(std::string("violin ") + version()), 0U);
  for (const char* word : {"\ntorch ", "\nCPU path ", "\nCUDA kernels ", "CUDA device "}) {
    EXPECT_NE(text.find(word), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace violin::tests
