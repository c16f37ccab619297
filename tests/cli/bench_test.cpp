// violin bench, briefly: what it measures is there and positive. How fast things are is no test's business.
#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/cli/training.h"

namespace violin {
namespace {

nlohmann::json measured(const std::vector<std::string>& arguments) {
  const Outcome outcome = run_violin(with(arguments, {"--json", "--seconds", "0.01"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return nlohmann::json::parse(outcome.out);
}

using BenchCommand = Training;

TEST_F(BenchCommand, AttentionStandsBesideTorchAndTheFormula) {
  const nlohmann::json report = measured({"bench", "attention", "--shape", "1,2,9,8", "--threads", "1"});
  const nlohmann::json& shape = report.at("attention").at(0);
  EXPECT_EQ(shape.at("shape"), nlohmann::json({1, 2, 9, 8}));
  for (const char* row : {"sdpa", "violin", "violin gain", "formula"}) {
    ASSERT_TRUE(shape.at("rows").contains(row)) << report.dump();
    for (const char* pass : {"forward", "both"}) EXPECT_GT(shape.at("rows").at(row).at(pass).at("median_ms"), 0) << row;
  }
  EXPECT_DOUBLE_EQ(shape.at("rows").at("sdpa").at("both_ratio").get<double>(), 1);
  EXPECT_GT(report.at("decay_mask").at("ratio"), 0);
}

TEST_F(BenchCommand, AModelStandsBesideItsTwinWithoutAMaskAndThatWithTorchsAttention) {
  const nlohmann::json report =
      measured({"bench", "model", "--config", file("model.json"), "--batch", "2", "--threads", "1", "--adapters"});
  std::vector<std::string> names;
  for (const nlohmann::json& row : report.at("rows")) {
    names.push_back(row.at("name"));
    EXPECT_GT(row.at("infer_ms"), 0) << names.back();
    EXPECT_GT(row.at("train_ms"), 0) << names.back();
  }
  EXPECT_EQ(names, (std::vector<std::string>{"vanilla", "violin", "torch", "lora", "dora"}));
  EXPECT_DOUBLE_EQ(report.at("rows").at(0).at("train_ratio").get<double>(), 1);
}

TEST_F(BenchCommand, DataCountsTheImagesThatItLeavesOut) {
  std::ofstream(folder_.path() / "data/train/class_0/broken.png") << "\x89PNG\r\n\x1a\nnothing";
  const nlohmann::json report =
      measured({"bench", "data", "--data", file("data"), "--size", "16x24", "--workers", "1"});
  EXPECT_EQ(report.at("images"), 40);
  EXPECT_EQ(report.at("bad_images"), 1);
  EXPECT_EQ(report.at("size"), nlohmann::json({16, 24}));
  for (const char* step : {"decode", "eval", "finetune", "deit"})
    EXPECT_GT(report.at("images_per_second_per_core").at(step), 0) << step;
  EXPECT_GT(report.at("loader").at("images_per_second"), 0);
}

}  // namespace
}  // namespace violin
