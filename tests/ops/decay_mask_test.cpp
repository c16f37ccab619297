// The decay mask against its formula in float64, and what holds for every mask.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/ops/formula.h"

namespace violin::tests {
namespace {

struct MaskInputs {
  std::string name;
  at::Tensor ranks, log_decay;
  ops::MaybeTensor weight;
  std::int64_t prefix = 0;
  ops::MaybeTensor prefix_decay;
  bool log_space = false;
};

// Ranks of a random subset of a grid's tokens for each of `groups` samples: [G,C,A,N].
at::Tensor subsets(std::int64_t groups, const at::Tensor& whole, std::int64_t tokens) {
  std::vector<at::Tensor> samples;
  for (std::int64_t g = 0; g < groups; ++g) {
    samples.push_back(whole.index_select(2, at::randperm(whole.size(2)).narrow(0, 0, tokens)));
  }
  return at::stack(samples);
}

std::vector<MaskInputs> mask_cases() {
  torch::manual_seed(1);
  std::vector<MaskInputs> cases;
  const auto uniform = [](at::IntArrayRef sizes) { return at::rand(sizes, at::kDouble) + 0.1; };
  for (const bool log_space : {false, true}) {
    for (const std::int64_t heads : {1, 3, 4, 5, 8, 9, 12, 16, 17}) {
      cases.push_back({"heads", published_ranks(30), spread_log_decay(8, heads, -3, 8), {}, 1, {}, log_space});
    }
    for (const std::int64_t tokens : {1, 2, 7, 15, 16, 17, 33, 64, 130}) {
      cases.push_back({"tokens", published_ranks(tokens), spread_log_decay(8, 3, -3, 8), {}, 0, {}, log_space});
    }
    for (const std::int64_t prefix : {0, 1, 5}) {
      cases.push_back(
          {"prefix", published_ranks(20), spread_log_decay(8, 3, -3, 8), {}, prefix, -uniform({3}), log_space});
    }
    for (const char* curves : {"snake", "snake,hilbert,zigzag", "violin"}) {
      const at::Tensor ranks = ops::curve_ranks(curves, {5, 8});
      cases.push_back(
          {"two dimensions", ranks.squeeze(1), spread_log_decay(ranks.size(0), 2, -3, 8), {}, 0, {}, log_space});
      cases.push_back({"weights", ranks, spread_log_decay(ranks.size(0), 6, -3, 8), uniform({ranks.size(0), 6}), 2,
                       -uniform({6}), log_space});
    }
    // Distances per axis, with one decay and with one per axis.
    const at::Tensor manhattan = ops::curve_ranks("manhattan,hilbert", {6, 7});
    cases.push_back({"manhattan", manhattan, spread_log_decay(2, 3, 0, 4), {}, 1, {}, log_space});
    cases.push_back({"a decay per axis", manhattan, spread_log_decay(2, 6, 0, 4).view({2, 2, 3}), uniform({2, 3}), 1,
                     -uniform({3}), log_space});
    cases.push_back({"three axes",
                     ops::curve_ranks("manhattan", {3, 4, 5}),
                     spread_log_decay(1, 9, 0, 4).view({1, 3, 3}),
                     {},
                     0,
                     {},
                     log_space});
    cases.push_back(
        {"token subsets", subsets(3, published_ranks(64), 20), spread_log_decay(8, 4, -3, 8), {}, 1, {}, log_space});
    cases.push_back({"ranks far apart",
                     published_ranks(12) * 100000,
                     spread_log_decay(8, 3, 5, 15),
                     uniform({8, 3}),
                     1,
                     {},
                     log_space});
    cases.push_back({"ranks far apart, a decay per axis",
                     manhattan * 100000,
                     spread_log_decay(2, 6, 5, 15).view({2, 2, 3}),
                     {},
                     0,
                     {},
                     log_space});
    cases.push_back({"steep", published_ranks(25), spread_log_decay(8, 3, -20, -10), {}, 0, {}, log_space});
    cases.push_back({"flat", published_ranks(25), spread_log_decay(8, 3, 15, 25), {}, 0, {}, log_space});
  }
  return cases;
}

// mask and gradients of sum(mask * dmask)
using MaskFunction = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const ops::MaybeTensor&, std::int64_t,
                                    const ops::MaybeTensor&, bool);
std::vector<at::Tensor> run(MaskFunction function, const MaskInputs& inputs, at::ScalarType type) {
  std::vector<at::Tensor> leaves = {inputs.log_decay.to(type).requires_grad_()};
  ops::MaybeTensor weight, prefix_decay;
  if (inputs.weight.has_value()) leaves.push_back(*(weight = inputs.weight->to(type).requires_grad_()));
  // Without prefix tokens nothing depends on their decay.
  if (inputs.prefix_decay.has_value()) {
    prefix_decay = inputs.prefix_decay->to(type).requires_grad_();
    leaves.push_back(*prefix_decay);
  }
  const at::Tensor mask = function(inputs.ranks, leaves[0], weight, inputs.prefix, prefix_decay, inputs.log_space);
  torch::manual_seed(7);
  const at::Tensor dmask = at::randn(mask.sizes(), at::kFloat).to(mask.scalar_type());
  std::vector<at::Tensor> results = torch::autograd::grad({mask}, leaves, {dmask});
  results.push_back(mask.detach());
  return results;
}

TEST(DecayMask, EqualsTheFormulaInBothPrecisionsOnEveryPath) {
  for (const MaskInputs& inputs : mask_cases()) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      MaskInputs rounded = inputs;  // what the operator receives, exactly
      rounded.log_decay = inputs.log_decay.to(type).to(at::kDouble);
      if (inputs.weight.has_value()) rounded.weight = inputs.weight->to(type).to(at::kDouble);
      if (inputs.prefix_decay.has_value()) rounded.prefix_decay = inputs.prefix_decay->to(type).to(at::kDouble);
      const std::vector<at::Tensor> truth = run(formula_mask, rounded, at::kDouble);
      for (const ops::Path path : ops::cpu_paths()) {
        SCOPED_TRACE(inputs.name + (inputs.log_space ? ", log space, path " : ", path ") + ops::path_name(path));
        const PathGuard guard(path);
        const std::vector<at::Tensor> actual = run(ops::decay_mask, rounded, type);
        const double unit = type == at::kFloat ? 0x1p-23 : 0x1p-52;
        for (std::size_t i = 0; i < truth.size(); ++i) {
          ASSERT_EQ(actual[i].sizes(), truth[i].sizes());
          ASSERT_EQ(actual[i].scalar_type(), type);
          // Sums over pairs cancel. The kernels form them in double, the reference and the truth in their own
          // precision.
          const double digits = path == ops::Path::kReference || type == at::kDouble ? 256 : 4;
          EXPECT_LE(difference(actual[i], truth[i]), digits * unit * std::max(1.0, largest(truth[i])))
              << (i + 1 == truth.size() ? "mask" : "gradient ") << i;
        }
      }
    }
  }
}

TEST(DecayMask, IsSymmetricHasAUnitDiagonalAndLiesBetweenZeroAndOne) {
  for (const ops::Path path : ops::cpu_paths()) {
    const PathGuard guard(path);
    for (const char* curves : {"violin", "hilbert", "snake,peano,zigzag", "z,snake,hilbert,peano,zigzag,z_T,snake_T"}) {
      for (const auto& [low, high] : {std::pair{-20, -10}, std::pair{-20, 20}, std::pair{0, 9}, std::pair{15, 20}}) {
        const at::Tensor ranks = ops::curve_ranks(curves, {9, 11});
        const at::Tensor log_decay = spread_log_decay(ranks.size(0), 12, low, high).to(at::kFloat);
        const at::Tensor mask = ops::decay_mask(ranks, log_decay, {}, 1);
        // Torch's vector loops end with other instructions than they begin, so the reference may differ in the last
        // bit.
        const double last_bit = path == ops::Path::kReference ? 0x1p-23 : 0;
        EXPECT_LE(difference(mask, mask.transpose(1, 2)), last_bit) << curves << " " << ops::path_name(path);
        EXPECT_TRUE((mask.diagonal(0, 1, 2) == 1).all().item<bool>()) << curves << " " << ops::path_name(path);
        EXPECT_TRUE(((mask >= 0) & (mask <= 1)).all().item<bool>()) << curves << " " << ops::path_name(path);
        const at::Tensor log_mask = ops::decay_mask(ranks, log_decay, {}, 1, {}, true);
        EXPECT_LE(largest(log_mask.diagonal(0, 1, 2)), 3e-7);
        EXPECT_TRUE((log_mask.isfinite() & (log_mask <= 3e-7)).all().item<bool>());
      }
    }
  }
}

TEST(DecayMask, OfSeveralCurvesLiesBetweenTheSmallestAndTheLargest) {
  const at::Tensor ranks = ops::curve_ranks("violin", {8, 6});
  const at::Tensor log_decay = spread_log_decay(8, 3, -2, 8);
  std::vector<at::Tensor> single;
  for (std::int64_t c = 0; c < 8; ++c) {
    single.push_back(ops::decay_mask(ranks.narrow(0, c, 1), log_decay.narrow(0, c, 1)));
  }
  const at::Tensor all = at::stack(single), mean = ops::decay_mask(ranks, log_decay);
  EXPECT_TRUE((mean <= std::get<0>(all.max(0)) + 1e-15).all().item<bool>());
  EXPECT_TRUE((mean >= std::get<0>(all.min(0)) - 1e-15).all().item<bool>());
}

TEST(DecayMask, ResolvesDecaysThatRoundToOne) {
  // At beta = 18 and beyond gamma is 1 in float32, its logarithm is not.
  for (const double beta : {18.0, 20.0, 30.0}) {
    const at::Tensor ranks = published_ranks(64);
    const at::Tensor exact = spread_log_decay(8, 3, beta, beta).requires_grad_();
    const at::Tensor rough = exact.detach().to(at::kFloat).requires_grad_();
    torch::manual_seed(2);
    const at::Tensor dmask = at::randn({3, 65, 65});
    for (const ops::Path path : ops::cpu_paths()) {
      const PathGuard guard(path);
      const at::Tensor expected =
          torch::autograd::grad({ops::decay_mask(ranks, exact, {}, 1)}, {exact}, {dmask.to(at::kDouble)})[0];
      const at::Tensor actual = torch::autograd::grad({ops::decay_mask(ranks, rough, {}, 1)}, {rough}, {dmask})[0];
      const double error = ((actual.to(at::kDouble) - expected) / expected).abs().max().item<double>();
      EXPECT_LE(error, path == ops::Path::kReference ? 1e-4 : 2e-7) << beta << " " << ops::path_name(path);
    }
  }
}

TEST(DecayMask, OfDecayMinusInfinityIsTheIdentity) {
  const at::Tensor log_decay = at::full({8, 2}, -std::numeric_limits<float>::infinity()).requires_grad_();
  for (const ops::Path path : ops::cpu_paths()) {
    const PathGuard guard(path);
    const at::Tensor mask = ops::decay_mask(published_ranks(20), log_decay);
    EXPECT_TRUE(at::equal(mask.detach(), at::eye(20).expand({2, 20, 20}))) << ops::path_name(path);
    EXPECT_EQ(largest(torch::autograd::grad({mask.sum()}, {log_decay})[0]), 0) << ops::path_name(path);
  }
}

TEST(DecayMask, TakesHalfPrecisionDecaysAsFloat32) {
  const at::Tensor log_decay = spread_log_decay(8, 2, 0, 4).to(at::kBFloat16).requires_grad_();
  const at::Tensor mask = ops::decay_mask(published_ranks(20), log_decay);
  EXPECT_EQ(mask.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(mask, ops::decay_mask(published_ranks(20), log_decay.to(at::kFloat))));
  EXPECT_EQ(torch::autograd::grad({mask.sum()}, {log_decay})[0].scalar_type(), at::kBFloat16);
}

TEST(DecayMask, WithoutPatchesHasPrefixTokensOnly) {
  const at::Tensor ranks = at::empty({8, 1, 0}, at::kInt);
  const at::Tensor log_decay = spread_log_decay(8, 2, 0, 4).requires_grad_();
  const at::Tensor prefix_decay = at::full({2}, -1.0, at::kDouble);
  for (const ops::Path path : ops::cpu_paths()) {
    const PathGuard guard(path);
    const at::Tensor mask = ops::decay_mask(ranks, log_decay, {}, 3, prefix_decay);
    ASSERT_EQ(mask.sizes(), (at::IntArrayRef{2, 3, 3}));
    EXPECT_EQ(mask[0][0][0].item<double>(), 1);
    EXPECT_DOUBLE_EQ(mask[0][0][1].item<double>(), std::exp(-1.0));
    EXPECT_EQ(largest(torch::autograd::grad({mask.sum()}, {log_decay})[0]), 0);
    EXPECT_EQ(ops::decay_mask(ranks, log_decay).numel(), 0);
  }
}

}  // namespace
}  // namespace violin::tests
