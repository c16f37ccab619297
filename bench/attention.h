// Attention against its peers on this CPU, measured in one run: torch's scaled_dot_product_attention without a mask,
// and the plain formula that rebuilds the mask with pow on each call. All runs of a round are interleaved, so that a
// slow moment of the machine hits everybody; what counts are the ratios.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace violin::bench {

struct AttentionShape {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t tokens = 0;  // a square number, or one more (a class token)
  std::int64_t dim = 0;

  std::string to_string() const;  // "8,6,196,64"
};
AttentionShape parse_shape(const std::string& text);
// Of the bench's entries in tests/attention_cases.json.
const std::vector<AttentionShape>& default_shapes();

struct AttentionOptions {
  std::vector<AttentionShape> shapes = default_shapes();
  std::string dtype = "float32";  // or bfloat16
  int rounds = 0;                 // 0: as many as fit into `seconds`
  double seconds = 8;             // per shape
  bool formula = true;            // also the plain formula
};

// Seconds: median, and the quartiles around it.
struct Timing {
  double median = 0;
  double low = 0;
  double high = 0;
};

struct Row {
  std::string name;  // "sdpa", "violin", "violin gain", "formula"
  Timing forward;
  Timing both;  // forward and backward, with all gradients; NaN where they do not fit into memory
};

struct AttentionResult {
  AttentionShape shape;
  int rounds = 0;
  std::vector<Row> rows;
  double extra_memory =
      0;  // bytes beyond inputs, outputs, gradients and tables: peak of forward and backward with gain

  const Row& row(const std::string& name) const;
  // Median over the rounds of the ratio within a round.
  double forward_ratio(const std::string& name, const std::string& peer) const;
  double both_ratio(const std::string& name, const std::string& peer) const;

  // One entry per round, in the order of rows.
  std::vector<std::vector<double>> forward_samples, both_samples;
};

// Freed memory stays with the process, as it does in a training loop under a caching allocator. Otherwise every call
// that returns a large table pays for fresh pages, and the time of the system's memory manager is measured instead of
// ours.
void keep_freed_memory();

AttentionResult bench_attention(const AttentionShape& shape, const AttentionOptions& options,
                                const std::function<void(int round, int rounds)>& progress);

// decay_mask beside the attention that uses it: 8 curves, 12 heads, a 14x14 grid, batch 64.
struct MaskResult {
  Timing mask;
  Timing attention;
  double ratio = 0;
};
MaskResult bench_decay_mask();

}  // namespace violin::bench
