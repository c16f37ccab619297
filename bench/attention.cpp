#include "bench/attention.h"

#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>

#include "tests/attention_cases.h"
#include "violin/error.h"
#include "violin/ops/ops.h"

namespace violin::bench {
namespace {

using torch::Tensor;

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Timing timing(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) { return samples[static_cast<std::size_t>(share * (samples.size() - 1) + 0.5)]; };
  return {at(0.5), at(0.25), at(0.75)};
}

// The published way: powers of every element for every curve, in every call. [1,h,N,N]
Tensor formula_mask(const Tensor& ranks, const Tensor& beta) {
  const Tensor gamma = beta.sigmoid();  // [C,h]
  Tensor sum;
  for (std::int64_t curve = 0; curve < ranks.size(0); ++curve) {
    const Tensor rank = ranks[curve].to(beta.dtype());
    const Tensor distance = (rank.unsqueeze(1) - rank.unsqueeze(0)).abs();        // [N,N]
    const Tensor power = torch::pow(gamma[curve].view({1, -1, 1, 1}), distance);  // [1,h,N,N]
    sum = sum.defined() ? sum + power : power;
  }
  return sum / ranks.size(0);
}

// A field of a file under /proc that is given in KiB, in bytes; 0 where the system does not tell.
double memory_field(const char* file, const std::string& field) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(field)) return std::stod(line.substr(field.size())) * 1024;
  }
  return 0;
}

// What autograd keeps of the formula: three tensors per curve of the mask, four of the size of the logits.
double formula_memory(const AttentionShape& shape) {
  const double table = static_cast<double>(shape.heads * shape.tokens * shape.tokens) * sizeof(float);
  return table * (3 * 8 + 4 * static_cast<double>(shape.batch));
}

struct Inputs {
  Tensor q, k, v, dout, beta, ranks;  // leaves that require gradients, but for dout and ranks
  Tensor gain;                        // a leaf too: attention's own cost, without the mask that made it
};

std::int64_t side_of(std::int64_t tokens) {
  const auto side = static_cast<std::int64_t>(std::llround(std::sqrt(static_cast<double>(tokens))));
  return side;
}

Inputs make_inputs(const AttentionShape& shape, torch::ScalarType dtype) {
  torch::manual_seed(1);
  // As a projection leaves them: [B,N,h,d] in memory.
  const auto heads = [&] {
    return torch::randn({shape.batch, shape.tokens, shape.heads, shape.dim}).to(dtype).transpose(1, 2);
  };
  Inputs in;
  in.q = heads().requires_grad_();
  in.k = heads().requires_grad_();
  in.v = heads().requires_grad_();
  in.dout = heads();
  const std::int64_t side = side_of(shape.tokens);
  const std::int64_t prefix = shape.tokens - side * side;
  if (prefix < 0)
    throw Error("bench: " + shape.to_string() + " has no grid; tokens must be a square number or a little more");
  in.ranks = ops::curve_ranks("violin", {side, side}).squeeze(1);
  // Decay parameters as the table says, the same for every shape.
  const tests::AttentionCase& entry = tests::bench_cases().front();
  in.beta = (torch::rand({8, shape.heads}) * (entry.beta_high - entry.beta_low) + entry.beta_low).requires_grad_();
  in.gain = ops::decay_mask(in.ranks, -torch::softplus(-in.beta.detach()), {}, prefix).unsqueeze(0).requires_grad_();
  return in;
}

// From here on VmHWM counts anew.
void reset_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

}  // namespace

std::string AttentionShape::to_string() const {
  return std::to_string(batch) + "," + std::to_string(heads) + "," + std::to_string(tokens) + "," + std::to_string(dim);
}

AttentionShape parse_shape(const std::string& text) {
  AttentionShape shape;
  char rest = 0;
  long b = 0, h = 0, n = 0, d = 0;
  if (std::sscanf(text.c_str(), "%ld,%ld,%ld,%ld%c", &b, &h, &n, &d, &rest) != 4 || b < 1 || h < 1 || n < 1 || d < 1) {
    throw Error("'" + text + "' is not a shape; expected BATCH,HEADS,TOKENS,DIM such as 8,6,196,64");
  }
  return {b, h, n, d};
}

const std::vector<AttentionShape>& default_shapes() {
  static const std::vector<AttentionShape> shapes = [] {
    std::vector<AttentionShape> result;
    for (const tests::AttentionCase& entry : tests::bench_cases()) {
      result.push_back({entry.batch, entry.heads, entry.queries, entry.dim});
    }
    return result;
  }();
  return shapes;
}

const Row& AttentionResult::row(const std::string& name) const {
  return *std::find_if(rows.begin(), rows.end(), [&](const Row& row) { return row.name == name; });
}

namespace {
double ratio(const AttentionResult& result, const std::vector<std::vector<double>>& samples, const std::string& name,
             const std::string& peer) {
  const auto index = [&](const std::string& wanted) { return &result.row(wanted) - result.rows.data(); };
  const auto a = index(name);
  const auto b = index(peer);
  std::vector<double> ratios;
  for (const auto& round : samples) ratios.push_back(round[a] / round[b]);
  return timing(ratios).median;
}
}  // namespace

double AttentionResult::forward_ratio(const std::string& name, const std::string& peer) const {
  return ratio(*this, forward_samples, name, peer);
}
double AttentionResult::both_ratio(const std::string& name, const std::string& peer) const {
  return ratio(*this, both_samples, name, peer);
}

void keep_freed_memory() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

AttentionResult bench_attention(const AttentionShape& shape, const AttentionOptions& options,
                                const std::function<void(int round, int rounds)>& progress) {
  const auto dtype = options.dtype == "bfloat16" ? torch::kBFloat16 : torch::kFloat32;
  Inputs in = make_inputs(shape, dtype);
  const double scale = 1 / std::sqrt(static_cast<double>(shape.dim));
  const std::int64_t side = side_of(shape.tokens);
  const std::int64_t prefix = shape.tokens - side * side;

  struct Peer {
    std::string name;
    std::function<Tensor()> call;
    std::vector<Tensor> leaves;  // none: no backward
  };
  const std::vector<Tensor> qkv = {in.q, in.k, in.v};
  std::vector<Peer> peers = {
      {"sdpa", [&] { return at::scaled_dot_product_attention(in.q, in.k, in.v); }, qkv},
      {"violin", [&] { return ops::attention(in.q, in.k, in.v); }, qkv},
      {"violin gain", [&] { return ops::attention(in.q, in.k, in.v, in.gain); }, {in.q, in.k, in.v, in.gain}},
  };
  if (options.formula) {
    const bool fits = formula_memory(shape) < 0.6 * memory_field("/proc/meminfo", "MemAvailable:");
    peers.push_back({"formula",
                     [&] {
                       Tensor mask = formula_mask(in.ranks, in.beta).to(dtype);
                       if (prefix > 0) mask = torch::constant_pad_nd(mask, {prefix, 0, prefix, 0}, 1);
                       return torch::matmul(
                           torch::softmax(torch::matmul(in.q, in.k.transpose(-1, -2)) * scale * mask, -1), in.v);
                     },
                     fits ? std::vector<Tensor>{in.q, in.k, in.v, in.beta} : std::vector<Tensor>{}});
  }

  const auto forward = [&](const Peer& peer) {
    const torch::NoGradGuard no_grad;
    return seconds_of([&] { peer.call(); });
  };
  const auto both = [&](const Peer& peer) {
    if (peer.leaves.empty()) return std::numeric_limits<double>::quiet_NaN();
    return seconds_of([&] { torch::autograd::grad({peer.call()}, peer.leaves, {in.dout}); });
  };

  AttentionResult result;
  result.shape = shape;
  double one_round = 0;
  for (const Peer& peer : peers) {
    result.rows.push_back({peer.name, {}, {}});
    forward(peer);
    both(peer);  // warm-up; the second round is what a round costs
    one_round += forward(peer) + (peer.leaves.empty() ? 0 : both(peer));
  }
  result.rounds =
      options.rounds > 0 ? options.rounds : std::clamp(static_cast<int>(options.seconds / one_round), 3, 400);
  for (int round = 0; round < result.rounds; ++round) {
    if (progress) progress(round, result.rounds);
    // The order turns from round to round, so that nobody always runs behind the same neighbour.
    std::vector<double> forward_times(peers.size()), both_times(peers.size());
    for (std::size_t i = 0; i < peers.size(); ++i) {
      const std::size_t peer = (i + round) % peers.size();
      forward_times[peer] = forward(peers[peer]);
      both_times[peer] = both(peers[peer]);
    }
    result.forward_samples.push_back(forward_times);
    result.both_samples.push_back(both_times);
  }
  for (std::size_t i = 0; i < peers.size(); ++i) {
    std::vector<double> forward_times, both_times;
    for (int round = 0; round < result.rounds; ++round) {
      forward_times.push_back(result.forward_samples[round][i]);
      both_times.push_back(result.both_samples[round][i]);
    }
    result.rows[i].forward = timing(forward_times);
    result.rows[i].both = timing(both_times);
  }

  // Memory: the peak while one step runs, less what was there before and the tensors that the step returns.
  {
    const Peer& peer = peers[2];
    malloc_trim(0);  // what earlier rounds freed must not hide what this one takes
    reset_peak();
    const double before = memory_field("/proc/self/status", "VmRSS:");
    const Tensor out = peer.call();
    const auto gradients = torch::autograd::grad({out}, peer.leaves, {in.dout});
    double returned = static_cast<double>(out.nbytes());
    for (const Tensor& gradient : gradients) returned += static_cast<double>(gradient.nbytes());
    result.extra_memory = std::max(0.0, memory_field("/proc/self/status", "VmHWM:") - before - returned);
  }
  return result;
}

MaskResult bench_decay_mask() {
  const AttentionShape shape{64, 12, 196, 64};
  const Inputs in = make_inputs(shape, torch::kFloat32);
  const torch::NoGradGuard no_grad;
  const Tensor log_decay = -torch::softplus(-in.beta);
  std::vector<double> mask, attention, ratios;
  for (int round = 0; round < 23; ++round) {
    const double m = seconds_of([&] { ops::decay_mask(in.ranks, log_decay); });
    const double a = seconds_of([&] { ops::attention(in.q, in.k, in.v, in.gain); });
    if (round < 3) continue;
    mask.push_back(m);
    attention.push_back(a);
    ratios.push_back(m / a);
  }
  return {timing(mask), timing(attention), timing(ratios).median};
}

}  // namespace violin::bench
