// Pickles that mean harm. Nothing of them may run, and each is refused with a message that names what was asked for.
#include "violin/checkpoint/pickle.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/craft.h"

namespace violin::checkpoint {
namespace {

Value read(const std::string& body) {
  return read_pickle(bytes_of(op::pickle(body)), "data.pkl").root;
}

std::string refusal(const std::string& body, const std::vector<std::string>& storages = {}) {
  const std::string message = parse_error(torch_file(body, storages));
  EXPECT_TRUE(has(message, "'evil.bin'"));
  return message;
}

TEST(PickleGlobals, OutsideTheTableAreRefusedByName) {
  EXPECT_TRUE(
      has(refusal(op::global("os", "system") + op::tuple({op::text("true")}) + "R"), "refuses global 'os.system'"));
  EXPECT_TRUE(has(refusal(op::global("builtins", "eval") + op::tuple({op::text("1")}) + "R"), "'builtins.eval'"));
  EXPECT_TRUE(has(refusal(op::global("__builtin__", "getattr") + "0N"), "'__builtin__.getattr'"));
  EXPECT_TRUE(has(refusal(op::text("os") + op::text("system.__call__") + "\x93"), "'os.system.__call__'"));
  EXPECT_TRUE(has(refusal(op::global("torch", "load") + "0N"), "'torch.load'"));
  EXPECT_TRUE(has(refusal(op::global("torch", "FooStorage") + "0N"), "'torch.FooStorage'"));
  EXPECT_TRUE(has(refusal(op::global("torch.nn.modules.linear", "Linear") + ")\x81"), "state_dict()"));
  EXPECT_TRUE(
      has(refusal(op::global("collections", "OrderedDict.fromkeys") + "0N"), "'collections.OrderedDict.fromkeys'"));
}

TEST(PickleGlobals, AreRefusedEvenWhereTheirResultIsThrownAway) {
  EXPECT_TRUE(has(refusal(op::dict({{"a", op::global("subprocess", "Popen") + "0N"}})), "'subprocess.Popen'"));
  EXPECT_TRUE(has(refusal("(" + op::global("posix", "system") + "1N"), "'posix.system'"));
}

TEST(PickleGlobals, AreOnlyCalledDirectly) {
  EXPECT_TRUE(has(refusal(op::text("eval") + ")R"), "no known function"));
  EXPECT_TRUE(has(refusal(op::global("argparse", "Namespace") + ")R)R"), "no known function"));
  const std::string chained = op::global("torch._tensor", "_rebuild_from_type_v2") +
                              op::tuple({op::global("argparse", "Namespace"), op::global("torch", "Tensor"), ")"}) +
                              "R";
  EXPECT_TRUE(has(refusal(chained), "_rebuild_from_type_v2"));
}

TEST(PickleInstructions, WithoutAPlaceInATensorFileAreRefused) {
  EXPECT_TRUE(has(refusal("(ios\nsystem\n"), "0x69"));            // INST
  EXPECT_TRUE(has(refusal("(c__builtin__\nint\no"), "0x6f"));     // OBJ
  EXPECT_TRUE(has(refusal(std::string("\x82\x01", 2)), "0x82"));  // EXT1
  EXPECT_TRUE(has(refusal("Pabc\n"), "0x50"));                    // PERSID
  EXPECT_TRUE(has(refusal("\x97"), "0x97"));                      // NEXT_BUFFER
}

TEST(PickleInstructions, NeedTheirValuesAndMarks) {
  for (const char* body : {"",       "0", "2", "a", "]a", "}s",   "}Ns",  "(}Nu",  "R",  "NR", "\x85",  "N\x86",
                           "NN\x87", "t", "e", "b", "Q",  "\x81", "\x93", "h\x01", "NN", "(N", "(]NNa", "q\x01"}) {
    EXPECT_TRUE(has(refusal(body), "data.pkl, byte")) << body;
  }
}

TEST(PickleInstructions, StringsCannotBeLongerThanTheFile) {
  EXPECT_TRUE(has(refusal("X" + little(0xffffffffU) + "abc"), "4294967295"));
  EXPECT_TRUE(has(refusal("\x8e" + little(UINT64_MAX) + "abc"), "data.pkl"));
  EXPECT_TRUE(has(refusal("\x8b" + little(0x7fffffffU) + "abc"), "data.pkl"));
  EXPECT_TRUE(has(refusal("cos"), "does not end"));
}

TEST(PickleBombs, DeepNestingIsRefused) {
  std::string lists(100000, ']');
  lists += std::string(99999, 'a');
  EXPECT_TRUE(has(refusal(lists), "nested"));
  EXPECT_TRUE(has(refusal("N" + std::string(1000000, '\x85')), "nested"));
  EXPECT_TRUE(has(refusal(std::string(500000, '(') + std::string(500000, 't')), "nested"));
}

TEST(PickleBombs, ListsThatContainThemselvesAreRefused) {
  EXPECT_TRUE(has(refusal("]q\x01h\x01"
                          "a"),
                  "nested"));
  EXPECT_TRUE(has(refusal("]q\x01(h\x01h\x01h\x01h\x01"
                          "e"),
                  "data.pkl"));
  EXPECT_TRUE(has(refusal("}q\x01" + op::text("a") + "h\x01s"), "nested"));
}

TEST(PickleBombs, SharingThatUnfoldsWithoutEndIsRefused) {
  std::string laughs = "]q" + std::string(1, '\0');
  for (int level = 0; level < 40; ++level) {
    laughs += "](";
    for (int i = 0; i < 10; ++i) laughs += "h" + std::string(1, static_cast<char>(level));
    laughs += "eq" + std::string(1, static_cast<char>(level + 1));
  }
  EXPECT_TRUE(has(refusal("(" + laughs + "t"), "unfolds"));
  const std::string text = op::text(std::string(1 << 20, 'x')) + "q" + std::string(1, '\1');
  std::string many = "](" + text;
  for (int i = 0; i < 100000; ++i) many += "h\x01";
  EXPECT_TRUE(has(refusal(many + "e"), "unfolds"));
  // Each call asks for another copy of the same megabyte.
  std::string copies = "](" + text;
  for (int i = 0; i < 100000; ++i) copies += op::global("_codecs", "encode") + "h\x01\x85R";
  EXPECT_TRUE(has(refusal(copies + "e"), "unfolds"));
}

TEST(PickleBombs, MemoSlotsCostOnlyWhatIsStored) {
  const Value value = read("Nr" + little(0xffffffffU) + "0j" + little(0xffffffffU));
  EXPECT_TRUE(value.is<None>());
}

TEST(PickleValues, KeysOccurOnceAndAreHashable) {
  EXPECT_TRUE(has(refusal(op::dict({{"a", "N"}, {"a", "N"}})), "'a' twice"));
  EXPECT_TRUE(has(refusal("}]Ns"), "key"));
  EXPECT_TRUE(has(refusal("}" + op::integer(5) + "N" + "s" + op::integer(5) + "N" + "s"), "5 twice"));
}

TEST(PickleValues, TextThatIsNotUtf8BecomesBytes) {
  EXPECT_EQ(read(op::text("\xff\xfe")).get_if<Bytes>()->data, "\xff\xfe");
  EXPECT_EQ(read(op::text("\xed\xa0\x80")).kind_name(), "bytes");
  EXPECT_EQ(*read(op::text("ok")).get_if<std::string>(), "ok");
}

TEST(PickleValues, IntegersKeepTheirSign) {
  const auto number = [](const std::string& body) { return *read(body).get_if<std::int64_t>(); };
  EXPECT_EQ(number(std::string("\x8a\x00", 2)), 0);
  EXPECT_EQ(number("\x8a\x01\xff"), -1);
  EXPECT_EQ(number(std::string("\x8a\x02\xff\x00", 4)), 255);
  EXPECT_EQ(number(op::integer(INT64_MIN)), INT64_MIN);
  EXPECT_EQ(number("J\xff\xff\xff\xff"), -1);
}

TEST(PickleValues, OrderedDictOfPairsIsADictionary) {
  const std::string pairs =
      "](" + op::tuple({op::text("a"), op::integer(1)}) + op::tuple({op::text("b"), "N"}) + "e\x85";
  const Value value = read(op::global("collections", "OrderedDict") + pairs + "R");
  ASSERT_TRUE(value.is<Dict>());
  EXPECT_EQ(*value.get_if<Dict>()->find("a")->get_if<std::int64_t>(), 1);
}

TEST(PickleValues, ConfigurationsThatAreDictionariesAreRead) {
  const std::string state = op::dict({{"__immutable__", "\x88"}});
  const Value value =
      read(op::global("yacs.config", "CfgNode") + ")\x81(" + op::text("lr") + op::integer(3) + "u" + state + "b");
  ASSERT_TRUE(value.is<Dict>());
  ASSERT_EQ(value.get_if<Dict>()->items.size(), 1U);
  EXPECT_EQ(*value.get_if<Dict>()->find("lr")->get_if<std::int64_t>(), 3);
}

std::string tensor_refusal(std::int64_t offset, const std::vector<std::int64_t>& sizes,
                           const std::vector<std::int64_t>& strides) {
  // Eight floats.
  const std::string tensor = op::tensor(op::storage("FloatStorage", "0", 8), offset, sizes, strides);
  const std::string message = refusal(op::dict({{"model", op::dict({{"w", tensor}})}}), {std::string(32, 'x')});
  EXPECT_TRUE(has(message, "tensor 'model.w'"));
  return message;
}

TEST(PickleTensors, OutsideTheirStorageAreNamed) {
  EXPECT_TRUE(has(tensor_refusal(0, {9}, {1}), "36 bytes of storage 'data/0', which has 32"));
  EXPECT_TRUE(has(tensor_refusal(1, {8}, {1}), "36 bytes"));
  EXPECT_TRUE(has(tensor_refusal(0, {2, 2}, {7, 1}), "36 bytes"));
  EXPECT_TRUE(has(tensor_refusal(-1, {1}, {1}), "negative storage offset -1"));
  EXPECT_TRUE(has(tensor_refusal(0, {-1}, {1}), "negative size"));
  EXPECT_TRUE(has(tensor_refusal(4, {2}, {-1}), "negative stride"));
  EXPECT_TRUE(has(tensor_refusal(0, {2}, {1, 1}), "1 sizes and 2 strides"));
  EXPECT_TRUE(has(tensor_refusal(INT64_MAX, {1}, {1}), "beyond every memory"));
  EXPECT_TRUE(has(tensor_refusal(0, {INT64_MAX, INT64_MAX}, {0, 0}), "beyond every memory"));
  EXPECT_TRUE(has(tensor_refusal(0, {INT64_MAX}, {INT64_MAX}), "beyond every memory"));
  EXPECT_TRUE(has(tensor_refusal(0, {std::int64_t{1} << 40}, {0}), "repeats"));
  EXPECT_TRUE(
      has(tensor_refusal(0, std::vector<std::int64_t>(65, 1), std::vector<std::int64_t>(65, 1)), "65 dimensions"));
}

TEST(PickleTensors, RepeatedElementsAreCountedOverTheWholeFile) {
  const auto file = [](int count) {
    std::vector<std::pair<std::string, std::string>> items;
    items.reserve(count);
    for (int i = 0; i < count; ++i)
      items.emplace_back("t" + std::to_string(i), op::tensor(op::storage("FloatStorage", "0", 1), 0, {5 << 20}, {0}));
    return torch_file(op::dict(items), {"1234"});
  };
  EXPECT_EQ(flatten(parse_document(bytes_of(file(3)), "expanded.pth").root).size(), 3U);  // 60 MiB
  EXPECT_TRUE(has(parse_error(file(4)), "tensor 't3' repeats its elements"));
}

TEST(PickleTensors, StoragesMustBeThereAndLargeEnough) {
  const auto tensor = [](const std::string& storage) { return op::tensor(storage, 0, {1}, {1}); };
  EXPECT_TRUE(has(refusal(tensor(op::storage("FloatStorage", "0", 8)), {"short"}), "'data/0' has 5 bytes"));
  EXPECT_TRUE(has(refusal(tensor(op::storage("FloatStorage", "7", 8)), {"short"}), "'data/7' is missing"));
  EXPECT_TRUE(has(refusal(tensor(op::storage("FloatStorage", "../data.pkl", 1)), {"x"}), "missing"));
  EXPECT_TRUE(has(refusal(tensor(op::storage("DoubleStorage", "0", INT64_MAX)), {"x"}), "'0'"));
  EXPECT_TRUE(has(refusal(tensor(op::storage("FloatStorage", "0", -1)), {"x"}), "'0'"));
  EXPECT_TRUE(has(refusal(tensor(op::storage("Size", "0", 1)), {"x"}), "'torch.Size' as its type"));
  EXPECT_TRUE(has(refusal(tensor("N"), {"x"}), "_rebuild_tensor_v2"));
  EXPECT_TRUE(has(refusal(op::tuple({op::text("module"), "N"}) + "Q"), "state_dict()"));
}

TEST(PickleTensors, ArgumentsOfTheWrongKindAreNamed) {
  const std::string rebuild = op::global("torch._utils", "_rebuild_tensor_v2");
  const std::string storage = op::storage("FloatStorage", "0", 1);
  const std::string one = op::integers({1});
  EXPECT_TRUE(has(refusal(rebuild + op::tuple({storage, "N", one, one}) + "R", {"1234"}), "storage offset"));
  EXPECT_TRUE(has(refusal(rebuild + op::tuple({storage, op::integer(0), "N", one}) + "R", {"1234"}), "size"));
  EXPECT_TRUE(
      has(refusal(rebuild + op::tuple({storage, op::integer(0), one, op::tuple({"N"})}) + "R", {"1234"}), "stride"));
  EXPECT_TRUE(has(refusal(rebuild + op::tuple({storage}) + "R", {"1234"}), "1 arguments"));
  EXPECT_TRUE(has(refusal(rebuild + "NR"), "no tuple"));
}

TEST(Messages, NameTheFileWholeHoweverLongItsName) {
  const std::string name = "/folder/" + std::string(300, 'x') + ".pth";
  EXPECT_TRUE(has(error_of([&] { parse_document(bytes_of("nonsense"), name); }), "'" + name + "'"));
}

TEST(TorchArchives, OfAnotherByteOrderAreRefused) {
  const std::string big = zip({{"m/data.pkl", op::pickle("N")}, {"m/byteorder", "big"}});
  EXPECT_TRUE(has(parse_error(big), "'byteorder' says 'big'"));
}

std::string legacy(const std::string& object, const std::string& keys, const std::string& data) {
  const std::string magic = op::pickle(std::string("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"));
  return magic + op::pickle(op::integer(1001)) + op::pickle(op::dict({{"little_endian", "\x88"}})) +
         op::pickle(object) + op::pickle(keys) + data;
}

TEST(LegacyFiles, StoragesMustBeThereAndLargeEnough) {
  const std::string tensor = op::tensor(op::storage("FloatStorage", "k", 2), 0, {2}, {1});
  const std::string keys = "]" + op::text("k") + "a";
  const std::string good = legacy(tensor, keys, little<std::uint64_t>(2) + "12345678");
  EXPECT_EQ(flatten(parse_document(bytes_of(good), "a").root).size(), 1U);
  EXPECT_TRUE(has(parse_error(legacy(tensor, keys, little<std::uint64_t>(2) + "1234567")), "'k'"));
  EXPECT_TRUE(has(parse_error(legacy(tensor, keys, little<std::uint64_t>(UINT64_MAX) + "1234567")), "'k'"));
  EXPECT_TRUE(has(parse_error(legacy(tensor, keys, little<std::uint64_t>(1) + "1234")), "'k' has 4 bytes"));
  EXPECT_TRUE(has(parse_error(legacy(tensor, "]", "")), "'k' is missing"));
  EXPECT_TRUE(has(parse_error(legacy("N", keys, "")), "'k' belongs to no tensor"));
  EXPECT_TRUE(has(parse_error(legacy(op::global("os", "system"), "]", "")), "'os.system'"));
}

}  // namespace
}  // namespace violin::checkpoint
