#include "violin/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/checkpoint/craft.h"
#include "tests/temporary_folder.h"

namespace violin::checkpoint {
namespace {

at::Tensor of_dtype(at::ScalarType dtype) {
  const at::Tensor raw = at::arange(48, at::kByte) * 5 % 97;
  if (dtype == at::kBool) return (raw % 2).to(at::kBool).reshape({6, 8});
  return raw.view(dtype).reshape({2, -1});
}

TEST(Safetensors, RoundTripsEveryDtypeMetadataAndShape) {
  const TemporaryFolder folder;
  NamedTensors tensors;
  for (int i = 0; i <= static_cast<int>(DType::kC128); ++i) {
    const DTypeInfo& type = info(static_cast<DType>(i));
    if (!type.safetensors.empty()) tensors.emplace_back(std::string(type.torch), of_dtype(scalar_type(type.dtype)));
  }
  tensors.emplace_back("scalar", at::scalar_tensor(3.5));
  tensors.emplace_back("none", at::empty({0, 4}));
  tensors.emplace_back("odd", at::ones({3}, at::kByte));
  const Metadata metadata = {{"class \"names\"", "[\"cat\\n\", \"Hündin\"]"}, {"format", "pt"}};
  save_safetensors(folder.path() / "a.safetensors", tensors, metadata);

  const TensorFile file = TensorFile::open(folder.path() / "a.safetensors");
  EXPECT_EQ(file.format(), FileFormat::kSafetensors);
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(file.list().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor got = file.tensor(name);
    ASSERT_EQ(got.scalar_type(), tensor.scalar_type()) << name;
    ASSERT_EQ(got.sizes(), tensor.sizes()) << name;
    if (tensor.nbytes() == 0) continue;
    EXPECT_EQ(std::memcmp(got.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()), 0) << name;
  }
}

TEST(Safetensors, WritesTheValuesOfAnyStridesAndGradients) {
  const TemporaryFolder folder;
  const at::Tensor base = at::arange(24, at::kFloat).view({4, 6});
  const at::Tensor last = at::arange(48, at::kFloat).view({2, 3, 2, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  at::Tensor trained = at::ones({2});
  trained.set_requires_grad(true);
  save_safetensors(folder.path() / "a", {{"t", base.t()}, {"s", base.slice(1, 1, 6, 2)}, {"c", last}, {"g", trained}});
  const TensorFile file = TensorFile::open(folder.path() / "a");
  EXPECT_TRUE(at::equal(file.tensor("t"), base.t()));
  EXPECT_TRUE(at::equal(file.tensor("s"), base.slice(1, 1, 6, 2)));
  EXPECT_TRUE(at::equal(file.tensor("c"), last));
  EXPECT_TRUE(file.tensor("c").is_contiguous());
  EXPECT_FALSE(file.tensor("g").requires_grad());
}

TEST(Safetensors, BytesDoNotDependOnTheOrderOfTensors) {
  const TemporaryFolder folder;
  const at::Tensor a = at::ones({3});
  const at::Tensor b = at::ones({5}, at::kByte);
  const at::Tensor c = at::ones({2}, at::kLong);
  save_safetensors(folder.path() / "1", {{"a", a}, {"b", b}, {"c", c}}, {{"k", "v"}});
  save_safetensors(folder.path() / "2", {{"c", c}, {"b", b}, {"a", a}}, {{"k", "v"}});
  EXPECT_EQ(contents(folder.file("1")), contents(folder.file("2")));
}

TEST(Safetensors, DataIsAlignedSoThatTensorsAreViewsOfTheFile) {
  const TemporaryFolder folder;
  save_safetensors(folder.path() / "a", {{"w", at::ones({4})}, {"flag", at::ones({3}, at::kByte)}});
  const std::string text = contents(folder.file("a"));
  std::uint64_t header = 0;
  std::memcpy(&header, text.data(), 8);
  EXPECT_EQ((8 + header) % 64, 0U);

  const TensorFile file = TensorFile::open(folder.path() / "a");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.tensor("w").const_data_ptr()) % 64, 0U);
  EXPECT_EQ(file.tensor("w").const_data_ptr(), file.tensor("w").const_data_ptr());  // no copy was made
}

TEST(Safetensors, TensorsOutliveTheirFileAndWritesStayPrivate) {
  const TemporaryFolder folder;
  const std::string path = folder.file("a");
  save_safetensors(path, {{"w", at::ones({4})}});
  const std::string before = contents(path);
  at::Tensor view;
  at::Tensor copy;
  {
    view = TensorFile::open(path).tensor("w");
    copy = TensorFile::open(path, {.copy = true}).tensor("w");
  }
  view.add_(1);
  EXPECT_EQ(contents(path), before);
  std::filesystem::remove(path);
  EXPECT_EQ(view.sum().item<float>(), 8.0F);
  EXPECT_EQ(copy.sum().item<float>(), 4.0F);
}

TEST(Safetensors, OverwritesTheFileThatItsTensorsComeFrom) {
  const TemporaryFolder folder;
  const std::string path = folder.file("a");
  save_safetensors(path, {{"w", at::arange(1000)}});
  const at::Tensor old = TensorFile::open(path).tensor("w");
  save_safetensors(path, {{"w", old.slice(0, 0, 10)}});
  EXPECT_EQ(old.sum().item<std::int64_t>(), 499500);
  EXPECT_EQ(TensorFile::open(path).tensor("w").numel(), 10);
  EXPECT_EQ(folder.entries(), 1U);
}

TEST(Safetensors, UnalignedTensorsAreReadAllTheSame) {
  const TemporaryFolder folder;
  const float value = 2.5F;
  put(folder.file("a"), safetensors(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                    R"("f":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
                                    "\x07" + little(value)));
  EXPECT_EQ(TensorFile::open(folder.path() / "a").tensor("f").item<float>(), value);
}

TEST(Safetensors, WriterNamesWhatItCannotSave) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a";
  const auto refused = [&](const NamedTensors& tensors) {
    const std::string message = error_of([&] { save_safetensors(path, tensors); });
    EXPECT_EQ(folder.entries(), 0U);
    return message;
  };
  EXPECT_TRUE(has(refused({{"twice", at::ones({1})}, {"twice", at::ones({1})}}), "'twice'"));
  EXPECT_TRUE(has(refused({{"missing", at::Tensor()}}), "'missing'"));
  EXPECT_TRUE(has(refused({{"z", at::ones({1}, at::kComplexDouble)}}), "'z'"));
  EXPECT_TRUE(has(refused({{"s", at::ones({2, 2}).to_sparse()}}), "'s'"));
  EXPECT_TRUE(has(refused({{"__metadata__", at::ones({1})}}), "__metadata__"));
  EXPECT_TRUE(has(refused({{"\xff", at::ones({1})}}), "\\xff"));
}

TEST(Safetensors, BytesThatAreNoBoolAreRefusedByName) {
  const TemporaryFolder folder;
  put(folder.file("a"), safetensors(R"({"mask":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})", "\x01\x02"));
  const TensorFile file = TensorFile::open(folder.path() / "a");
  EXPECT_TRUE(has(error_of([&] { file.tensor("mask"); }), "'mask'"));
}

// One tensor "w" with the given fields, over 8 bytes of data.
std::string refusal(const std::string& fields) {
  const std::string message = parse_error(safetensors("{\"w\":{" + fields + "}}", "12345678"));
  EXPECT_TRUE(has(message, "'evil.bin'"));
  EXPECT_TRUE(has(message, "'w'"));
  return message;
}

TEST(SafetensorsHeader, WrongFieldsAreNamed) {
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0,9])"), "data_offsets [0,9]"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "backwards"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"), "data_offsets"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615])"), "data_offsets"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0,1e30])"), "data_offsets"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), "data_offsets"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), "shape [3]"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), "'shape'"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])"), "shape"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0])"), "shape"));
  EXPECT_TRUE(has(refusal(R"("dtype":"Q4","shape":[2],"data_offsets":[0,8])"), "'Q4'"));
  EXPECT_TRUE(has(refusal(R"("dtype":7,"shape":[2],"data_offsets":[0,8])"), "'dtype'"));
  EXPECT_TRUE(has(refusal(R"("shape":[2],"data_offsets":[0,8])"), "dtype"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","data_offsets":[0,8])"), "shape"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[2])"), "data_offsets"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","dtype":"F64","shape":[2],"data_offsets":[0,8])"), "'dtype'"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"packing":1)"), "'packing'"));
  EXPECT_TRUE(has(refusal(R"("dtype":"F32","shape":{"a":2},"data_offsets":[0,8])"), "'shape'"));
  std::string many = "1";
  for (int i = 0; i < 80; ++i) many += ",1";
  EXPECT_TRUE(has(refusal(R"("dtype":"F64","shape":[)" + many + R"(],"data_offsets":[0,8])"), "'shape'"));
}

TEST(SafetensorsHeader, DataMustBeCoveredExactly) {
  const std::string a = R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  const auto with = [&](const std::string& other) {
    return parse_error(safetensors("{" + a + other + "}", "12345678"));
  };
  EXPECT_TRUE(has(with(R"(,"b":{"dtype":"U8","shape":[5],"data_offsets":[3,8]})"), "'b' overlaps"));
  EXPECT_TRUE(has(with(R"(,"b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]})"), "'b' leaves a hole"));
  EXPECT_TRUE(has(with(R"(,"b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]})"), "8 bytes"));
  EXPECT_TRUE(has(with(R"(,"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]})"), "'a' occurs twice"));
}

TEST(SafetensorsHeader, BrokenHeadersAreRefused) {
  const std::string lone = little<std::uint64_t>(100) + "{}";
  EXPECT_TRUE(has(parse_error(lone), "length 100"));
  EXPECT_TRUE(has(parse_error(little<std::uint64_t>(UINT64_MAX) + "{}"), "length"));
  EXPECT_TRUE(has(parse_error(little<std::uint64_t>(0) + "{}"), "JSON"));
  EXPECT_TRUE(has(parse_error(safetensors("{\"a\":")), "JSON"));
  EXPECT_TRUE(has(parse_error(safetensors("{} x")), "JSON"));
  EXPECT_TRUE(has(parse_error(safetensors("{\"\xff\":{}}")), "JSON"));
  EXPECT_TRUE(has(parse_error(safetensors("{\"a\":[]}")), "'a'"));
  EXPECT_TRUE(has(parse_error(safetensors("{\"a\":{}}")), "'a'"));
  EXPECT_TRUE(has(parse_error(safetensors(R"({"__metadata__":{"k":1}})")), "'k'"));
  EXPECT_TRUE(has(parse_error(safetensors(R"({"__metadata__":{"k":"1","k":"2"}})")), "'k'"));
  // A million brackets must cost neither stack nor time.
  EXPECT_TRUE(has(parse_error(safetensors("{\"a\":" + std::string(1000000, '['))), "'a'"));
  EXPECT_TRUE(has(parse_error(safetensors("{\"a\":{\"shape\":" + std::string(1000000, '['))), "'a'"));
}

TEST(SafetensorsHeader, NamesInMessagesCannotSteerATerminal) {
  const std::string message = parse_error(safetensors("{\"\\u001b[31m\\n" + std::string(500, 'x') + "\":1}"));
  EXPECT_TRUE(has(message, "\\x1b[31m\\x0a"));
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_LT(message.size(), 300U);
}

TEST(SafetensorsHeader, OfAnyLengthIsToldFromAPickle) {
  for (const std::size_t length : {128, 640, 1152}) {  // 0x80, 0x280, 0x480: how pickles begin
    const std::string text = safetensors("{}" + std::string(length - 2, ' '));
    EXPECT_EQ(parse_document(bytes_of(text), "a").format, FileFormat::kSafetensors);
    EXPECT_TRUE(has(parse_error(text.substr(0, 100)), "header"));
  }
}

TEST(SafetensorsHeader, EmptyFileOfNoTensorsIsValid) {
  const std::string text = safetensors("{}   ");
  EXPECT_TRUE(flatten(parse_document(bytes_of(text), "a").root).empty());
}

}  // namespace
}  // namespace violin::checkpoint
