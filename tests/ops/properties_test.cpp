// What the mathematics promises, whatever the numbers.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include "tests/ops/formula.h"

namespace violin::tests {
namespace {

at::Tensor random(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::randn(sizes, at::TensorOptions().dtype(type));
}

TEST(Attention, WithoutTablesIsEquivariantUnderPermutations) {
  torch::manual_seed(1);
  const at::Tensor q = random({2, 3, 50, 16}), k = random({2, 3, 50, 16}), v = random({2, 3, 50, 16});
  const at::Tensor order = at::randperm(50);
  const at::Tensor out = ops::attention(q, k, v);
  const auto moved = [&](const at::Tensor& tensor) { return tensor.index_select(2, order); };
  EXPECT_LE(difference(ops::attention(moved(q), moved(k), moved(v)), moved(out)), 2e-6);
  // The order of the keys does not matter, that of the queries carries over.
  EXPECT_LE(difference(ops::attention(q, moved(k), moved(v)), out), 2e-6);
}

TEST(Attention, AlongOneCurveIsToeplitzAttention) {
  torch::manual_seed(2);
  for (const char* curve : {"snake", "hilbert", "peano_T", "zigzag"}) {
    const at::Tensor ranks = ops::curve_ranks(curve, {7, 9});
    const std::int64_t tokens = 63, heads = 2;
    const at::Tensor log_decay = spread_log_decay(1, heads, 0, 4);
    const at::Tensor q = random({2, heads, tokens, 8}, at::kDouble), k = random({2, heads, tokens, 8}, at::kDouble),
                     v = random({2, heads, tokens, 8}, at::kDouble);
    const at::Tensor raster = ops::attention(q, k, v, ops::decay_mask(ranks, log_decay));
    // Tokens in the order of the curve, with gamma^|i-j|, and put back.
    const at::Tensor order = ranks.view({-1}).to(at::kLong).argsort();
    const at::Tensor positions = at::arange(tokens, at::kInt).view({1, 1, tokens});
    const auto moved = [&](const at::Tensor& tensor) { return tensor.index_select(2, order).contiguous(); };
    const at::Tensor toeplitz = ops::attention(moved(q), moved(k), moved(v), ops::decay_mask(positions, log_decay));
    EXPECT_LE(difference(toeplitz, moved(raster)), 1e-13) << curve;
  }
}

TEST(Attention, AGainOfOneABiasOfZeroAndAGateOfOneChangeNothing) {
  torch::manual_seed(3);
  const at::Tensor q = random({2, 3, 40, 16}), k = random({2, 3, 40, 16}), v = random({2, 3, 40, 16});
  const at::Tensor one = at::ones({3, 40, 40}), zero = at::zeros({3, 40, 40});
  EXPECT_TRUE(at::equal(ops::attention(q, k, v, one, zero, one), ops::attention(q, k, v)));
}

TEST(Attention, RowsAreAWeightedMeanOfTheValues) {
  torch::manual_seed(4);
  const at::Tensor q = random({2, 2, 33, 8}), k = random({2, 2, 33, 8}), gain = at::rand({2, 33, 33});
  const at::Tensor v = at::full({2, 2, 33, 8}, 0.75);
  EXPECT_LE(difference(ops::attention(q, k, v, gain), v), 3e-7);
}

TEST(Attention, ABiasThatIsConstantAlongARowChangesNothing) {
  torch::manual_seed(5);
  const at::Tensor q = random({1, 2, 20, 8}, at::kDouble), k = random({1, 2, 20, 8}, at::kDouble),
                   v = random({1, 2, 20, 8}, at::kDouble);
  const at::Tensor bias = random({2, 20, 1}, at::kDouble).expand({2, 20, 20});
  EXPECT_LE(difference(ops::attention(q, k, v, {}, bias), ops::attention(q, k, v)), 1e-14);
}

TEST(Attention, ImageBUsesTableBModG) {
  torch::manual_seed(6);
  const at::Tensor q = random({6, 2, 15, 8}), k = random({6, 2, 15, 8}), v = random({6, 2, 15, 8});
  const at::Tensor gain = at::rand({3, 2, 15, 15});
  const at::Tensor out = ops::attention(q, k, v, gain);
  for (std::int64_t b = 0; b < 6; ++b) {
    const auto image = [&](const at::Tensor& tensor) { return tensor.narrow(0, b, 1); };
    EXPECT_LE(difference(ops::attention(image(q), image(k), image(v), gain[b % 3]), image(out)), 1e-6) << b;
  }
}

TEST(Attention, StridedInputsGiveTheSameBits) {
  for (const ops::Path path : ops::cpu_paths()) {
    SCOPED_TRACE(ops::path_name(path));
    const PathGuard guard(path);
    for (const AttentionCase& test_case : attention_cases()) {
      if (test_case.layout == "contiguous") continue;
      const AttentionInputs strided = make_inputs(test_case);
      AttentionInputs dense = strided;
      for (at::Tensor* tensor : {&dense.q, &dense.k, &dense.v}) *tensor = tensor->contiguous();
      const Results a = run(ops::masked_attention, strided), b = run(ops::masked_attention, dense);
      for (const auto& [name, value] : a) {
        // Plain tensor operations may sum in another order for other strides.
        if (path == ops::Path::kReference) {
          EXPECT_LE(difference(value, b.at(name)), 1e-2 * largest(value)) << test_case.name << " " << name;
        } else {
          EXPECT_TRUE(at::equal(value, b.at(name))) << test_case.name << " " << name;
        }
      }
    }
  }
}

// Rows that overlap: what expand() makes, and the gradient of a sum over tokens.
TEST(Attention, TokensMayShareMemory) {
  torch::manual_seed(11);
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t tokens : {1, 9, 70}) {
      const std::vector<std::int64_t> sizes = {2, 2, tokens, 16};
      const at::Tensor one = random({2, 2, 1, 16}, type).expand(sizes);
      const at::Tensor dout = random({2, 2, 1, 16}, type).expand(sizes);
      for (int shared = 0; shared < 4; ++shared) {
        const auto gradients = [&](bool copied) {
          torch::manual_seed(12);
          std::vector<at::Tensor> inputs;
          for (int i = 0; i < 3; ++i) {
            const at::Tensor own = random(sizes, type);
            const at::Tensor input = i == shared ? (copied ? one.clone(at::MemoryFormat::Contiguous) : one) : own;
            inputs.push_back(input.detach().requires_grad_());
          }
          const at::Tensor out = ops::attention(inputs[0], inputs[1], inputs[2]);
          out.backward(copied ? dout.clone(at::MemoryFormat::Contiguous) : dout);
          return std::vector<at::Tensor>{out, inputs[0].grad(), inputs[1].grad(), inputs[2].grad()};
        };
        const auto actual = gradients(false), expected = gradients(true);
        for (std::size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(at::equal(actual[i], expected[i])) << type << " " << tokens << " " << shared << " " << i;
      }
    }
  }
}

TEST(Attention, RowsOfTheMapAndWhatIsAddedBehindTheSoftmaxStayPreciseUnderAutocast) {
  torch::manual_seed(13);
  const at::Tensor q = 3 * random({2, 2, 40, 16}), k = random({2, 2, 40, 16}), v = random({2, 2, 40, 16});
  const at::Tensor lse = std::get<1>(ops::attention_with_lse(q, k, v)), queries = at::arange(40);
  const at::Tensor expected = ops::attention_rows(q, k, lse, queries);
  // 64 times 0.999 less 64 times 1, on top of a mean of 0.
  const at::Tensor zero = at::zeros({1, 1, 128, 8});
  at::Tensor signs = at::ones({1, 1, 128, 8}), after = at::full({1, 128, 128}, 0.999f);
  signs.narrow(2, 64, 64).fill_(-1);
  after.narrow(2, 64, 64).fill_(1);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor rows = ops::attention_rows(q, k, lse, queries);
  const at::Tensor added =
      ops::masked_attention(zero, zero, signs, {.gain = {}, .bias = {}, .gate = {}, .after = after});
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_TRUE(at::equal(rows, expected));
  EXPECT_LE(difference(added, at::full_like(added, -0.064)), 1e-3);
}

TEST(Attention, GradientsInsideOfAutocastAreThoseOutside) {
  torch::manual_seed(14);
  for (const ops::Path path : {ops::Path::kReference, ops::cpu_paths().back()}) {
    const PathGuard guard(path);
    const auto gradients = [&](bool inside) {
      torch::manual_seed(15);
      std::vector<at::Tensor> inputs;
      for (int i = 0; i < 3; ++i) inputs.push_back(random({2, 2, 24, 16}).to(at::kBFloat16).requires_grad_());
      inputs.push_back(at::rand({2, 24, 24}).requires_grad_());
      const at::Tensor out = ops::attention(inputs[0], inputs[1], inputs[2], inputs[3]);
      at::autocast::set_autocast_enabled(at::kCPU, inside);
      auto result = torch::autograd::grad({out.to(at::kFloat).square().sum()}, inputs);
      at::autocast::set_autocast_enabled(at::kCPU, false);
      return result;
    };
    const auto outside = gradients(false), inside = gradients(true);
    for (std::size_t i = 0; i < outside.size(); ++i) EXPECT_TRUE(at::equal(inside[i], outside[i])) << i;
  }
}

TEST(Attention, TablesMayBeExpandedOrTransposed) {
  torch::manual_seed(7);
  const at::Tensor q = random({2, 3, 20, 8}), k = random({2, 3, 20, 8}), v = random({2, 3, 20, 8});
  const at::Tensor row = at::rand({1, 20, 1, 20}).expand({1, 20, 20, 20}).narrow(1, 0, 3);
  EXPECT_TRUE(at::equal(ops::attention(q, k, v, row), ops::attention(q, k, v, row.contiguous())));
  const at::Tensor turned = at::rand({3, 20, 20}).transpose(1, 2);
  EXPECT_TRUE(at::equal(ops::attention(q, k, v, turned), ops::attention(q, k, v, turned.contiguous())));
  const at::Tensor wide = at::rand({3, 20, 40}).narrow(2, 7, 20);
  EXPECT_TRUE(at::equal(ops::attention(q, k, v, wide), ops::attention(q, k, v, wide.contiguous())));
}

TEST(Attention, TablesOfOtherTypesAreConvertedAndGetTheirOwnGradients) {
  torch::manual_seed(8);
  const at::Tensor q = random({2, 3, 20, 8}), k = random({2, 3, 20, 8}), v = random({2, 3, 20, 8});
  for (const at::ScalarType type : {at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor gain = at::rand({3, 20, 20}).to(type).requires_grad_();
    const at::Tensor same = gain.detach().to(at::kFloat).requires_grad_();
    const at::Tensor out = ops::attention(q, k, v, gain), expected = ops::attention(q, k, v, same);
    EXPECT_EQ(out.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(out, expected));
    out.sum().backward();
    expected.sum().backward();
    EXPECT_EQ(gain.grad().scalar_type(), type);
    EXPECT_TRUE(at::equal(gain.grad(), same.grad().to(type)));
  }
}

TEST(Attention, PackedProjectionsGiveTheSameAsTheirParts) {
  torch::manual_seed(9);
  for (const ops::Path path : ops::cpu_paths()) {
    SCOPED_TRACE(ops::path_name(path));
    const PathGuard guard(path);
    const at::Tensor qkv = random({2, 21, 3, 4, 12}).requires_grad_();
    const at::Tensor gain = at::rand({4, 21, 21}).requires_grad_(), gate = at::rand({1, 21, 21}).requires_grad_();
    const at::Tensor dout = random({2, 21, 4, 12});
    const at::Tensor packed = ops::attention_qkv(qkv, gain, {}, gate);
    ASSERT_EQ(packed.sizes(), dout.sizes());
    EXPECT_TRUE(packed.is_contiguous());
    const auto part = [&](std::int64_t i) { return qkv.select(2, i).transpose(1, 2); };
    const at::Tensor apart = ops::attention(part(0), part(1), part(2), gain, {}, gate).transpose(1, 2);
    EXPECT_TRUE(at::equal(packed, apart));
    const auto a = torch::autograd::grad({packed}, {qkv, gain, gate}, {dout});
    const auto b = torch::autograd::grad({apart}, {qkv, gain, gate}, {dout});
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
    EXPECT_TRUE(a[0].is_contiguous());
  }
}

TEST(Attention, RowsOfTheMapMultiplyTheValues) {
  torch::manual_seed(10);
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor q = random({4, 2, 30, 8}).to(type), k = random({4, 2, 17, 8}).to(type),
                     v = random({4, 2, 17, 8}).to(type);
    const at::Tensor gain = at::rand({2, 2, 30, 17}), gate = at::rand({1, 30, 17});
    at::Tensor bias = random({2, 30, 17});
    bias.select(1, 5).fill_(-std::numeric_limits<float>::infinity());
    const auto [out, lse] = ops::attention_with_lse(q, k, v, gain, bias, gate);
    const at::Tensor rows = at::tensor({29, 0, 5, 5, 11}, at::kLong);
    const at::Tensor weights = ops::attention_rows(q, k, lse, rows, gain, bias, gate);
    ASSERT_EQ(weights.sizes(), (at::IntArrayRef{4, 2, 5, 17}));
    const at::Tensor expected = out.index_select(2, rows).to(weights.scalar_type());
    const double tolerance = type == at::kDouble ? 1e-7 : type == at::kFloat ? 2e-6 : 0.02;
    EXPECT_LE(difference(at::matmul(weights, v.to(weights.scalar_type())), expected), tolerance);
    EXPECT_EQ(largest(weights.select(2, 2)), 0);
    EXPECT_EQ(ops::attention_rows(q, k, lse, rows.narrow(0, 0, 0)).size(2), 0);
  }
}

}  // namespace
}  // namespace violin::tests
