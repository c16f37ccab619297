// Which gradients are computed, and that they have the same bits every time.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/ops/formula.h"
#include "violin/ops/library.h"

namespace violin::tests {
namespace {

TEST(AttentionGradients, WhatNobodyNeedsIsNotComputed) {
  torch::manual_seed(1);
  const auto heads = [] { return at::randn({2, 3, 18, 8}); };
  const at::Tensor q = heads(), k = heads(), v = heads(), gain = at::rand({3, 18, 18}), gate = at::rand({3, 18, 18});
  const auto [out, lse] = ops::attention_forward(q, k, v, gain, {}, gate, {});
  for (const ops::Path path : ops::cpu_paths()) {
    SCOPED_TRACE(ops::path_name(path));
    const PathGuard guard(path);
    const auto gradients = [&, &out = out, &lse = lse](std::array<bool, 6> need) {
      auto [dq, dk, dv, dgain, dbias, dgate] =
          ops::attention_backward(heads(), q, k, v, gain, {}, gate, out, lse, {}, need);
      return std::array<bool, 6>{dq.defined(),    dk.defined(),    dv.defined(),
                                 dgain.defined(), dbias.defined(), dgate.defined()};
    };
    for (int only = 0; only < 6; ++only) {
      std::array<bool, 6> need{};
      need[only] = true;
      std::array<bool, 6> expected = need;
      expected[4] = false;  // there is no bias
      EXPECT_EQ(gradients(need), expected) << only;
    }
    EXPECT_EQ(gradients({}), (std::array<bool, 6>{}));
  }
}

TEST(AttentionGradients, OneAloneIsTheSameAsAmongAll) {
  AttentionInputs inputs;
  for (const AttentionCase& test_case : attention_cases()) {
    if (test_case.name == "tokens with all tables, queries 130") inputs = make_inputs(test_case);
  }
  ASSERT_TRUE(inputs.q.defined());
  const at::Tensor gain = *inputs.tables.gain, bias = *inputs.tables.bias, gate = *inputs.tables.gate;
  for (const ops::Path path : ops::cpu_paths()) {
    SCOPED_TRACE(ops::path_name(path));
    const PathGuard guard(path);
    const auto [out, lse] = ops::attention_forward(inputs.q, inputs.k, inputs.v, gain, bias, gate, {});
    const auto gradients = [&, &out = out, &lse = lse](std::array<bool, 6> need) {
      auto [dq, dk, dv, dgain, dbias, dgate] =
          ops::attention_backward(inputs.dout, inputs.q, inputs.k, inputs.v, gain, bias, gate, out, lse, {}, need);
      return std::array<at::Tensor, 6>{dq, dk, dv, dgain, dbias, dgate};
    };
    const auto all = gradients({true, true, true, true, true, true});
    for (int only = 0; only < 6; ++only) {
      std::array<bool, 6> need{};
      need[only] = true;
      EXPECT_LE(difference(gradients(need)[only], all[only]), 1e-5 * largest(all[only])) << only;
    }
  }
}

TEST(AttentionGradients, SecondDerivativesAreRefused) {
  const at::Tensor q = at::randn({1, 1, 4, 4}).requires_grad_();
  const at::Tensor out = ops::attention(q, q, q);
  const at::Tensor first = torch::autograd::grad({out.sum()}, {q}, {}, true, true)[0];
  try {
    first.sum().backward();
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("violin::_attention_backward"), std::string::npos) << error.what();
  }
  const at::Tensor log_decay = at::full({8, 2}, -0.1).requires_grad_();
  const at::Tensor mask = ops::decay_mask(published_ranks(12), log_decay);
  const at::Tensor slope = torch::autograd::grad({mask.sum()}, {log_decay}, {}, true, true)[0];
  EXPECT_THROW(slope.sum().backward(), c10::Error);
}

// Runs `compute` with 1, 2 and 3 threads, several times, and expects the same bits.
template <class Compute>
void expect_same_bits(const Compute& compute) {
  const int threads = at::get_num_threads();
  const std::vector<at::Tensor> expected = compute();
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    for (int repetition = 0; repetition < 3; ++repetition) {
      const std::vector<at::Tensor> actual = compute();
      ASSERT_EQ(actual.size(), expected.size());
      for (std::size_t i = 0; i < actual.size(); ++i) {
        EXPECT_TRUE(at::equal(actual[i], expected[i])) << "tensor " << i << " with " << count << " threads";
      }
    }
  }
  at::set_num_threads(threads);
}

TEST(AttentionGradients, HaveTheSameBitsForEveryNumberOfThreads) {
  torch::manual_seed(2);
  struct Sizes {
    std::int64_t batch, heads, queries, keys, dim, groups, table_heads;
  };
  for (const auto& [batch, heads, queries, keys, dim, groups, table_heads] :
       {Sizes{1, 2, 200, 200, 64, 1, 2}, Sizes{20, 3, 65, 65, 32, 1, 3}, Sizes{6, 4, 50, 130, 24, 3, 1},
        Sizes{33, 1, 17, 17, 16, 1, 1}}) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      AttentionInputs inputs;
      inputs.q = at::randn({batch, heads, queries, dim}).to(type);
      inputs.k = at::randn({batch, heads, keys, dim}).to(type);
      inputs.v = at::randn({batch, heads, keys, dim}).to(type);
      inputs.dout = at::randn({batch, heads, queries, dim}).to(type);
      const auto table = [&] { return at::rand({groups, table_heads, queries, keys}); };
      inputs.tables = {table(), table(), table(), {}};
      for (const ops::Path path : ops::cpu_paths()) {
        if (path == ops::Path::kReference) continue;  // as torch's own operations are
        SCOPED_TRACE(ops::path_name(path));
        const PathGuard guard(path);
        expect_same_bits([&] {
          std::vector<at::Tensor> tensors;
          for (const auto& [name, tensor] : run(ops::masked_attention, inputs)) tensors.push_back(tensor);
          return tensors;
        });
      }
    }
  }
}

TEST(DecayMaskGradients, HaveTheSameBitsForEveryNumberOfThreads) {
  torch::manual_seed(3);
  const at::Tensor ranks = published_ranks(90);
  for (const bool log_space : {false, true}) {
    for (const std::int64_t heads : {12, 20}) {
      const at::Tensor log_decay = spread_log_decay(8, heads, -2, 9).to(at::kFloat).requires_grad_();
      const at::Tensor weight = at::rand({8, heads}).requires_grad_();
      const at::Tensor prefix_decay = (-at::rand({heads})).requires_grad_();
      const at::Tensor dmask = at::randn({heads, 92, 92});
      for (const ops::Path path : ops::cpu_paths()) {
        if (path == ops::Path::kReference) continue;
        SCOPED_TRACE(ops::path_name(path));
        const PathGuard guard(path);
        expect_same_bits([&] {
          const at::Tensor mask = ops::decay_mask(ranks, log_decay, weight, 2, prefix_decay, log_space);
          auto tensors = torch::autograd::grad({mask}, {log_decay, weight, prefix_decay}, {dmask});
          tensors.push_back(mask.detach());
          return tensors;
        });
      }
    }
  }
}

}  // namespace
}  // namespace violin::tests
