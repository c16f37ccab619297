// The layers' own kernels on a GPU against torch's formulas in float64. Skipped where there is none.
#include "tests/nn/helpers.h"
#include "violin/nn/memory.h"
#include "violin/nn/precision.h"
#include "violin/ops/path.h"
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

TEST(Gpu, ABatchThatDoesNotFitIsExplained) {
  NEEDS_A_GPU();
  const auto forward = [](const at::Tensor& images) {
    return at::empty({images.size(0), std::int64_t{4} << 30}, kGpu.dtype(at::kByte));
  };
  try {
    nn::within_memory(at::zeros({256, 1}), "--batch", forward);
    FAIL() << "a terabyte fits";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("into memory"), std::string::npos) << error.what();
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

// The gain that a mask makes packed, for 16 bits, and the table.
TEST(Gpu, PackedTablesAreTheTables) {
  NEEDS_A_GPU();
  if (ops::choose_path(at::kCUDA) == ops::Path::kReference) GTEST_SKIP() << "the reference reads tables alone";
  torch::manual_seed(0);
  nn::ModelConfig config = small_model();
  const std::int64_t heads = config.num_heads;
  for (const char* strategy : {"mul_v1", "mul_v2", "add_v1"}) {
    config.violin = nn::MaskConfig{.strategy = strategy, .init = "spread"};
    nn::VisionTransformer model(config, 1);
    model.to(at::kCUDA);
    nn::Mask& mask = *model.blocks[0]->attn->violin;
    const Size grid = {9, 7};
    EXPECT_FALSE(mask.packed_tables(grid, 1, at::kFloat));
    const auto packed = mask.packed_tables(grid, 1, at::kBFloat16);
    ASSERT_EQ(packed.has_value(), std::string(strategy) != "add_v1");
    if (!packed) continue;
    const auto q = [&] { return at::randn({5, heads, 64, 16}, kGpu).to(at::kBFloat16); };
    const at::Tensor x = q(), y = q(), z = q(), dout = q();
    const auto run = [&](const ops::Tables& tables) {
      for (at::Tensor& parameter : mask.parameters()) parameter.mutable_grad() = at::Tensor();
      const at::Tensor out = ops::masked_attention(x, y, z, tables);
      out.backward(dout);
      std::vector<at::Tensor> results = {out};
      for (const at::Tensor& parameter : mask.parameters()) results.push_back(parameter.grad());
      return results;
    };
    const auto expected = run(mask.tables(grid, 1)), got = run(*packed);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LE(relative_error(got[i].cpu(), expected[i].cpu()), 5e-3) << strategy << ' ' << i;
    // In evaluation without gradients they are kept as tables are.
    const torch::NoGradGuard no_grad;
    model.eval();
    const auto attend = [&] { return ops::masked_attention(x, y, z, *mask.packed_tables(grid, 1, at::kBFloat16)); };
    const auto memory = [&] { return mask.packed_tables(grid, 1, at::kBFloat16)->gain->const_data_ptr(); };
    EXPECT_LE(relative_error(attend().cpu(), expected[0].cpu()), 5e-3);
    EXPECT_EQ(mask.kept_tables(), 1);
    const at::Tensor kept = *mask.packed_tables(grid, 1, at::kBFloat16)->gain;
    EXPECT_EQ(memory(), kept.const_data_ptr());
    mask.packed_tables(grid, 1, at::kHalf);
    mask.tables(grid, 1);
    EXPECT_EQ(mask.kept_tables(), 3);
    mask.alpha.mul_(2);
    EXPECT_NE(memory(), kept.const_data_ptr());
    EXPECT_EQ(mask.kept_tables(), 1);
    mask.alpha.div_(2);
    // Frozen ones stay what they are.
    mask.freeze(grid, 1);
    EXPECT_LE(relative_error(attend().cpu(), expected[0].cpu()), 5e-3);
    EXPECT_EQ(mask.kept_tables(), 2);
    mask.alpha.mul_(2);
    model.train();
    EXPECT_LE(relative_error(attend().cpu(), expected[0].cpu()), 5e-3);
    EXPECT_EQ(memory(), memory());
    model.to(at::kCUDA);  // anew
    EXPECT_EQ(mask.kept_tables(), 1);
    EXPECT_GT(relative_error(attend().cpu(), expected[0].cpu()), 1e-2);
    mask.thaw();
    EXPECT_EQ(mask.kept_tables(), 0);
  }
}

// In 16 bits every parameter of the mask has a gradient, close to that of float32.
TEST(Gpu, MasksLearnIn16Bits) {
  NEEDS_A_GPU();
  nn::ModelConfig config = small_model();
  config.violin = nn::MaskConfig{.init = "spread"};
  nn::VisionTransformer wide(config, 1), narrow(config, 1);
  wide.to(at::kCUDA);
  narrow.to(at::kCUDA);
  const at::Tensor batch = images(16, 32, 32).cuda();
  wide.forward(batch).square().sum().backward();
  {
    const nn::PrecisionScope scope(at::kCUDA, nn::Precision::kBf16);
    narrow.forward(batch).to(at::kFloat).square().sum().backward();
  }
  const auto parameters = narrow.named_parameters();
  for (const auto& item : wide.named_parameters()) {
    if (item.key().find("violin") == std::string::npos) continue;
    const at::Tensor& gradient = parameters[item.key()].grad();
    ASSERT_TRUE(gradient.defined()) << item.key();
    EXPECT_LE(relative_error(gradient.cpu(), item.value().grad().cpu()), 0.1) << item.key();
  }
  // Ranks that inference mode came across first can be trained with.
  nn::VisionTransformer later(config, 1);
  later.to(at::kCUDA);
  later.eval();
  {
    const c10::InferenceMode inference;
    const nn::PrecisionScope scope(at::kCUDA, nn::Precision::kBf16);
    later.forward(batch);
  }
  later.train();
  {
    const nn::PrecisionScope scope(at::kCUDA, nn::Precision::kBf16);
    later.forward(batch).to(at::kFloat).square().sum().backward();
  }
  EXPECT_TRUE(later.blocks[0]->attn->violin->parameters()[0].grad().defined());
  // What is asked about the map is computed from the table itself.
  const torch::NoGradGuard no_grad;
  narrow.eval();
  const nn::PrecisionScope scope(at::kCUDA, nn::Precision::kBf16);
  nn::Observe request;
  request.attention[0] = {.queries = {0, 3}, .heads = {}};
  EXPECT_TRUE(narrow.observe(batch, request).attention.at(0).isfinite().all().item<bool>());
}

}  // namespace
}  // namespace violin::tests
