// Files that Python wrote: models as torch.save and safetensors, and one tree of everything in every protocol.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/checkpoint/craft.h"
#include "violin/checkpoint/checkpoint.h"

namespace violin::checkpoint {
namespace {

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor left = a.contiguous();
  const at::Tensor right = b.contiguous();
  return left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

const Dict& dict_at(const Value& value, std::string_view key) {
  const auto* dict = value.get_if<Dict>();
  const Value* found = dict == nullptr ? nullptr : dict->find(key);
  if (found == nullptr || !found->is<Dict>()) throw Error("no dictionary " + std::string(key));
  return *found->get_if<Dict>();
}

void expect_equal(const NamedTensors& got, const TensorFile& expected) {
  const NamedTensors want = expected.tensors();
  EXPECT_EQ(got.size(), want.size());
  for (const auto& [name, tensor] : want) {
    const auto found = std::find_if(got.begin(), got.end(), [&](const auto& entry) { return entry.first == name; });
    ASSERT_NE(found, got.end()) << name;
    EXPECT_TRUE(same_bits(found->second, tensor)) << name;
  }
}

TEST(ModelFiles, PlainStateDictEqualsItsSafetensorsTwin) {
  const TensorFile file = TensorFile::open(golden("models/deit.plain.pth"));
  EXPECT_EQ(file.format(), FileFormat::kTorchZip);
  expect_equal(file.tensors(), TensorFile::open(golden("models/deit.weights.safetensors")));
}

TEST(ModelFiles, WrappedStateDictKeepsChannelsLastStrides) {
  const TensorFile file = TensorFile::open(golden("models/gap_fc_norm.model.pth"));
  const Value* model = file.root().get_if<Dict>()->find("model");
  ASSERT_NE(model, nullptr);
  expect_equal(file.tensors(*model), TensorFile::open(golden("models/gap_fc_norm.weights.safetensors")));
  const at::Tensor patches = file.tensor("model.patch_embed.proj.weight");
  EXPECT_FALSE(patches.is_contiguous());
  EXPECT_TRUE(patches.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_NE(file.root().get_if<Dict>()->find("epoch")->get_if<std::int64_t>(), nullptr);
}

TEST(ModelFiles, DinoTeacherEqualsItsTwinAndArgumentsAreReadable) {
  const TensorFile file = TensorFile::open(golden("models/dino_backbone.dino.pth"));
  const TensorFile twin = TensorFile::open(golden("models/dino_backbone.weights.safetensors"));
  const Value* teacher = file.root().get_if<Dict>()->find("teacher");
  ASSERT_NE(teacher, nullptr);
  NamedTensors backbone;
  const std::string prefix = "module.backbone.";
  for (const auto& [name, tensor] : file.tensors(*teacher)) {
    if (name.starts_with(prefix)) backbone.emplace_back(name.substr(prefix.size()), tensor);
  }
  expect_equal(backbone, twin);

  const auto* args = file.root().get_if<Dict>()->find("args")->get_if<Object>();
  ASSERT_NE(args, nullptr);
  EXPECT_EQ(args->class_name, "argparse.Namespace");
  ASSERT_NE(args->attributes(), nullptr);
  EXPECT_FALSE(args->attributes()->items.empty());
  EXPECT_TRUE(file.tensor("dino_loss.center").defined());
}

class EveryProtocol : public ::testing::TestWithParam<const char*> {
 protected:
  TensorFile file_ = TensorFile::open(golden(std::string("checkpoint/") + GetParam()));
  const Dict& extras() { return dict_at(file_.root(), "extras"); }
  template <typename T>
  T extra(const char* name) {
    const Value* value = extras().find(name);
    if (value == nullptr || !value->is<T>()) throw Error(std::string("no such ") + name);
    return *value->get_if<T>();
  }
};

TEST_P(EveryProtocol, GivesTensorsOfAllDtypesAndStridesBitForBit) {
  expect_equal(file_.tensors(), TensorFile::open(golden("checkpoint/tensors.safetensors")));
}

TEST_P(EveryProtocol, CopiesEqualViews) {
  const TensorFile copy = TensorFile::open(golden(std::string("checkpoint/") + GetParam()), {.copy = true});
  expect_equal(copy.tensors(), TensorFile::open(golden("checkpoint/tensors.safetensors")));
}

TEST_P(EveryProtocol, TensorsOnOneStorageShareMemory) {
  at::Tensor base = file_.tensor("views.base");
  const at::Tensor inner = file_.tensor("views.inner");  // rows 1 and 2, columns 2 to 4, of 4 x 6
  EXPECT_TRUE(base.storage().is_alias_of(inner.storage()));
  base[8] = 100.0;
  EXPECT_EQ(inner[0][0].item<float>(), 100.0F);
  EXPECT_EQ(file_.tensor("views.expanded").stride(0), 0);
}

TEST_P(EveryProtocol, GivesNumbersTextAndContainers) {
  EXPECT_EQ(extra<std::int64_t>("epoch"), 300);
  EXPECT_EQ(extra<std::int64_t>("negative"), -70000);
  EXPECT_EQ(extra<std::int64_t>("wide"), (std::int64_t{1} << 40) + 1);
  EXPECT_EQ(extra<Object>("huge").class_name, "int");
  EXPECT_EQ(extra<double>("loss"), 0.125);
  EXPECT_FALSE(extra<bool>("done"));
  EXPECT_TRUE(extras().find("nothing")->is<None>());
  EXPECT_EQ(extra<std::string>("name"), "Größe ✓");
  EXPECT_EQ(extra<Bytes>("raw").data, std::string("\x00\xff", 2) + "bytes");
  EXPECT_EQ(extra<Bytes>("array").data, "abc");
  EXPECT_EQ(extras().find("numbers")->kind_name(), "set");
  EXPECT_EQ(extra<List>("numbers").items.size(), 2U);
  EXPECT_EQ(extras().find("shape")->kind_name(), "tuple");
  EXPECT_EQ(*extra<List>("shape").items[1].get_if<std::int64_t>(), 3);
  EXPECT_EQ(extra<Dict>("counts").items.size(), 1U);
  EXPECT_EQ(extra<List>("schedule").items.size(), 3U);
}

TEST_P(EveryProtocol, GivesInertObjectsAsPlainData) {
  EXPECT_EQ(extra<double>("best"), 81.5);
  EXPECT_EQ(extra<std::int64_t>("steps"), -12);
  EXPECT_TRUE(extra<bool>("flag"));
  EXPECT_EQ(extra<Object>("dtype").class_name, "torch.bfloat16");
  EXPECT_EQ(extra<Object>("device").class_name, "torch.device");
  EXPECT_TRUE(extra<Object>("path").class_name.ends_with("PurePosixPath"));
  const auto args = extra<Object>("args");
  ASSERT_NE(args.attributes(), nullptr);
  EXPECT_EQ(*args.attributes()->find("arch")->get_if<std::string>(), "vit_small");
  EXPECT_EQ(*args.attributes()->find("patch_size")->get_if<std::int64_t>(), 16);
  EXPECT_EQ(args.attributes()->find("crops")->kind_name(), "tuple");
  // An array's numbers stand in its state, or, in protocol 5, in the arguments that it is made of.
  const auto array = extra<Object>("statistics");
  EXPECT_TRUE(array.class_name.starts_with("numpy."));
  const Value& numbers = array.state.empty() ? array.arguments.at(0) : array.state[0].get_if<List>()->items.at(4);
  EXPECT_EQ(numbers.get_if<Bytes>()->data, std::string("\0\0\1\0\2\0", 6));
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, EveryProtocol,
                         ::testing::Values("protocol_2.pth", "protocol_3.pth", "protocol_4.pth", "protocol_5.pth",
                                           "legacy.pth"),
                         [](const auto& info) {
                           return std::string(info.param).substr(0, std::strlen(info.param) - 4);
                         });

TEST(OtherFiles, GetAMessageThatSaysWhatTheyAreAndWhatToDo) {
  EXPECT_TRUE(has(error_of([] { TensorFile::open(golden("checkpoint/script.pt")); }), "TorchScript"));
  EXPECT_TRUE(has(parse_error(""), "empty"));
  EXPECT_TRUE(has(parse_error("hello, world"), "neither"));
  EXPECT_TRUE(has(parse_error("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"));
  EXPECT_TRUE(has(parse_error("<!DOCTYPE html><html>"), "web page"));
  EXPECT_TRUE(has(parse_error(op::pickle("}")), "torch.save"));
  EXPECT_TRUE(has(parse_error(std::string(257, '\0') + "ustar" + std::string(300, '\0')), "tar archive"));
  EXPECT_TRUE(has(parse_error(zip({{"arr_0.npy", "x"}})), "data.pkl"));
  EXPECT_TRUE(has(error_of([] { TensorFile::open("/no/such/file.pth"); }), "/no/such/file.pth"));
  EXPECT_TRUE(has(error_of([] { TensorFile::open("/"); }), "folder"));
  EXPECT_TRUE(has(error_of([] { TensorFile::open("/dev/zero"); }), "regular file"));
}

}  // namespace
}  // namespace violin::checkpoint
