// The layers' own kernels on a GPU against torch's formulas in float64. Skipped where there is none.
#include "tests/nn/helpers.h"
#include "violin/ops/rows.h"

namespace violin::tests {
namespace {

#define NEEDS_A_GPU() \
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device"

const at::TensorOptions kGpu = at::TensorOptions(at::kCUDA).dtype(at::kFloat);

TEST(Gpu, LayerNormAndItsGradientsAreTorchs) {
  NEEDS_A_GPU();
  torch::manual_seed(0);
  for (const std::int64_t columns : {4, 100, 192, 384, 768, 1000, 1024}) {
    for (const std::int64_t rows : {1, 7, 1000, 40000}) {
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        const at::Tensor x = at::randn({rows, columns}, kGpu) * 3 + 1;
        const at::Tensor weight = at::randn({columns}, kGpu), bias = at::randn({columns}, kGpu);
        const at::Tensor dy = at::randn({rows, columns}, kGpu).to(type);
        ASSERT_TRUE(ops::has_row_kernels(x));
        const auto [y, mean, rstd] = ops::layer_norm(x, weight, bias, 1e-6, type);
        const auto [dx, dweight, dbias] = ops::layer_norm_backward(dy, x, mean, rstd, weight);
        const auto leaf = [](const at::Tensor& tensor) { return tensor.to(at::kDouble).detach().requires_grad_(); };
        const at::Tensor x64 = leaf(x), w64 = leaf(weight), b64 = leaf(bias);
        const at::Tensor y64 = at::layer_norm(x64, {columns}, w64, b64, 1e-6);
        y64.backward(dy.to(at::kDouble));
        const double fine = 2e-5, coarse = type == at::kFloat ? fine : 4e-3;
        EXPECT_EQ(y.scalar_type(), type);
        EXPECT_LE(relative_error(y, y64), coarse) << rows << " x " << columns;
        EXPECT_LE(relative_error(dx, x64.grad()), fine) << rows << " x " << columns;
        EXPECT_LE(relative_error(dweight, w64.grad()), fine) << rows << " x " << columns;
        EXPECT_LE(relative_error(dbias, b64.grad()), fine) << rows << " x " << columns;
        const auto again = ops::layer_norm_backward(dy, x, mean, rstd, weight);
        EXPECT_TRUE(at::equal(std::get<1>(again), dweight));
      }
    }
  }
}

TEST(Gpu, ColumnSumsAreTorchs) {
  NEEDS_A_GPU();
  torch::manual_seed(0);
  for (const std::int64_t columns : {4, 100, 576, 1152, 3072}) {
    for (const std::int64_t rows : {0, 1, 33, 50000}) {
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const at::Tensor x = at::randn({rows, columns}, kGpu).to(type);
        EXPECT_LE(relative_error(ops::column_sums(x), x.to(at::kDouble).sum(0)), 2e-5) << rows << " x " << columns;
      }
    }
  }
}

// Outputs and all gradients of a model in float32.
TEST(Gpu, ModelsAgreeWithTheCpu) {
  NEEDS_A_GPU();
  nn::ModelConfig config = small_model();
  config.violin = nn::MaskConfig{};
  for (const bool class_token : {false, true}) {
    config.class_token = class_token;
    config.global_pool = class_token ? "token" : "avg";
    nn::VisionTransformer on_cpu(config, 1), on_gpu(config, 1);
    on_gpu.to(at::kCUDA);
    const at::Tensor batch = images(6, 32, 32);
    const at::Tensor expected = on_cpu.forward(batch);
    const at::Tensor got = on_gpu.forward(batch.cuda());
    EXPECT_LE(relative_error(got.cpu(), expected), 2e-3);  // TF32 products may be on
    expected.square().sum().backward();
    got.square().sum().backward();
    const auto parameters = on_gpu.named_parameters();
    for (const auto& item : on_cpu.named_parameters()) {
      const at::Tensor& gradient = parameters[item.key()].grad();
      ASSERT_TRUE(gradient.defined()) << item.key();
      EXPECT_LE(relative_error(gradient.cpu(), item.value().grad()), 2e-2) << item.key();
    }
  }
}

}  // namespace
}  // namespace violin::tests
