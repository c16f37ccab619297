// The mask of one attention layer: its few parameters, and tables made of them for any grid of patches.
#pragma once

#include <torch/nn/module.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "violin/nn/config.h"
#include "violin/ops/strategies.h"

namespace violin::nn {

// How many bytes of tables the layers of a model keep between calls, all together.
struct TableBudget {
  std::int64_t limit = std::int64_t{1} << 30;
  std::atomic<std::int64_t> used = 0;
};

// Under `blocks.I.attn.violin.`, h counting the heads that have a mask; undefined where the configuration does not ask:
//   beta or rate [C,h], [C,A,h] with a decay per axis; gamma, a buffer, where the decay is fixed
//   alpha [h], curve_weight [C,h], prefix_beta or prefix_rate [h]
struct MaskParameters {
  at::Tensor beta, rate, gamma, alpha, curve_weight, prefix_beta, prefix_rate;
};

// In training tables are built in each call, with gradients. In evaluation without gradients they are built once per
// grid and kept until train(), eval(), to(), load or an assignment; the layers of a model share a budget of memory,
// above which tables are built per call. Parameters made in inference mode do not tell of assignments: nothing is kept.
// For 16 bits on a GPU models take packed_tables() where they can, which are kept, and frozen, in the same way.
// Calls from several threads are safe in evaluation.
class Mask : public torch::nn::Module, public MaskParameters {
 public:
  // `native`: the model's own grid, which gives `rate` its unit.
  Mask(const MaskConfig& config, std::int64_t heads, const Size& native, std::shared_ptr<TableBudget> budget);
  ~Mask() override;

  const MaskConfig& config() const { return config_; }
  const std::vector<std::string>& curve_names() const { return names_; }

  // Initial values as the configuration names them; `name` is this layer's, for the generators.
  void initialise(std::uint64_t seed, const std::string& name);

  // For prefix + height*width tokens; tables are [h,N,N] over all heads of the layer.
  ops::Tables tables(const Size& grid, std::int64_t prefix);
  // The same where the gain can be made packed for q, k, v of this type, which takes no longer than to pack a table.
  // Only the attention operators can read it.
  std::optional<ops::Tables> packed_tables(const Size& grid, std::int64_t prefix, at::ScalarType dtype);

  // log gamma, [C,h] or [C,A,h], with gradient.
  at::Tensor log_decay() const;
  // The same decay in this layer's parameterisation; only `rate` can take any.
  void set_log_decay(const at::Tensor& log_decay);
  // M (log M for the strategy `log`) of the heads that have one, [h,N,N], with gradient and without alpha.
  at::Tensor mask(const Size& grid, std::int64_t prefix);
  const std::vector<std::int64_t>& masked_heads() const { return heads_; }

  // Frozen tables are kept whatever happens to the parameters, in training too, and parameters need no gradient; only
  // to() builds them anew. Tables of other grids come and go as ever. thaw() gives back each parameter's requires_grad.
  void freeze(const Size& grid, std::int64_t prefix);
  void thaw();
  bool frozen() const { return !frozen_.empty(); }
  void drop_tables();
  std::int64_t kept_tables() const;

  void train(bool on = true) override;
  // 16 bits cannot hold a decay near 1: a mask in a 16-bit model has float32 parameters.
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::Device device, bool non_blocking = false) override;

 private:
  friend class LayerTables;
  using State = std::vector<std::pair<const void*, std::int64_t>>;  // of parameters: memory and version
  static constexpr at::ScalarType kWhole = at::ScalarType::Undefined;
  struct Kept {
    Size grid;
    std::int64_t prefix;
    at::ScalarType packed;  // for q, k, v of this type, or kWhole: tables for everybody
    State state;            // of the parameters that went in
    ops::Tables tables;
    std::int64_t bytes;
    std::optional<c10::Stream> stream = {};  // of a GPU: where the tables were made
  };
  // Threads may use streams of their own. What is kept is complete before others see it (so that the first call for a
  // grid waits for the device), and its memory is not given away while a stream still reads it.
  static void complete(Kept& entry);
  // Made while a CUDA graph is captured: the graph makes it again whenever it runs, and before that it is nothing.
  static bool captured(const Kept& entry);
  static const ops::Tables& shared(const Kept& entry);
  // Tables of `layers` masks that are all like this one, from their parameters side by side along the heads.
  std::vector<ops::Tables> build(const MaskParameters& parameters, std::size_t layers, const Size& grid,
                                 std::int64_t prefix);
  template <class Make>
  static Kept made(const Size& grid, std::int64_t prefix, at::ScalarType packed, const Make& make);  // without a state
  Kept made_whole(const Size& grid, std::int64_t prefix);
  bool packs(at::ScalarType dtype) const;  // as far as one knows without the decay
  // The same as build(); nothing where this mask cannot be packed.
  std::vector<ops::Tables> build_packed(const MaskParameters& parameters, std::size_t layers, const Size& grid,
                                        std::int64_t prefix, at::ScalarType dtype);
  const Kept* frozen(const Size& grid, std::int64_t prefix, at::ScalarType packed = kWhole) const;
  const Kept* kept(const Size& grid, std::int64_t prefix, at::ScalarType packed);
  ops::Tables keep(Kept entry, State now);                            // if the budget allows
  bool builds_per_call(const Size& grid, std::int64_t prefix) const;  // the mutex is held
  bool builds_per_call_now(const Size& grid, std::int64_t prefix) const;
  bool like(const Mask& other) const;
  at::Tensor log_decay(const MaskParameters& parameters) const;
  at::Tensor mask_locked(const MaskParameters& parameters, const Size& grid, std::int64_t prefix);
  at::Tensor ranks(const Size& grid, const at::Device& device);
  void moved();
  State state() const;
  bool needs_gradient() const;
  bool parameters_on_gpu() const;  // and none in double precision
  void forget(std::list<Kept>& entries);

  MaskConfig config_;
  ops::Strategy strategy_;
  std::vector<std::string> names_;
  std::string curve_list_;
  std::int64_t layer_heads_;
  std::vector<std::int64_t> heads_;  // masked ones; all: 0, 1, …
  at::Tensor head_index_;            // the same as a tensor, where the parameters are
  at::Tensor units_;                 // of `rate`, per curve: [C,1] or [C,1,1]
  std::int64_t native_tokens_;

  mutable std::mutex mutex_;
  std::list<Kept> kept_;                              // used last first
  std::list<Kept> frozen_;                            // made by freeze()
  std::vector<std::pair<at::Tensor, bool>> trained_;  // parameters and their requires_grad before freeze()
  struct Ranks {
    Size grid;
    at::Tensor tensor;
    std::optional<c10::Stream> stream = {};  // of a GPU: where they were made
  };
  std::vector<Ranks> ranks_;
  std::shared_ptr<TableBudget> budget_;
};

// The tables of the layers of a model in one pass through it. Masks that are alike and have to build tables in this
// call build them together: a few large operations on a device instead of many that are too small for it.
class LayerTables {
 public:
  // One entry per layer, null where it has no mask.
  // dtype: of q, k, v.
  LayerTables(std::vector<Mask*> masks, const Size& grid, std::int64_t prefix, at::ScalarType dtype);
  // Each layer once, in order; nothing is kept here afterwards. readable: for others than the attention operators too.
  ops::Tables take(std::size_t layer, bool readable);

 private:
  std::vector<Mask*> masks_;
  Size grid_;
  std::int64_t prefix_;
  at::ScalarType dtype_;
  // This layer and those behind it that are alike and build tables in this call, as many as go together.
  std::vector<Mask*> group_from(std::size_t layer, bool packed) const;
  std::size_t begin_ = 0;  // first layer of made_
  bool packed_ = false;    // made_
  std::vector<ops::Tables> made_;
};

}  // namespace violin::nn
