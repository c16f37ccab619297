// Mistakes of the caller: the error names the argument, what was expected and what came.
#include <gtest/gtest.h>

#include "tests/ops/formula.h"
#include "violin/ops/decay_gain.h"

namespace violin::tests {
namespace {

// Expects an error of the type whose message contains all of the words.
template <class Exception, class Call>
void expect_error(const Call& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "no error, expected one with '" << words.front() << "'";
  } catch (const Exception& error) {
    const std::string message = error.what();
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message.substr(0, 300);
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another kind of error: " << std::string(error.what()).substr(0, 300);
  }
}

struct AttentionMistakes : testing::Test {
  at::Tensor q = at::randn({4, 3, 10, 8}), k = at::randn({4, 3, 12, 8}), v = at::randn({4, 3, 12, 8});
};

TEST_F(AttentionMistakes, ShapesOfQueriesKeysAndValues) {
  using at::randn;
  expect_error<c10::ValueError>([&] { ops::attention(q[0], k, v); }, {"q has shape [3, 10, 8]", "heads, tokens, dim"});
  expect_error<c10::ValueError>([&] { ops::attention(q, randn({4, 2, 12, 8}), v); },
                                {"k has shape [4, 2, 12, 8]", "[4, 3, tokens, 8]"});
  expect_error<c10::ValueError>([&] { ops::attention(q, randn({2, 3, 12, 8}), v); }, {"k has shape [2, 3, 12, 8]"});
  expect_error<c10::ValueError>([&] { ops::attention(q, k, randn({4, 3, 12, 7})); }, {"v has shape [4, 3, 12, 7]"});
  expect_error<c10::ValueError>([&] { ops::attention(q, k, randn({4, 3, 11, 8})); }, {"v has 11 tokens", "k has 12"});
  expect_error<c10::ValueError>([&] { ops::attention(randn({4, 3, 10, 0}), k, v); }, {"q has shape [4, 3, 10, 0]"});
}

TEST_F(AttentionMistakes, TypesAndDevices) {
  expect_error<c10::TypeError>([&] { ops::attention(q.to(at::kInt), k, v); }, {"q is Int", "float32"});
  expect_error<c10::TypeError>([&] { ops::attention(q, k.to(at::kBFloat16), v); }, {"k is BFloat16", "q is Float"});
  expect_error<c10::TypeError>([&] { ops::attention(q, k, v.to(at::kDouble)); }, {"v is Double", "q is Float"});
  expect_error<c10::Error>([&] { ops::attention(q, k.to(at::kMeta), v); }, {"k is on meta", "q on cpu"});
  expect_error<c10::Error>([&] { ops::attention(q, k, v, at::rand({3, 10, 12}).to(at::kMeta)); }, {"gain is on meta"});
  expect_error<c10::TypeError>([&] { ops::attention(q, k, v, at::ones({3, 10, 12}, at::kBool)); }, {"gain is Bool"});
  expect_error<c10::TypeError>([&] { ops::attention(q.to_sparse(), k, v); }, {"q has layout Sparse"});
}

TEST_F(AttentionMistakes, AStrideInTheLastDimension) {
  const at::Tensor turned = at::randn({4, 3, 8, 12}).transpose(2, 3);
  expect_error<c10::ValueError>([&] { ops::attention(q, turned, v); }, {"k has stride 12", "expected 1"});
  expect_error<c10::ValueError>([&] { ops::attention(q, k, turned); }, {"v has stride 12", "expected 1"});
}

TEST_F(AttentionMistakes, ShapesOfTables) {
  const auto with_gain = [&](const at::Tensor& table) { ops::attention(q, k, v, table); };
  expect_error<c10::ValueError>([&] { with_gain(at::rand({10, 12})); },
                                {"gain has shape [10, 12]", "[3 or 1, 10, 12]"});
  expect_error<c10::ValueError>([&] { with_gain(at::rand({2, 10, 12})); }, {"gain has shape [2, 10, 12]"});
  expect_error<c10::ValueError>([&] { with_gain(at::rand({3, 12, 10})); }, {"gain has shape [3, 12, 10]"});
  expect_error<c10::ValueError>([&] { with_gain(at::rand({1, 1, 3, 10, 12})); }, {"gain has shape [1, 1, 3, 10, 12]"});
  expect_error<c10::ValueError>([&] { ops::attention(q, k, v, {}, at::rand({3, 10, 11})); }, {"bias has shape"});
  expect_error<c10::ValueError>([&] { ops::attention(q, k, v, {}, {}, at::rand({3, 11, 12})); }, {"gate has shape"});
}

TEST_F(AttentionMistakes, GroupsThatDoNotDivideTheBatch) {
  expect_error<c10::ValueError>([&] { ops::attention(q, k, v, at::rand({3, 3, 10, 12})); },
                                {"gain has 3 groups", "batch of 4"});
  expect_error<c10::ValueError>([&] { ops::attention(q, k, v, at::rand({0, 3, 10, 12})); }, {"gain has 0 groups"});
  expect_error<c10::ValueError>([&] { ops::attention(q, k, v, at::rand({2, 3, 10, 12}), at::rand({4, 1, 10, 12})); },
                                {"bias has 4 groups", "another table has 2"});
}

TEST_F(AttentionMistakes, PackedProjections) {
  expect_error<c10::ValueError>([] { ops::attention_qkv(at::randn({2, 5, 2, 3, 4})); },
                                {"qkv has shape [2, 5, 2, 3, 4]"});
  expect_error<c10::ValueError>([] { ops::attention_qkv(at::randn({2, 5, 36})); }, {"qkv has shape [2, 5, 36]"});
  expect_error<c10::ValueError>([] { ops::attention_qkv(at::randn({2, 5, 3, 3, 4}), at::rand({3, 4, 5})); },
                                {"gain has shape"});
}

TEST_F(AttentionMistakes, RowsOfTheMap) {
  const auto [out, lse] = ops::attention_with_lse(q, k, v);
  const auto rows = [&, &lse = lse](const at::Tensor& chosen) { ops::attention_rows(q, k, lse, chosen); };
  expect_error<c10::ValueError>([&] { rows(at::tensor({0, 10}, at::kLong)); }, {"rows reach from 0 to 10", "0 to 9"});
  expect_error<c10::ValueError>([&] { rows(at::tensor({-1, 3}, at::kLong)); }, {"rows reach from -1"});
  expect_error<c10::TypeError>([&] { rows(at::tensor({0, 1}, at::kInt)); }, {"rows is Int"});
  expect_error<c10::ValueError>([&] { rows(at::zeros({1, 1}, at::kLong)); }, {"rows has shape [1, 1]"});
  expect_error<c10::ValueError>([&, &lse = lse] { ops::attention_rows(q, k, lse[0], at::tensor({0}, at::kLong)); },
                                {"lse has shape"});
}

TEST(DecayMaskMistakes, Ranks) {
  const at::Tensor log_decay = at::full({8, 2}, -0.1);
  const at::Tensor ranks = published_ranks(12);
  expect_error<c10::TypeError>([&] { ops::decay_mask(ranks.to(at::kLong), log_decay); }, {"ranks is Long", "int32"});
  expect_error<c10::TypeError>([&] { ops::decay_mask(ranks.to(at::kFloat), log_decay); }, {"ranks is Float", "int32"});
  expect_error<c10::ValueError>([&] { ops::decay_mask(ranks - 3, log_decay); }, {"ranks contain -3", "below 0"});
  expect_error<c10::ValueError>([&] { ops::decay_mask(ranks[0][0], log_decay); }, {"ranks has shape [12]"});
  expect_error<c10::ValueError>([&] { ops::decay_mask(at::empty({0, 12}, at::kInt), log_decay); },
                                {"at least one curve"});
  const at::Tensor far = at::full({1, 3, 2}, std::numeric_limits<std::int32_t>::max(), at::kInt);
  far.select(2, 0).zero_();
  expect_error<c10::ValueError>([&] { ops::decay_mask(far, at::full({1, 2}, -0.1)); },
                                {"ranks are up to 6442450941 apart"});
}

TEST(DecayMaskMistakes, LengthsThatDisagree) {
  const at::Tensor log_decay = at::full({8, 2}, -0.1);
  const at::Tensor ranks = published_ranks(12);
  expect_error<c10::ValueError>([&] { ops::decay_mask(ranks, log_decay.narrow(0, 0, 7)); },
                                {"log_decay has shape [7, 2]", "[8, heads]"});
  expect_error<c10::ValueError>([&] { ops::decay_mask(ranks, at::full({8, 2, 3}, -0.1)); },
                                {"log_decay has shape [8, 2, 3]", "[8, 1, heads]"});
  expect_error<c10::ValueError>([&] { ops::decay_mask(ranks, log_decay, at::ones({8, 3})); },
                                {"weight has shape [8, 3]", "[8, 2]"});
  expect_error<c10::ValueError>([&] { ops::decay_mask(ranks, log_decay, {}, 1, at::ones({3})); },
                                {"prefix_decay has shape [3]", "[2]"});
  expect_error<c10::ValueError>([&] { ops::decay_mask(ranks, log_decay, {}, -1); }, {"prefix is -1"});
  expect_error<c10::TypeError>([&] { ops::decay_mask(ranks, log_decay.to(at::kInt)); }, {"log_decay is Int"});
  expect_error<c10::Error>([&] { ops::decay_mask(ranks, log_decay.to(at::kMeta)); }, {"log_decay is on meta"});
}

// Packed gains need a GPU to be computed, but their sizes and mistakes do not.
TEST(DecayGain, SizesWithoutData) {
  const auto meta = at::TensorOptions(at::kMeta);
  const at::Tensor ranks = at::empty({8, 1, 256}, meta.dtype(at::kInt));
  const at::Tensor decay = at::empty({8, 3}, meta.dtype(at::kFloat)).requires_grad_();
  const at::Tensor alpha = at::empty({3}, meta.dtype(at::kFloat)).requires_grad_();
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const auto [gain, handle] = ops::decay_gain(ranks, decay, {}, 1, {}, alpha, false, type);
    EXPECT_TRUE(ops::is_packed_gain(gain) && !gain.requires_grad() && handle.requires_grad());
    EXPECT_EQ(handle.sizes(), at::IntArrayRef({3, 257, 257}));
    const at::Tensor qkv = at::empty({4, 257, 3, 3, 64}, meta.dtype(type)).requires_grad_();
    const at::Tensor out = ops::attention_qkv(qkv, gain, {}, {}, {}, handle);
    const auto gradients = torch::autograd::grad({out.sum()}, {qkv, decay, alpha}, {}, true);
    EXPECT_EQ(gradients[0].sizes(), qkv.sizes());
    EXPECT_EQ(gradients[1].sizes(), decay.sizes());
    EXPECT_EQ(gradients[2].sizes(), alpha.sizes());
    const at::Tensor q = at::empty({4, 3, 257, 64}, meta.dtype(type));
    EXPECT_EQ(torch::autograd::grad({ops::attention(q, q, q, gain, {}, {}, {}, handle).sum()}, {decay})[0].sizes(),
              decay.sizes());
    expect_error<c10::ValueError>([&] { ops::attention(q, q, q, {}, {}, {}, {}, handle); },
                                  {"handle has shape [3, 257, 257]", "packed gain"});
    expect_error<c10::ValueError>([&] { ops::attention(q, q, q, gain, {}, {}, {}, handle.narrow(1, 0, 5)); },
                                  {"handle has shape [3, 5, 257]"});
  }
}

TEST(DecayGain, Mistakes) {
  const at::Tensor ranks = published_ranks(12), decay = at::full({8, 2}, -0.1);
  const auto make = [](const at::Tensor& ranks, const at::Tensor& decay, const ops::MaybeTensor& alpha,
                       at::ScalarType type) { return ops::decay_gain(ranks, decay, {}, 0, {}, alpha, false, type); };
  expect_error<c10::TypeError>([&] { make(ranks, decay, {}, at::kFloat); }, {"dtype is Float", "bfloat16"});
  expect_error<c10::ValueError>([&] { make(ranks, decay, at::ones({3}), at::kHalf); }, {"alpha has shape [3]", "[2]"});
  expect_error<c10::TypeError>([&] { make(ranks, decay.to(at::kDouble), {}, at::kHalf); }, {"Double", "float32"});
  expect_error<c10::ValueError>([&] { make(ranks.expand({8, 2, 12}), decay, {}, at::kHalf); }, {"one axis"});
  EXPECT_FALSE(ops::packs_decay_gains(decay, 1, at::kBFloat16)) << "the CPU has no kernel for it";
}

TEST(CurveRanksMistakes, NamesAndGrids) {
  expect_error<c10::ValueError>([] { ops::curve_ranks("hilbrt", {4, 4}); }, {"hilbrt", "hilbert"});
  expect_error<c10::ValueError>([] { ops::curve_ranks("violin", {16}); }, {"grid has 1 sides"});
  expect_error<c10::ValueError>([] { ops::curve_ranks("violin", {4, 0}); }, {"grid is [4, 0]"});
  expect_error<c10::ValueError>([] { ops::curve_ranks("snake", {1 << 20, 1 << 20}); }, {"1048576x1048576"});
}

}  // namespace
}  // namespace violin::tests
