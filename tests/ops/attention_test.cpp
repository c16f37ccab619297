// Every case of the table, on every path of this machine, against float64.
#include <gtest/gtest.h>

#include <limits>

#include "tests/ops/formula.h"

namespace violin::tests {
namespace {

double epsilon(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kFloat:
      return std::numeric_limits<float>::epsilon();
    case at::kHalf:
      return 0x1p-10;
    default:
      return 0x1p-7;
  }
}

// The error may be twice that of the plain formula in the same precision, plus roundings that no kernel avoids: of a
// result in its type, and of numbers that cancel to less than the terms they are made of.
void expect_within_criterion(const AttentionCase& test_case, double largest_logit, const std::string& what,
                             const at::Tensor& actual, double plain_error, const at::Tensor& truth) {
  ASSERT_EQ(actual.sizes(), truth.sizes()) << what;
  ASSERT_TRUE(actual.isfinite().all().item<bool>()) << what << " is not finite";
  const at::ScalarType type = actual.scalar_type();
  const bool is_wide = type == at::kFloat || type == at::kDouble;
  double rounding = is_wide ? 8 * epsilon(type) : epsilon(type) / 2;
  // Weights come back from a saved log-sum-exp, which resolves its own last bit only.
  if (test_case.magnitude > 1 && what != "out") rounding += 8 * epsilon(type) * largest_logit;
  const double terms = test_case.magnitude > 1 && (what == "dk" || what == "dgain") ? largest_logit : 1.0;
  const double cancelled = 8 * epsilon(type == at::kDouble ? at::kDouble : at::kFloat) * terms;
  EXPECT_LE(difference(actual, truth), 2 * plain_error + rounding * largest(truth) + cancelled)
      << what << ": the formula's error is " << plain_error << ", the largest value " << largest(truth);
}

// scale QK^T in float64.
at::Tensor scaled_products(const AttentionCase& test_case, const AttentionInputs& wide) {
  const double scale = wide.scale.value_or(1.0 / std::sqrt(static_cast<double>(test_case.dim)));
  return at::matmul(wide.q, wide.k.transpose(2, 3)) * scale;
}

class AttentionCases : public testing::TestWithParam<std::size_t> {};

TEST_P(AttentionCases, ErrorsAreWithinTwiceThePlainFormulas) {
  const AttentionCase& test_case = attention_cases()[GetParam()];
  const AttentionInputs inputs = make_inputs(test_case);
  const AttentionInputs wide = converted(inputs, at::kDouble);
  const double largest_logit = largest(scaled_products(test_case, wide));
  const Results truth = run(formula_attention, wide);
  const Results plain = run(formula_attention, inputs), saved = run_from_saved_output(inputs);
  for (const ops::Path path : ops::cpu_paths()) {
    SCOPED_TRACE(test_case.name + ", path " + ops::path_name(path));
    const PathGuard guard(path);
    const Results actual = run(ops::masked_attention, inputs);
    ASSERT_EQ(actual.size(), truth.size());
    for (const auto& [name, value] : actual) {
      ASSERT_EQ(value.scalar_type(), plain.at(name).scalar_type()) << name;
      double plain_error = difference(plain.at(name), truth.at(name));
      if (test_case.strategy != "add_after_sm") {
        plain_error = std::max(plain_error, difference(saved.at(name), truth.at(name)));
      }
      expect_within_criterion(test_case, largest_logit, name, value, plain_error, truth.at(name));
    }
  }
}

TEST_P(AttentionCases, LogSumExpIsTheSoftmaxDenominators) {
  const AttentionCase& test_case = attention_cases()[GetParam()];
  const AttentionInputs inputs = make_inputs(test_case);
  const AttentionInputs wide = converted(inputs, at::kDouble);
  const auto for_batch = [&](const at::Tensor& table) {
    return table.dim() == 3 ? table.unsqueeze(0) : table.repeat({test_case.batch / table.size(0), 1, 1, 1});
  };
  at::Tensor z = scaled_products(test_case, wide);
  const double largest_logit = largest(z);
  if (wide.tables.gain.has_value()) z = z * for_batch(*wide.tables.gain);
  if (wide.tables.bias.has_value()) z = z + for_batch(*wide.tables.bias);
  const at::Tensor expected = at::logsumexp(z, -1);
  for (const ops::Path path : ops::cpu_paths()) {
    SCOPED_TRACE(test_case.name + ", path " + ops::path_name(path));
    const PathGuard guard(path);
    const auto [out, lse] = ops::attention_with_lse(inputs.q, inputs.k, inputs.v, inputs.tables.gain,
                                                    inputs.tables.bias, inputs.tables.gate, inputs.scale);
    ASSERT_EQ(lse.sizes(), expected.sizes());
    ASSERT_EQ(lse.scalar_type(), test_case.dtype == at::kDouble ? at::kDouble : at::kFloat);
    const at::Tensor empty_rows = expected == -std::numeric_limits<double>::infinity();
    EXPECT_TRUE(at::equal(empty_rows, lse == -std::numeric_limits<double>::infinity()));
    const at::Tensor error = (lse.to(at::kDouble) - expected).masked_fill(empty_rows, 0.0);
    const double unit = epsilon(lse.scalar_type());
    EXPECT_LE(largest(error), unit * (16 * largest_logit + 16));
    // [B,N,h,d] in memory.
    EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
  }
}

INSTANTIATE_TEST_SUITE_P(Table, AttentionCases, testing::Range(std::size_t{0}, attention_cases().size()));

}  // namespace
}  // namespace violin::tests
