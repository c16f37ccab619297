// The kernels' tasks on plain threads: whatever the number of threads and whoever runs which tasks, the results have
// the same bits. Under the thread sanitizer (make tsan) the same runs show that tasks of a phase touch nothing of each
// other.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "violin/kernels/cpu/attention.h"
#include "violin/kernels/cpu/decay_mask.h"

namespace violin::kernels::cpu {
namespace {

float widen(float x) {
  return x;
}
double widen(double x) {
  return x;
}
float widen(BFloat16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float result = 0;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

template <class E, class T>
void naive_product(int64_t m, int64_t n, int64_t k, const E* a, int64_t lda, const E* b, int64_t ldb, T* c, int64_t ldc,
                   bool accumulate) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      T sum = accumulate ? c[i * ldc + j] : T{0};
      for (int64_t l = 0; l < k; ++l) sum += widen(a[i * lda + l]) * widen(b[l * ldb + j]);
      c[i * ldc + j] = sum;
    }
  }
}

constexpr MatMul kNaive = {naive_product<float, float>, naive_product<double, double>, naive_product<BFloat16, float>};

// Memory as the kernels ask for it, filled with what nobody may rely on.
class Memory {
 public:
  explicit Memory(int64_t bytes) : data_(new(std::align_val_t{64}) std::uint8_t[std::max<int64_t>(bytes, 64)]) {
    std::fill_n(data_.get(), bytes, std::uint8_t{0xff});
  }
  void* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::uint8_t* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };
  std::unique_ptr<std::uint8_t[], Free> data_;
};

// Tasks are dealt out in pieces of `piece`, to whichever thread comes first.
struct Split {
  int threads;
  int64_t piece;
};
constexpr Split kSplits[] = {{2, 1}, {3, 2}, {4, 1}, {8, 1}, {5, 3}};

using Run = std::function<void(int phase, int64_t begin, int64_t end, Scratch scratch)>;

void run_on_threads(const Work& work, const Split& split, const Run& run) {
  const Memory shared(work.shared_scratch_bytes);
  for (int phase = 0; phase < work.phases; ++phase) {
    std::atomic<int64_t> next = 0;
    std::vector<std::thread> threads;
    threads.reserve(split.threads);
    for (int i = 0; i < split.threads; ++i) {
      threads.emplace_back([&] {
        const Memory own(work.thread_scratch_bytes);
        // Relaxed, so that taking a task orders nothing between threads and hides no race from the sanitizer.
        for (;;) {
          const int64_t begin = next.fetch_add(split.piece, std::memory_order_relaxed);
          if (begin >= work.tasks[phase]) break;
          run(phase, begin, std::min(begin + split.piece, work.tasks[phase]), {shared.get(), own.get()});
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

using Bytes = std::vector<std::uint8_t>;

template <class T>
std::vector<T> random(int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<T> values(count);
  for (T& value : values) {
    const float x = normal(generator);
    if constexpr (std::is_same_v<T, BFloat16>) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &x, sizeof(bits));
      value = {static_cast<std::uint16_t>(bits >> 16)};
    } else {
      value = static_cast<T>(x);
    }
  }
  return values;
}

// One call with all tables and all gradients.
template <class Source, class Real>
class Attention {
 public:
  Attention(DType dtype, const AttentionShape& shape) : dtype_(dtype), shape_(shape) {
    std::mt19937 generator(7);
    for (auto* tensor : {&q_, &dout_}) *tensor = random<Source>(query_size(), generator);
    for (auto* tensor : {&k_, &v_}) *tensor = random<Source>(key_size(), generator);
    for (auto* table : {&gain_, &bias_, &gate_}) *table = random<Real>(table_size(), generator);
  }

  // Forward and backward: out, lse and the six gradients, one behind the other.
  std::vector<Bytes> results(Level level, const Split& split) const {
    std::vector<Bytes> results;
    const auto result = [&](int64_t bytes) { return results.emplace_back(bytes, 0xff).data(); };
    results.reserve(8);
    const int64_t query_bytes = query_size() * sizeof(Source), key_bytes = key_size() * sizeof(Source);
    const int64_t table_bytes = table_size() * sizeof(Real), rows = shape_.batch * shape_.heads * shape_.queries;
    AttentionForward forward{.shape = shape_, .dtype = dtype_, .scale = 0.3};
    fill(forward);
    forward.out = heads<void>(result(query_bytes), shape_.queries);
    forward.lse = result(rows * sizeof(Real));
    run_on_threads(plan(forward, kNaive), split, [&](int phase, int64_t begin, int64_t end, Scratch scratch) {
      run(forward, level, kNaive, phase, begin, end, scratch);
    });
    AttentionBackward backward{.shape = shape_, .dtype = dtype_, .scale = 0.3};
    fill(backward);
    backward.out = heads<const void>(forward.out.data, shape_.queries);
    backward.dout = heads<const void>(dout_.data(), shape_.queries);
    backward.lse = forward.lse;
    backward.dq = heads<void>(result(query_bytes), shape_.queries);
    backward.dk = heads<void>(result(key_bytes), shape_.keys);
    backward.dv = heads<void>(result(key_bytes), shape_.keys);
    backward.dgain = result(table_bytes);
    backward.dbias = result(table_bytes);
    backward.dgate = result(table_bytes);
    run_on_threads(plan(backward, kNaive), split, [&](int phase, int64_t begin, int64_t end, Scratch scratch) {
      run(backward, level, kNaive, phase, begin, end, scratch);
    });
    return results;
  }

 private:
  int64_t query_size() const { return shape_.batch * shape_.heads * shape_.queries * shape_.dim; }
  int64_t key_size() const { return shape_.batch * shape_.heads * shape_.keys * shape_.dim; }
  int64_t table_size() const { return shape_.groups * shape_.heads * shape_.queries * shape_.keys; }

  // [B,h,N,d] contiguous.
  template <class Void, class T>
  Heads<Void> heads(T* data, int64_t tokens) const {
    return {data, shape_.heads * tokens * shape_.dim, tokens * shape_.dim, shape_.dim};
  }
  template <class Call>
  void fill(Call& call) const {
    call.q = heads<const void>(q_.data(), shape_.queries);
    call.k = heads<const void>(k_.data(), shape_.keys);
    call.v = heads<const void>(v_.data(), shape_.keys);
    const int64_t area = shape_.queries * shape_.keys;
    const auto table = [&](const std::vector<Real>& values) {
      return Table{values.data(), shape_.heads * area, area, shape_.keys};
    };
    call.gain = table(gain_);
    call.bias = table(bias_);
    call.gate = table(gate_);
  }

  DType dtype_;
  AttentionShape shape_;
  std::vector<Source> q_, k_, v_, dout_;
  std::vector<Real> gain_, bias_, gate_;
};

// Large batches of short sequences, one tile of keys or several; small batches of long ones, many images to a table;
// odd sizes throughout, so that rows of different tasks share cache lines.
constexpr AttentionShape kShapes[] = {{.batch = 12, .heads = 2, .queries = 13, .keys = 19, .dim = 5, .groups = 3},
                                      {.batch = 17, .heads = 1, .queries = 9, .keys = 275, .dim = 3, .groups = 1},
                                      {.batch = 1, .heads = 1, .queries = 331, .keys = 290, .dim = 3, .groups = 1},
                                      {.batch = 3, .heads = 1, .queries = 170, .keys = 531, .dim = 2, .groups = 3},
                                      {.batch = 10, .heads = 1, .queries = 85, .keys = 21, .dim = 2, .groups = 1}};

template <class Source, class Real>
void expect_same_bits(DType dtype) {
  for (const AttentionShape& shape : kShapes) {
    const Attention<Source, Real> attention(dtype, shape);
    for (const Level level : available_levels()) {
      const std::vector<Bytes> expected = attention.results(level, {1, 1 << 20});
      for (const Split& split : kSplits) {
        const std::vector<Bytes> actual = attention.results(level, split);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_EQ(actual[i], expected[i]) << "result " << i << ", " << split.threads << " threads, " << shape.keys
                                            << " keys, level " << level_name(level);
        }
      }
    }
  }
}

TEST(Threads, AttentionHasTheSameBitsInFloat32) {
  expect_same_bits<float, float>(DType::kFloat32);
}
TEST(Threads, AttentionHasTheSameBitsInFloat64) {
  expect_same_bits<double, double>(DType::kFloat64);
}
TEST(Threads, AttentionHasTheSameBitsInBFloat16) {
  expect_same_bits<BFloat16, float>(DType::kBFloat16);
}

// A mask of several groups, curves and axes with a prefix, and all its gradients.
std::vector<Bytes> mask_results(bool log_space, bool decay_per_axis, Level level, const Split& split) {
  constexpr int64_t kGroups = 2, kCurves = 3, kAxes = 2, kTokens = 37, kHeads = 3, kPrefix = 2;
  std::mt19937 generator(5);
  std::vector<std::int32_t> ranks(kGroups * kCurves * kAxes * kTokens);
  for (std::int32_t& rank : ranks) rank = static_cast<std::int32_t>(generator() % 50);
  const int64_t decays = kCurves * (decay_per_axis ? kAxes : 1) * kHeads, side = kPrefix + kTokens;
  std::vector<float> log_decay = random<float>(decays, generator), weight = random<float>(kCurves * kHeads, generator);
  std::vector<float> prefix_decay = random<float>(kHeads, generator);
  for (auto* values : {&log_decay, &prefix_decay}) {
    for (float& x : *values) x = -0.1F * std::abs(x);
  }
  for (float& x : weight) x = std::abs(x) + 0.1F;
  const std::vector<float> dout = random<float>(kGroups * kHeads * side * side, generator);
  const DecayMask mask{.groups = kGroups,
                       .curves = kCurves,
                       .axes = kAxes,
                       .tokens = kTokens,
                       .heads = kHeads,
                       .prefix = kPrefix,
                       .log_space = log_space,
                       .decay_per_axis = decay_per_axis,
                       .ranks = ranks.data(),
                       .log_decay = log_decay.data(),
                       .weight = weight.data(),
                       .prefix_decay = prefix_decay.data()};
  const int64_t span = largest_distance(mask);
  std::vector<Bytes> results;
  results.reserve(4);
  const auto result = [&](std::size_t count) { return results.emplace_back(count * sizeof(float), 0xff).data(); };
  const DecayMaskForward forward{mask, result(dout.size())};
  run_on_threads(plan(forward, span), split, [&](int phase, int64_t begin, int64_t end, Scratch scratch) {
    run(forward, span, level, phase, begin, end, scratch);
  });
  const DecayMaskBackward backward{mask, dout.data(), result(log_decay.size()), result(weight.size()),
                                   result(prefix_decay.size())};
  run_on_threads(plan(backward, span), split, [&](int phase, int64_t begin, int64_t end, Scratch scratch) {
    run(backward, span, level, phase, begin, end, scratch);
  });
  return results;
}

TEST(Threads, DecayMaskHasTheSameBits) {
  for (const bool log_space : {false, true}) {
    for (const bool decay_per_axis : {false, true}) {
      for (const Level level : available_levels()) {
        const std::vector<Bytes> expected = mask_results(log_space, decay_per_axis, level, {1, 1 << 20});
        for (const Split& split : kSplits) {
          EXPECT_EQ(mask_results(log_space, decay_per_axis, level, split), expected)
              << "log space " << log_space << ", a decay per axis " << decay_per_axis << ", " << split.threads
              << " threads, level " << level_name(level);
        }
      }
    }
  }
}

}  // namespace
}  // namespace violin::kernels::cpu
