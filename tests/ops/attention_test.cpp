// Every case of the table, on every path of this machine, against the truth: the formula in float64, and for inputs in
// float64 in more.
#include <gtest/gtest.h>

#include <limits>

#include "tests/ops/exact.h"
#include "tests/ops/formula.h"

namespace violin::tests {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The criterion: at most twice the error of the plain formula with q, k and v in the same precision and everything else
// in `wide` precision; plus 8 roundings in that precision of the largest value, or of 1, the size of the inputs.
double allowed_error(double plain_error, const at::Tensor& truth, at::ScalarType wide) {
  const double epsilon =
      wide == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  return 2 * plain_error + 8 * epsilon * (largest(truth) + 1);
}

at::ScalarType wide_type(const AttentionCase& test_case) {
  return test_case.dtype == at::kDouble ? at::kDouble : at::kFloat;
}

Results true_results(const AttentionInputs& inputs) {
  if (inputs.q.scalar_type() == at::kDouble) return exact_attention(inputs);
  const AttentionInputs wide = converted(inputs, at::kDouble);
  Results results = run(formula_attention, wide);
  results["lse"] = formula_lse(wide);
  return results;
}

class AttentionCases : public testing::TestWithParam<std::size_t> {};

TEST_P(AttentionCases, ErrorsAreWithinTwiceThePlainFormulas) {
  const AttentionCase& test_case = attention_cases()[GetParam()];
  const AttentionInputs inputs = make_inputs(test_case);
  const Results truth = true_results(inputs), plain = run(formula_attention, inputs);
  for (const ops::Path path : ops::cpu_paths()) {
    SCOPED_TRACE(test_case.name + ", path " + ops::path_name(path));
    const PathGuard guard(path);
    const Results results = run(ops::masked_attention, inputs);
    ASSERT_EQ(results.size(), plain.size());
    for (const auto& [name, actual] : results) {
      ASSERT_EQ(actual.scalar_type(), plain.at(name).scalar_type()) << name;
      ASSERT_EQ(actual.sizes(), truth.at(name).sizes()) << name;
      ASSERT_TRUE(actual.isfinite().all().item<bool>()) << name << " is not finite";
      const double plain_error = difference(plain.at(name), truth.at(name));
      EXPECT_LE(difference(actual, truth.at(name)), allowed_error(plain_error, truth.at(name), wide_type(test_case)))
          << name << ": the formula's error is " << plain_error << ", the largest value " << largest(truth.at(name));
    }
  }
}

// Keeps the criterion honest: a wrong truth would make the formula look bad and forgive everything.
TEST_P(AttentionCases, TheFormulaItselfIsCloseToTheTruth) {
  const AttentionCase& test_case = attention_cases()[GetParam()];
  if (test_case.dtype != at::kDouble) return;
  const AttentionInputs inputs = make_inputs(test_case);
  const Results truth = true_results(inputs);
  for (const auto& [name, value] : run(formula_attention, inputs)) {
    EXPECT_LE(difference(value, truth.at(name)), 1e-14 * test_case.magnitude * (largest(truth.at(name)) + 1)) << name;
  }
}

TEST_P(AttentionCases, LogSumExpIsTheSoftmaxDenominators) {
  const AttentionCase& test_case = attention_cases()[GetParam()];
  const AttentionInputs inputs = make_inputs(test_case);
  const at::Tensor truth = true_results(inputs).at("lse");
  const at::Tensor empty_rows = truth == -kInfinity, finite = truth.masked_fill(empty_rows, 0.0);
  const double plain_error = difference(formula_lse(inputs).masked_fill(empty_rows, 0.0), finite);
  for (const ops::Path path : ops::cpu_paths()) {
    SCOPED_TRACE(test_case.name + ", path " + ops::path_name(path));
    const PathGuard guard(path);
    const auto [out, lse] = ops::attention_with_lse(inputs.q, inputs.k, inputs.v, inputs.tables.gain,
                                                    inputs.tables.bias, inputs.tables.gate, inputs.scale);
    ASSERT_EQ(lse.sizes(), truth.sizes());
    ASSERT_EQ(lse.scalar_type(), wide_type(test_case));
    EXPECT_TRUE(at::equal(empty_rows, lse == -kInfinity));
    EXPECT_LE(difference(lse.masked_fill(empty_rows, 0.0), finite),
              allowed_error(plain_error, finite, wide_type(test_case)));
    // [B,N,h,d] in memory.
    EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
  }
}

INSTANTIATE_TEST_SUITE_P(Table, AttentionCases, testing::Range(std::size_t{0}, attention_cases().size()));

}  // namespace
}  // namespace violin::tests
