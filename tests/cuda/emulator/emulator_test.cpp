// The emulator itself: that it computes what the PTX manual says, and that it finds the mistakes that it is there to
// find.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "machine.h"
#include "numbers.h"

namespace violin::emulator {
namespace {

struct Result {
  std::vector<std::uint32_t> out;
  std::string error;
};

struct Setting {
  unsigned threads = 1, blocks = 1;
  int cluster = 1;
  std::size_t shared = 0;  // dynamic, as `memory`
  std::uint64_t order = 0;
  std::size_t words = 64;  // of the output, which %out points to
  std::string functions;
};

// Runs a body, which may use %out, %r0 ... %r31, %x0 ... %x15 (64 bits), %f0 ... %f31, %p0 ... %p7.
Result run_body(const std::string& body, const Setting& s = {}) {
  std::string text = ".version 9.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 memory[];\n" +
                     s.functions + "\n.visible .entry kernel(\n\t.param .u64 kernel_param_0\n)\n";
  if (s.cluster > 1) text += ".reqnctapercluster " + std::to_string(s.cluster) + ", 1, 1\n";
  text +=
      "{\n.reg .b64 %out;\n.reg .b64 %x<16>;\n.reg .b32 %r<32>;\n.reg .b32 %f<64>;\n.reg .pred %p<8>;\n.reg .b16 "
      "%h<8>;\n"
      "ld.param.u64 %out, [kernel_param_0];\n" +
      body + "\nret;\n}\n";
  Result result;
  result.out.assign(s.words, 0xdeadbeef);
  try {
    Module module(text);
    std::map<std::string, std::unique_ptr<Program>> programs;
    std::function<const Program*(const std::string&)> find = [&](const std::string& name) -> const Program* {
      auto& program = programs[name];
      if (program == nullptr) program = std::make_unique<Program>(decode(module.function(name), find));
      return program.get();
    };
    Memory memory;
    memory.allow(reinterpret_cast<std::uint64_t>(result.out.data()), 4 * s.words);
    Launch launch;
    launch.program = find("kernel");
    launch.grid.x = s.blocks;
    launch.block.x = s.threads;
    launch.dynamic_shared = s.shared;
    launch.memory = &memory;
    launch.params.resize(8);
    const auto* data = result.out.data();
    std::memcpy(launch.params.data(), &data, 8);
    run(launch, {s.order});
  } catch (const Error& problem) {
    result.error = problem.what();
  }
  return result;
}

// One instruction on %r1, %r2, %r3 (%x1 to %x3) into %r0 (%x0): its result.
std::uint32_t compute(const std::string& instruction, std::uint32_t a, std::uint32_t b = 0, std::uint32_t c = 0) {
  std::string body;
  for (int n = 1; n <= 3; ++n) {
    body += "mov.u32 %r" + std::to_string(n) + ", " + std::to_string(n == 1 ? a : n == 2 ? b : c) + ";\n";
  }
  const Result r = run_body(body + instruction + "\nst.global.u32 [%out], %r0;");
  EXPECT_EQ(r.error, "") << instruction;
  return r.out[0];
}
std::uint32_t bits(float x) {
  return std::bit_cast<std::uint32_t>(x);
}

TEST(Emulator, ComputesWhatTheManualSays) {
  EXPECT_EQ(compute("shl.b32 %r0, %r1, %r2;", 1, 32), 0u);
  EXPECT_EQ(compute("shr.s32 %r0, %r1, %r2;", 0x80000000u, 40), 0xffffffffu);
  EXPECT_EQ(compute("shr.u32 %r0, %r1, %r2;", 0x80000000u, 31), 1u);
  EXPECT_EQ(compute("mul.hi.s32 %r0, %r1, %r2;", 0xffffffffu, 2), 0xffffffffu);
  EXPECT_EQ(compute("mul.hi.u32 %r0, %r1, %r2;", 0xffffffffu, 2), 1u);
  EXPECT_EQ(compute("mad.lo.s32 %r0, %r1, %r2, %r3;", 0xffffffffu, 3, 5), 2u);
  EXPECT_EQ(compute("div.s32 %r0, %r1, %r2;", static_cast<std::uint32_t>(-7), 2), static_cast<std::uint32_t>(-3));
  EXPECT_EQ(compute("rem.s32 %r0, %r1, %r2;", static_cast<std::uint32_t>(-7), 2), static_cast<std::uint32_t>(-1));
  EXPECT_EQ(compute("prmt.b32 %r0, %r1, %r2, 0x7610U;", 0x33221100u, 0x77665544u), 0x77661100u);
  EXPECT_EQ(compute("prmt.b32 %r0, %r1, %r2, 0x9990U;", 0x0000ff80u, 0), 0xffffff80u);
  EXPECT_EQ(compute("bfi.b32 %r0, %r1, %r2, 8, 4;", 0xff, 0), 0xf00u);
  EXPECT_EQ(compute("min.f32 %r0, %r1, %r2;", bits(NAN), bits(2)), bits(2));
  EXPECT_EQ(compute("max.f32 %r0, %r1, %r2;", bits(-3), bits(NAN)), bits(-3));
  EXPECT_EQ(compute("fma.rn.f32 %r0, %r1, %r2, %r3;", bits(1 + 0x1p-12f), bits(1 + 0x1p-12f), bits(-1)),
            bits(std::fma(1 + 0x1p-12f, 1 + 0x1p-12f, -1.0f)));
  EXPECT_EQ(compute("ex2.approx.ftz.f32 %r0, %r1;", bits(-130)), 0u);
  EXPECT_EQ(compute("ex2.approx.ftz.f32 %r0, %r1;", bits(5)), bits(32));
  EXPECT_EQ(compute("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", bits(1), bits(-2)), 0x3f80c000u);  // first operand above
  EXPECT_EQ(compute("cvt.rn.f16x2.f32 %r0, %r1, %r2;", bits(70000), bits(0x1p-24f)), 0x7c000001u);
  EXPECT_EQ(compute("cvt.rzi.s32.f32 %r0, %r1;", bits(-1.9f)), static_cast<std::uint32_t>(-1));
  EXPECT_EQ(compute("setp.lt.f32 %p0, %r1, %r2; selp.b32 %r0, 1, 0, %p0;", bits(NAN), bits(1)), 0u);
  EXPECT_EQ(compute("setp.geu.f32 %p0, %r1, %r2; selp.b32 %r0, 1, 0, %p0;", bits(NAN), bits(1)), 1u);
  EXPECT_EQ(compute("setp.gt.s32 %p0, %r1, %r2; @%p0 mov.u32 %r0, 7; @!%p0 mov.u32 %r0, 8;", 0xffffffffu, 0), 8u);
  EXPECT_EQ(compute("setp.gt.u32 %p0, %r1, %r2; @%p0 mov.u32 %r0, 7; @!%p0 mov.u32 %r0, 8;", 0xffffffffu, 0), 7u);
}

TEST(Emulator, RoundsTo16BitsAsTheHardware) {
  EXPECT_EQ(to_bfloat16(1 + 0x1p-8f), 0x3f80);  // ties to even
  EXPECT_EQ(to_bfloat16(1 + 0x1.8p-7f), 0x3f82);
  EXPECT_EQ(to_float16(1 + 0x1p-11f), 0x3c00);
  EXPECT_EQ(to_float16(65519.0f), 0x7bff);
  EXPECT_EQ(to_float16(65520.0f), 0x7c00);
  EXPECT_EQ(to_float16(0x1p-25f), 0);
  EXPECT_EQ(to_float16(-0x1.8p-24f), 0x8002);
  for (std::uint32_t x = 0; x < 0x10000; ++x) {
    const auto half = static_cast<std::uint16_t>(x);
    if (std::isnan(from_float16(half))) continue;
    EXPECT_EQ(to_float16(from_float16(half)), half);
  }
}

TEST(Emulator, KnowsItsThreads) {
  const Result r = run_body(
      "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, %r3, %r1;\n"
      "mul.wide.u32 %x1, %r4, 4; add.s64 %x2, %out, %x1; st.global.u32 [%x2], %r4;",
      {.threads = 5, .blocks = 3});
  ASSERT_EQ(r.error, "");
  for (std::uint32_t i = 0; i < 15; ++i) EXPECT_EQ(r.out[i], i);
  EXPECT_EQ(r.out[15], 0xdeadbeef);
}

TEST(Emulator, WideProductsHaveTwiceTheBits) {
  const Result r = run_body(
      "mov.u32 %r1, 65535; cvt.u16.u32 %h1, %r1; mul.wide.u16 %r2, %h1, 65535; st.global.u32 [%out], %r2;\n"
      "mul.wide.s16 %r3, %h1, 3; st.global.u32 [%out+4], %r3; mul.wide.u32 %x1, -1, -1; st.global.u64 [%out+8], %x1;");
  ASSERT_EQ(r.error, "");
  EXPECT_EQ(r.out[0], 65535u * 65535u);
  EXPECT_EQ(r.out[1], static_cast<std::uint32_t>(-3));
  EXPECT_EQ(r.out[2], 1u);
  EXPECT_EQ(r.out[3], 0xfffffffeu);
}

TEST(Emulator, CallsFunctions) {
  const Result r = run_body(
      "{ .param .b32 param0; .param .b32 result0; mov.u32 %r1, 20; st.param.b32 [param0], %r1;\n"
      "call.uni (result0), twice, (param0); ld.param.b32 %r2, [result0]; }\n st.global.u32 [%out], %r2;",
      {.functions = ".func (.param .b32 value) twice(\n\t.param .b32 twice_param_0\n)\n{\n.reg .b32 %r<4>;\n"
                    "ld.param.u32 %r1, [twice_param_0]; add.s32 %r2, %r1, %r1; st.param.b32 [value], %r2;\nret;\n}\n"});
  ASSERT_EQ(r.error, "");
  EXPECT_EQ(r.out[0], 40u);
}

// Lane l of a warp tells the next what it has.
TEST(Emulator, WarpsShuffleAndVote) {
  const Result r = run_body(
      "mov.u32 %r1, %tid.x; mul.lo.s32 %r2, %r1, 10; shfl.sync.bfly.b32 %r3|%p1, %r2, 1, 31, -1;\n"
      "setp.lt.u32 %p0, %r1, 31; vote.sync.all.pred %p2, %p0, -1; selp.b32 %r5, 1000, 0, %p2; add.s32 %r3, %r3, %r5;\n"
      "mul.wide.u32 %x1, %r1, 4; add.s64 %x2, %out, %x1; st.global.u32 [%x2], %r3;",
      {.threads = 32});
  ASSERT_EQ(r.error, "");
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(r.out[i], (i ^ 1) * 10);
}

constexpr const char* kExchange =  // thread i writes what thread i ^ 32 reads
    "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, memory; add.s32 %r4, %r3, %r2; st.shared.u32 [%r4], %r1;\n"
    "BARRIER xor.b32 %r5, %r2, 128; add.s32 %r6, %r3, %r5; ld.shared.u32 %r7, [%r6];\n"
    "mul.wide.u32 %x1, %r1, 4; add.s64 %x2, %out, %x1; st.global.u32 [%x2], %r7;";
std::string exchange(const std::string& barrier) {
  std::string body = kExchange;
  return body.replace(body.find("BARRIER"), 7, barrier);
}

TEST(Emulator, ThreadsMeetAtBarriers) {
  for (const std::uint64_t order : {0, 1, 2}) {
    const Result r = run_body(exchange("bar.sync 0;"), {.threads = 64, .shared = 256, .order = order});
    ASSERT_EQ(r.error, "");
    for (std::uint32_t i = 0; i < 64; ++i) EXPECT_EQ(r.out[i], i ^ 32);
  }
}

TEST(Emulator, FindsAMissingBarrier) {
  EXPECT_NE(run_body(exchange(""), {.threads = 64, .shared = 256}).error.find("nobody has written"), std::string::npos);
}

TEST(Emulator, NamesADeadlock) {
  const Result r = run_body("mov.u32 %r1, %tid.x; setp.lt.u32 %p0, %r1, 32; @%p0 bar.sync 1, 64;", {.threads = 64});
  EXPECT_NE(r.error.find("32 threads wait for ever"), std::string::npos) << r.error;
  EXPECT_NE(r.error.find("bar.sync"), std::string::npos) << r.error;
}

TEST(Emulator, FindsAccessOutsideOfTensors) {
  EXPECT_NE(run_body("st.global.u32 [%out+256], 1;").error.find("a write outside of all tensors"), std::string::npos);
  EXPECT_NE(run_body("ld.global.u32 %r1, [%out+-4];").error.find("a read outside of all tensors"), std::string::npos);
  EXPECT_NE(run_body("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%out+4];").error.find("no multiple of 16"),
            std::string::npos);
  EXPECT_NE(run_body("mov.u32 %r3, memory; st.shared.u32 [%r3+64], 1;", {.shared = 64})
                .error.find("outside of shared memory"),
            std::string::npos);
}

TEST(Emulator, RefusesWhatItDoesNotKnow) {
  EXPECT_NE(run_body("brev.b32 %r1, %r2;").error.find("brev.b32 is unknown"), std::string::npos);
  EXPECT_NE(run_body("mov.u32 %r1, %clock;").error.find("%clock is unknown"), std::string::npos);
  EXPECT_NE(run_body("mov.u32 %r1, nothing;").error.find("unknown name 'nothing'"), std::string::npos);
}

// What two threads add to without an order depends on the order.
TEST(Emulator, OrdersDiffer) {
  std::vector<std::uint32_t> last;
  for (std::uint64_t order = 1; order <= 16; ++order) {
    const Result r = run_body("mov.u32 %r1, %tid.x; st.global.u32 [%out], %r1;", {.threads = 64, .order = order});
    ASSERT_EQ(r.error, "");
    last.push_back(r.out[0]);
  }
  EXPECT_NE(std::count(last.begin(), last.end(), last[0]), static_cast<std::ptrdiff_t>(last.size()));
}

// The output's first 64 bytes come to shared memory by a bulk copy and go back to the next 64.
std::string bulk_copy(const std::string& wait) {
  return "mov.u32 %r1, memory; add.s32 %r2, %r1, 64; mbarrier.init.shared.b64 [%r2], 1;\n"
         "fence.mbarrier_init.release.cluster;\n"
         "st.global.u32 [%out], 77;\n"
         "mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;\n"
         "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%out], 64, [%r2];\n" +
         wait + "ld.shared.u32 %r3, [%r1]; st.global.u32 [%out+64], %r3;";
}

TEST(Emulator, CopiesLandWhenTheyAreAwaited) {
  const std::string wait = "again: mbarrier.try_wait.parity.shared.b64 %p0, [%r2], 0; @!%p0 bra again;\n";
  for (const std::uint64_t order : {0, 1, 2, 3}) {
    const Result r = run_body(bulk_copy(wait), {.shared = 128, .order = order});
    ASSERT_EQ(r.error, "");
    EXPECT_EQ(r.out[16], 77u);
  }
  // Who does not wait is found out in an order in which copies land late.
  EXPECT_NE(run_body(bulk_copy(""), {.shared = 128, .order = 1}).error.find("nobody has written"), std::string::npos);
}

TEST(Emulator, FindsBarriersThatNobodyMadeOrThatNobodyArrivesAt) {
  const std::string make = "mov.u32 %r1, memory; mbarrier.init.shared.b64 [%r1], 2;\n";
  const std::string arrive = "mbarrier.arrive.shared.b64 _, [%r1];\n";
  EXPECT_EQ(run_body(make + arrive + arrive, {.shared = 16}).error, "");
  EXPECT_NE(run_body("mov.u32 %r1, memory; " + arrive, {.shared = 16}).error.find("no barrier was made"),
            std::string::npos);
  EXPECT_NE(run_body(arrive, {.shared = 16}).error.find("a block that the cluster has not"), std::string::npos);
  EXPECT_NE(run_body("mov.u32 %r1, memory; mbarrier.init.shared.b64 [%r1], 1; again: " +
                         std::string("mbarrier.try_wait.parity.shared.b64 %p0, [%r1], 0; @!%p0 bra again;"),
                     {.shared = 16})
                .error.find("wait for ever"),
            std::string::npos);
}

TEST(Emulator, FindsWritesToBarriersAndBlocksThatEndTooEarly) {
  const std::string make =
      "mov.u32 %r1, memory; mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;\n";
  EXPECT_NE(run_body(make + "st.shared.u32 [%r1+4], 1;", {.shared = 16}).error.find("a write to a barrier"),
            std::string::npos);
  // A copy that nobody awaits.
  const std::string copy =
      "mov.u32 %r2, memory; add.s32 %r3, %r2, 16; st.global.u32 [%out], 1; mbarrier.arrive.expect_tx.shared.b64 _, "
      "[%r1], 16;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%out], 16, [%r1];";
  EXPECT_NE(run_body(make + copy, {.shared = 32, .order = 1}).error.find("ends before its bulk copies"),
            std::string::npos);
  // An arrival at a block that may have ended.
  const std::string arrive =
      "mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; barrier.cluster.arrive.aligned; "
      "barrier.cluster.wait.aligned;\n"
      "mapa.shared::cluster.u32 %r6, %r1, %r5; mbarrier.arrive.shared::cluster.b64 _, [%r6];";
  const Setting pair{.blocks = 2, .cluster = 2, .shared = 16};
  EXPECT_NE(run_body(make + arrive, pair).error.find("a block that has ended"), std::string::npos);
}

// Two warps and one place: thread 0 reads what the last copy of thread 32 has brought, which copies again after a
// barrier or without one.
TEST(Emulator, FindsCopiesOverWhatIsStillRead) {
  const auto refill = [](const std::string& barrier) {
    return "mov.u32 %r1, memory; mov.u32 %r3, %tid.x; setp.ne.u32 %p0, %r3, 32; setp.ne.u32 %p1, %r3, 0;\n"
           "add.s64 %x1, %out, 16; add.s64 %x2, %out, 32;\n"
           "@!%p0 st.global.u32 [%out+16], 7; @!%p0 cp.async.ca.shared.global [%r1], [%x1], 4, 4;\n"
           "@!%p0 cp.async.wait_all; bar.sync 0;\n"
           "@!%p1 bra read;\n" +
           barrier +
           "@!%p0 st.global.u32 [%out+32], 8; @!%p0 cp.async.ca.shared.global [%r1], [%x2], 4, 4;\n"
           "@!%p0 cp.async.wait_all; bra end;\n"
           "read: ld.shared.u32 %r6, [%r1]; add.s32 %r6, %r6, 0;\n" +
           barrier + "st.global.u32 [%out], %r6;\nend:";
  };
  int wrong = 0;
  for (std::uint64_t order = 0; order <= 16; ++order) {
    const Setting setting{.threads = 64, .shared = 16, .order = order};
    const Result safe = run_body(refill("bar.sync 1;\n"), setting);
    ASSERT_EQ(safe.error, "");
    EXPECT_EQ(safe.out[0], 7u);
    wrong += run_body(refill(""), setting).out[0] == 8;
  }
  EXPECT_GT(wrong, 0);
}

TEST(Emulator, BlocksOfAClusterArriveAtEachOthersBarriers) {
  const std::string body =
      "mov.u32 %r1, memory; mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;\n"
      "mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1;\n"
      "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mapa.shared::cluster.u32 %r4, %r1, %r3;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [%r4];\n"
      "again: mbarrier.try_wait.parity.shared.b64 %p0, [%r1], 0; @!%p0 bra again;\n"
      "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
      "mul.wide.u32 %x1, %r2, 4; add.s64 %x2, %out, %x1; st.global.u32 [%x2], %r3;";
  for (const std::uint64_t order : {0, 1, 2}) {
    const Result r = run_body(body, {.blocks = 2, .cluster = 2, .shared = 16, .order = order});
    ASSERT_EQ(r.error, "");
    EXPECT_EQ(r.out[0], 1u);
    EXPECT_EQ(r.out[1], 0u);
  }
}

// Thread 0 reads 5, arrives and uses what it has read; thread 32 waits for the arrival and writes 6 to the same place.
std::string read_and_arrive(const std::string& before, const std::string& after) {
  return "mov.u32 %r1, memory; add.s32 %r2, %r1, 16; mov.u32 %r3, %tid.x; setp.ne.u32 %p0, %r3, 0;\n"
         "@!%p0 mbarrier.init.shared.b64 [%r2], 1; @!%p0 st.shared.u32 [%r1], 5; bar.sync 0;\n"
         "mov.u32 %r4, 0; mapa.shared::cluster.u32 %r5, %r2, %r4; @%p0 bra other;\n"
         "ld.shared.u32 %r6, [%r1];\n" +
         before + "mbarrier.arrive.shared::cluster.b64 _, [%r5];\n" + after +
         "st.global.u32 [%out], %r7; bra end;\n"
         "other: setp.ne.u32 %p1, %r3, 32; @%p1 bra end;\n"
         "again: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra again;\n"
         "st.shared.u32 [%r1], 6;\nend:";
}

TEST(Emulator, LoadsMayComeAfterAnArrivalAtAnotherBlock) {
  const std::string use = "add.s32 %r7, %r6, 0;\n";
  int late = 0;
  for (std::uint64_t order = 0; order <= 16; ++order) {
    const Setting setting{.threads = 64, .shared = 32, .order = order};
    const Result safe = run_body(read_and_arrive(use, ""), setting);
    ASSERT_EQ(safe.error, "");
    EXPECT_EQ(safe.out[0], 5u);
    late += run_body(read_and_arrive("", use), setting).out[0] == 6;
  }
  EXPECT_GT(late, 0);
}

// D = A B with A[i][k] = 1 where k = i % 16 (rows 0 to 15 of a 64 x 16 tile per warp) and B[k][n] = 16 n + k: D[i][n] =
// B[i % 16][n]. A lies at `memory`, B behind it, both in rows of 128 bytes that are swizzled; thread 0 fills them.
std::string product(const std::string& before, const std::string& after) {
  return "mov.u32 %r1, memory; mov.u32 %r31, %tid.x; setp.ne.u32 %p0, %r31, 0; @%p0 bra filled;\n"
         // A: 64 rows, B: 8 rows (n) of 16 numbers (k)
         "mov.u32 %r2, 0;\n"
         "row: mov.u32 %r3, 0;\n"
         "column: and.b32 %r4, %r2, 15; setp.eq.u32 %p1, %r3, %r4; selp.b32 %r5, 0x3f80, 0, %p1;\n"
         "setp.lt.u32 %p2, %r2, 64; @%p2 bra store;\n"
         "sub.u32 %r6, %r2, 64; shl.b32 %r7, %r6, 4; add.u32 %r7, %r7, %r3; cvt.rn.f32.u32 %f0, %r7; shr.u32 %r5, %f0, "
         "16;\n"
         "store: shl.b32 %r8, %r2, 7; shl.b32 %r9, %r3, 1; add.u32 %r8, %r8, %r9; shr.u32 %r9, %r8, 7; and.b32 %r9, "
         "%r9, 7;\n"
         "shl.b32 %r9, %r9, 4; xor.b32 %r8, %r8, %r9; add.u32 %r8, %r8, %r1; cvt.u16.u32 %h0, %r5; st.shared.u16 "
         "[%r8], %h0;\n"
         "add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 16; @%p3 bra column;\n"
         "add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 72; @%p3 bra row;\n" +
         before +
         "filled: bar.sync 0;\n"
         // descriptors: address / 16, eight rows 1024 bytes apart, 128 bytes of swizzle
         "shr.u32 %r10, %r1, 4; cvt.u64.u32 %x1, %r10; mov.u64 %x3, 0x4000004000000000; or.b64 %x1, %x1, %x3;\n"
         "add.u32 %r11, %r10, 512; cvt.u64.u32 %x2, %r11; or.b64 %x2, %x2, %x3;\n"
         "wgmma.fence.sync.aligned;\n"
         "setp.ne.u32 %p4, 0, 0;\n"
         "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %x1, %x2, %p4, 1, 1, 0, 0;\n"
         "wgmma.commit_group.sync.aligned;\n" +
         after +
         "wgmma.wait_group.sync.aligned 0;\n"
         "shl.b32 %r12, %r31, 4; cvt.u64.u32 %x4, %r12; add.s64 %x5, %out, %x4; st.global.v4.f32 [%x5], {%f1, %f2, "
         "%f3, %f4};";
}
const Setting kProduct{.threads = 128, .shared = 72 * 128, .words = 512};

TEST(Emulator, MultipliesTiles) {
  const Result r = run_body(product("fence.proxy.async.shared::cta;\n", ""), kProduct);
  ASSERT_EQ(r.error, "");
  for (std::uint32_t t = 0; t < 128; ++t) {
    for (std::uint32_t n = 0; n < 4; ++n) {
      const std::uint32_t row = t % 32 / 4 + n / 2 * 8, column = t % 4 * 2 + n % 2;
      EXPECT_EQ(r.out[4 * t + n], bits(static_cast<float>(16 * column + row))) << "thread " << t << ", " << n;
    }
  }
}

TEST(Emulator, FindsAMissingFenceBeforeProducts) {
  // A fence somewhere in the kernel, but not by the thread that has written.
  const Result r = run_body(product("", "fence.proxy.async.shared::cta;\n"), kProduct);
  EXPECT_NE(r.error.find("without a fence for the async proxy"), std::string::npos) << r.error;
}

TEST(Emulator, FindsProductsInAKernelWithoutAnyFence) {
  const std::string error = run_body(product("", ""), kProduct).error;
  EXPECT_NE(error.find("without a fence for the async proxy"), std::string::npos) << error;
  std::string unfenced = product("fence.proxy.async.shared::cta;\n", "");
  const std::string fence = "wgmma.fence.sync.aligned;\n";
  unfenced.erase(unfenced.find(fence), fence.size());
  EXPECT_NE(run_body(unfenced, kProduct).error.find("without a fence since the last wait"), std::string::npos);
}

TEST(Emulator, FindsOperandsThatChangeBeforeTheyAreRead) {
  const Result r =
      run_body(product("fence.proxy.async.shared::cta;\n", "mov.u32 %r13, 1; st.shared.u32 [%r1], %r13;\n"), kProduct);
  EXPECT_NE(r.error.find("were overwritten before it was awaited"), std::string::npos) << r.error;
}

TEST(Emulator, FindsResultsThatAreUsedBeforeTheyAreAwaited) {
  const std::string fence = "fence.proxy.async.shared::cta;\n";
  EXPECT_NE(run_body(product(fence, "add.f32 %f5, %f1, %f2;\n"), kProduct).error.find("has not been awaited"),
            std::string::npos);
  EXPECT_NE(
      run_body(product(fence, "mov.f32 %f6, %f1; neg.f32 %f5, %f6;\n"), kProduct).error.find("has not been awaited"),
      std::string::npos);
  EXPECT_EQ(run_body(product(fence, "mov.f32 %f6, %f1;\n"), kProduct).error, "");
}

TEST(Emulator, FindsBarriersThatAreMadeWithoutAFence) {
  std::string copy = bulk_copy("again: mbarrier.try_wait.parity.shared.b64 %p0, [%r2], 0; @!%p0 bra again;\n");
  const std::string fence = "fence.mbarrier_init.release.cluster;\n";
  copy.erase(copy.find(fence), fence.size());
  EXPECT_NE(run_body(copy, {.shared = 128}).error.find("made without a fence"), std::string::npos);
}

TEST(Emulator, FindsProductsThatNobodyAwaits) {
  const Result r = run_body("wgmma.fence.sync.aligned; wgmma.commit_group.sync.aligned;", {.threads = 128});
  EXPECT_NE(r.error.find("ends before its products"), std::string::npos) << r.error;
}

}  // namespace
}  // namespace violin::emulator
