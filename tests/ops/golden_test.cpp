// Stored values of the five published masking methods: inputs, mask, output and all gradients.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/ops/formula.h"
#include "violin/error.h"

namespace violin::tests {
namespace {

using Json = nlohmann::json;
using Tensors = std::map<std::string, at::Tensor>;

std::vector<char> read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// safetensors: length of the header in 8 bytes, the header as JSON, the data.
Tensors read_tensors(const std::string& path) {
  const std::vector<char> bytes = read_all(path);
  std::uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), 8);
  const Json header = Json::parse(bytes.begin() + 8, bytes.begin() + 8 + static_cast<std::ptrdiff_t>(header_size));
  const std::map<std::string, at::ScalarType> types = {{"F64", at::kDouble}, {"F32", at::kFloat}, {"I64", at::kLong}};
  Tensors tensors;
  for (const auto& [name, entry] : header.items()) {
    const at::Tensor tensor =
        at::empty(entry.at("shape").get<std::vector<std::int64_t>>(), types.at(entry.at("dtype")));
    const std::size_t begin = entry.at("data_offsets").at(0);
    std::memcpy(tensor.mutable_data_ptr(), bytes.data() + 8 + header_size + begin, tensor.nbytes());
    tensors[name] = tensor;
  }
  return tensors;
}

struct Golden {
  Json description;
  Tensors tensors;
};

std::vector<Golden> goldens() {
  const std::string folder = std::string(VIOLIN_GOLDEN_DIR) + "/attention/";
  const std::vector<char> index = read_all(folder + "index.json");
  const Json json = Json::parse(index);
  std::vector<Golden> result;
  for (const Json& description : json.at("cases")) {
    result.push_back({description, read_tensors(folder + description.at("file").get<std::string>())});
  }
  if (result.empty()) throw Error(folder + "index.json lists nothing");
  return result;
}

// All computations in `type`.
Tensors compute(const Golden& golden, at::ScalarType type) {
  const Json& about = golden.description;
  const auto input = [&](const char* name) { return golden.tensors.at(name).to(type); };
  const bool learned = about.at("decay") == "learned";
  const at::Tensor q = input("q").requires_grad_(), k = input("k").requires_grad_(), v = input("v").requires_grad_();
  const at::Tensor alpha = input("alpha").requires_grad_();
  const at::Tensor beta = learned ? input("beta").requires_grad_() : at::Tensor();
  const at::Tensor log_decay = learned ? -at::softplus(-beta) : input("gamma").log();
  const at::Tensor ranks = golden.tensors.at("rank").to(at::kInt);
  const at::Tensor mask = ops::decay_mask(ranks, log_decay, {}, about.at("class_token").get<bool>() ? 1 : 0);
  const ops::Tables tables = ops::compose(ops::parse_strategy(about.at("method").get<std::string>()), mask, alpha);
  const at::Tensor out = ops::masked_attention(q, k, v, tables, about.at("qk_scale").get<double>());
  std::vector<at::Tensor> leaves = {q, k, v, alpha};
  if (learned) leaves.push_back(beta);
  const auto gradients = torch::autograd::grad({out}, leaves, {input("dO")}, std::nullopt, false, true);
  Tensors results = {
      {"M", mask.detach()}, {"O", out.detach()}, {"dq", gradients[0]}, {"dk", gradients[1]}, {"dv", gradients[2]}};
  if (about.at("alpha_learned").get<bool>()) results["dalpha"] = gradients[3];
  if (learned) results["dbeta"] = gradients[4];
  return results;
}

TEST(Golden, EveryCaseAgreesInFloat64) {
  for (const ops::Path path : ops::cpu_paths()) {
    const PathGuard guard(path);
    for (const Golden& golden : goldens()) {
      for (const auto& [name, value] : compute(golden, at::kDouble)) {
        const at::Tensor& expected = golden.tensors.at(name);
        ASSERT_EQ(value.sizes(), expected.sizes());
        EXPECT_LE(difference(value, expected), 1e-12 * std::max(1.0, largest(expected)))
            << golden.description.at("name") << " " << name << ", path " << ops::path_name(path);
      }
    }
  }
}

TEST(Golden, EveryCaseAgreesInFloat32WithinTwiceAPlainEvaluation) {
  for (const ops::Path path : ops::cpu_paths()) {
    const PathGuard guard(path);
    for (const Golden& golden : goldens()) {
      const Json& yardstick = golden.description.at("float32_reference_max_abs_error");
      for (const auto& [name, value] : compute(golden, at::kFloat)) {
        if (!yardstick.contains(name)) continue;
        const at::Tensor& expected = golden.tensors.at(name);
        const double allowed = 2 * yardstick.at(name).get<double>() + 4e-7 * std::max(1.0, largest(expected));
        EXPECT_LE(difference(value, expected), allowed)
            << golden.description.at("name") << " " << name << ", path " << ops::path_name(path);
      }
    }
  }
}

TEST(Golden, GradientOfBetaAt18IsRelativelyExact) {
  int seen = 0;
  for (const Golden& golden : goldens()) {
    if (golden.description.at("name") != "beta_18_cls_8x8") continue;
    ++seen;
    const at::Tensor& expected = golden.tensors.at("dbeta");
    // Sums over pairs cancel to a fraction of their terms: relative to the largest entry of the same head.
    const at::Tensor unit = expected.abs().amax(0, true);
    for (const ops::Path path : ops::cpu_paths()) {
      const PathGuard guard(path);
      for (const auto& [type, tolerance] : {std::pair{at::kFloat, 1e-4}, std::pair{at::kDouble, 1e-9}}) {
        const at::Tensor actual = compute(golden, type).at("dbeta").to(at::kDouble);
        EXPECT_LE(largest((actual - expected) / unit), tolerance) << ops::path_name(path);
      }
    }
  }
  EXPECT_EQ(seen, 1);
}

}  // namespace
}  // namespace violin::tests
