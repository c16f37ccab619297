// Attention backward on the CPU: five tile products per (query tile, key tile) and one pass over the tile in between.
//
// Everything is transposed, a row per key and a column per query: S^T = K Q^T and dP^T = V dO^T need only the small Q
// and dO tiles transposed, the row statistics become vectors that lie along the columns, and of the three results dV +=
// P^T dO and dK += dA^T Q read the tiles as they are while dQ^T += K^T dA^T needs K^T, packed once per image and head.
// The tables are transposed a tile at a time, once for all images that share them, and so are their gradients on the
// way back.
//
// Where all keys are one tile, the softmax's sum and D = rowsum(P o dP) are taken from the tile itself. Over several
// tiles weights come back as P = exp(logit - LSE) from the saved log-sum-exp, and D as rowsum(dO o O), which costs
// nothing. Both are as good as what is saved: a float32 LSE resolves a weight to |LSE| roundings, and D from an output
// of 16 bits, or next to logits so large that a row has one weight, is off by more than dP - D itself. Query tiles of
// these kinds pass over the keys once before, two tile products more, and measure the softmax and D from the very
// products that the gradients are made of.
//
// Table gradients are summed over the images of a batch without atomics: a task owns a part of a table and walks over
// the images in order, flushing a partial sum every kImagesPerSum images (one long float32 sum would lose accuracy).
//   short sequences: a task is (group, head, run of images) and owns dQ, dK, dV of its images; the runs' table sums are
//   added
//     in order in a second phase;
//   long ones: a task is (group, head, slab of query tiles) and owns dQ and the table rows of its slab; what the slabs
//   add to
//     dK and dV is summed in order in a last phase.
#include <cmath>
#include <cstring>
#include <limits>

#include "violin/kernels/cpu/attention.h"
#include "violin/kernels/cpu/tiling.h"

namespace violin::kernels::cpu {
namespace {

constexpr int64_t kQueryTile = 80;
constexpr int64_t kKeyTile = 256;
constexpr int64_t kImagesPerSum = 8;
constexpr int64_t kShortTable = 512 * 512;                    // elements of a table that a core keeps in its cache
constexpr int64_t kPartialBytes = int64_t{32} * 1024 * 1024;  // for the slabs' shares of dK and dV
constexpr int kTables = 3;                                    // gain, bias, gate
constexpr double kLargeLse = 16;                              // beyond it the saved log-sum-exp is too coarse

template <class Source, class Operand, class Real>
class Backward {
 public:
  using Ops = RowOps<Source, Operand, Real>;
  using Product = MatMul::Function<Operand, Real>;
  static constexpr bool kInPlace = std::is_same_v<Source, Operand>;  // operands are read where they are
  static constexpr bool kRoundedOutput = sizeof(Source) < sizeof(Real);
  static constexpr bool kAccumulateInPlace = std::is_same_v<Source, Real>;  // dK and dV are summed where they will be

  Backward(const AttentionBackward& call, const Ops* ops, Product product)
      : call_(call),
        shape_(call.shape),
        ops_(ops),
        product_(product),
        queries_(shape_.queries, kQueryTile, kLane),
        keys_(shape_.keys, kKeyTile, 1),
        images_(shape_.batch / std::max<int64_t>(shape_.groups, 1)),
        owners_(shape_.groups * shape_.heads),
        tables_{&call.gain, &call.bias, &call.gate},
        dtables_{static_cast<Real*>(call.dgain), static_cast<Real*>(call.dbias), static_cast<Real*>(call.dgate)} {
    need_dtable_ = call.dgain != nullptr || call.dbias != nullptr || call.dgate != nullptr;
    need_dscores_ = need_dtable_ || call.dq.data != nullptr || call.dk.data != nullptr;
    short_ = queries_.padded_length() * shape_.keys <= kShortTable && shape_.batch * shape_.heads >= kTasksWanted;
    runs_ = std::min(images_, divide_up(need_dtable_ ? kTasksWanted : 2 * kTasksWanted, std::max<int64_t>(owners_, 1)));
    const int64_t slab_bytes = std::max<int64_t>(shape_.batch * shape_.heads * 2 * head_size() * sizeof(Real), 1);
    slabs_ = std::min(
        {queries_.count(), divide_up(kTasksWanted, std::max<int64_t>(owners_, 1)), 1 + kPartialBytes / slab_bytes});
  }

  Work plan() {
    Work work;
    if (shape_.batch * shape_.heads * shape_.queries * shape_.keys * shape_.dim == 0) return work;
    Arena thread(nullptr);
    take_thread(thread);
    Arena shared(nullptr);
    take_shared(shared);
    work.thread_scratch_bytes = thread.used();
    work.shared_scratch_bytes = shared.used();
    if (short_) {
      work.tasks[0] = owners_ * runs_;
      work.tasks[1] = owners_;
      work.phases = need_dtable_ ? 2 : 1;
    } else {
      work.tasks[0] = shape_.batch * shape_.heads;
      work.tasks[1] = owners_ * slabs_;
      work.tasks[2] = shape_.batch * shape_.heads;
      work.phases = partial_slabs() > 0 ? 3 : 2;
    }
    return work;
  }

  void run(int phase, int64_t begin, int64_t end, Scratch scratch) {
    Arena thread(scratch.thread);
    take_thread(thread);
    Arena shared(scratch.shared);
    take_shared(shared);
    for (int64_t task = begin; task < end; ++task) {
      if (short_) {
        phase == 0 ? run_images(task) : sum_runs(task);
      } else {
        phase == 0 ? pack(task / shape_.heads, task % shape_.heads, packed_ + task * packed_size())
                   : (phase == 1 ? run_slab(task) : sum_slabs(task));
      }
    }
  }

 private:
  // What one image contributes to one query tile.
  struct Queries {
    Operand* q_transposed = nullptr;   // [d, padded]
    Operand* do_transposed = nullptr;  // [d, padded]
    Matrix<const Operand> q, dout;     // [rows, d]
    Real* dq_transposed = nullptr;     // [d, padded]
    Real* shift = nullptr;             // [padded] and so the next two, as in BackwardTile
    Real* factor = nullptr;
    Real* delta = nullptr;
    bool measured = false;      // whether the softmax is measured anew, instead of taken from what forward saved
    Operand* packed = nullptr;  // memory of q and dout where they are not read in place
  };
  struct Keys {
    Matrix<const Operand> k, v;             // [Nk, d]
    const Operand* k_transposed = nullptr;  // [d, size] per key tile
    Matrix<Real> dk, dv;                    // [Nk, d], null where not wanted
  };
  struct TableTiles {
    Matrix<Real> table[kTables];   // transposed, null where absent
    Matrix<Real> dtable[kTables];  // transposed sums, null where not wanted
  };

  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  static Matrix<const Real> constant(const Matrix<Real>& m) { return {m.data, m.ld}; }

  bool is_whole() const { return keys_.count() == 1; }
  int64_t head_size() const { return shape_.keys * shape_.dim; }
  int64_t packed_size() const { return head_size() * (kInPlace ? 1 : 3); }
  int64_t table_size() const { return queries_.padded_length() * shape_.keys; }
  int64_t partial_slabs() const { return slabs_ - (kAccumulateInPlace ? 1 : 0); }

  void take_thread(Arena& arena) {
    const int64_t width = queries_.largest();
    products_ = arena.take<Real>(keys_.largest() * width);
    dprobabilities_ = arena.take<Real>(keys_.largest() * width);
    if constexpr (std::is_same_v<Operand, Real>) {
      weights_ = dprobabilities_;
      dproducts_ = products_;
    } else {
      weights_ = arena.take<Operand>(keys_.largest() * width);
      dproducts_ = arena.take<Operand>(keys_.largest() * width);
    }
    if (is_whole()) probabilities_ = arena.take<Real>(keys_.largest() * width);
    const int64_t images_at_once = short_ ? 1 : std::min(images_, kImagesPerSum);
    for (int64_t i = 0; i < images_at_once; ++i) {
      Queries& image = image_[i];
      image.q_transposed = arena.take<Operand>(shape_.dim * width);
      image.do_transposed = arena.take<Operand>(shape_.dim * width);
      image.dq_transposed = arena.take<Real>(shape_.dim * width);
      image.shift = arena.take<Real>(width);
      image.factor = arena.take<Real>(width);
      image.delta = arena.take<Real>(width);
      if constexpr (!kInPlace) image.packed = arena.take<Operand>(2 * width * shape_.dim);
    }
    const int64_t table = short_ ? table_size() : keys_.largest() * width;
    for (int i = 0; i < kTables; ++i) {
      if (tables_[i]->data != nullptr) table_[i] = arena.take<Real>(table);
      if (dtables_[i] != nullptr) dtable_[i] = arena.take<Real>(table);
    }
    if (short_) {
      packed_ = arena.take<Operand>(packed_size());
      if constexpr (!kAccumulateInPlace) dkv_ = arena.take<Real>(2 * head_size());
    }
  }

  void take_shared(Arena& arena) {
    if (short_) {
      for (int i = 0; i < kTables; ++i) {
        if (dtables_[i] != nullptr) table_sums_[i] = arena.take<Real>(runs_ * owners_ * table_size());
      }
    } else {
      packed_ = arena.take<Operand>(shape_.batch * shape_.heads * packed_size());
      partials_ = arena.take<Real>(partial_slabs() * shape_.batch * shape_.heads * 2 * head_size());
    }
  }

  // K^T per key tile, and K and V where they cannot be read in place.
  void pack(int64_t b, int64_t h, Operand* to) const {
    for (int64_t tile = 0; tile < keys_.count(); ++tile) {
      const int64_t begin = keys_.begin(tile);
      const int64_t size = keys_.size(tile);
      ops_->pack_transposed(at<const Source>(call_.k, b, h, begin), call_.k.token, size, shape_.dim, size,
                            {to + begin * shape_.dim, size});
    }
    if constexpr (!kInPlace) {
      ops_->pack(at<const Source>(call_.k, b, h), call_.k.token, shape_.keys, shape_.dim,
                 {to + head_size(), shape_.dim});
      ops_->pack(at<const Source>(call_.v, b, h), call_.v.token, shape_.keys, shape_.dim,
                 {to + 2 * head_size(), shape_.dim});
    }
  }

  Keys keys_of(int64_t b, int64_t h, const Operand* packed) const {
    Keys keys;
    keys.k_transposed = packed;
    if constexpr (kInPlace) {
      keys.k = {at<const Source>(call_.k, b, h), call_.k.token};
      keys.v = {at<const Source>(call_.v, b, h), call_.v.token};
    } else {
      keys.k = {packed + head_size(), shape_.dim};
      keys.v = {packed + 2 * head_size(), shape_.dim};
    }
    return keys;
  }

  // dK and dV of an image go to `scratch` [2, Nk, d], or in place where it is null.
  void collect(Keys& keys, int64_t b, int64_t h, Real* scratch) const {
    const auto target = [&](const MutableHeads& gradient, Real* part) -> Matrix<Real> {
      if (gradient.data == nullptr) return {};
      if (scratch != nullptr) return {part, shape_.dim};
      return {at<Real>(gradient, b, h), gradient.token};
    };
    keys.dk = target(call_.dk, scratch);
    keys.dv = target(call_.dv, scratch == nullptr ? nullptr : scratch + head_size());
  }

  void load_queries(Queries& image, int64_t b, int64_t h, int64_t tile) const {
    const int64_t first = queries_.begin(tile);
    const int64_t rows = queries_.size(tile);
    const int64_t padded = queries_.padded(tile);
    const Source* q = at<const Source>(call_.q, b, h, first);
    const Source* dout = at<const Source>(call_.dout, b, h, first);
    ops_->pack_transposed(q, call_.q.token, rows, shape_.dim, padded, {image.q_transposed, padded});
    ops_->pack_transposed(dout, call_.dout.token, rows, shape_.dim, padded, {image.do_transposed, padded});
    if constexpr (kInPlace) {
      image.q = {q, call_.q.token};
      image.dout = {dout, call_.dout.token};
    } else {
      Operand* packed_dout = image.packed + rows * shape_.dim;
      ops_->pack(q, call_.q.token, rows, shape_.dim, {image.packed, shape_.dim});
      ops_->pack(dout, call_.dout.token, rows, shape_.dim, {packed_dout, shape_.dim});
      image.q = {image.packed, shape_.dim};
      image.dout = {packed_dout, shape_.dim};
    }
    const Real* lse = static_cast<const Real*>(call_.lse) + (b * shape_.heads + h) * shape_.queries + first;
    const bool is_coarse = std::any_of(lse, lse + rows, [](Real x) {
      return x > static_cast<Real>(kLargeLse) || (x < static_cast<Real>(-kLargeLse) && x != -kInfinity);
    });
    image.measured = (kRoundedOutput && need_dscores_) || is_coarse;
    std::fill(image.delta, image.delta + padded, Real{0});
    if (image.measured) {
      std::fill(image.shift, image.shift + padded, -kInfinity);
      std::fill(image.factor, image.factor + padded, Real{0});
      return;
    }
    if (!is_whole()) {
      ops_->dot_rows(dout, call_.dout.token, at<const Source>(call_.out, b, h, first), call_.out.token, rows,
                     shape_.dim, image.delta);
    }
    for (int64_t r = 0; r < rows; ++r) {
      image.shift[r] = lse[r] == -kInfinity ? kInfinity : lse[r];
    }
    std::fill(image.shift + rows, image.shift + padded, kInfinity);
  }

  // Both products of a query tile and a key tile.
  void multiply(const Queries& image, const Keys& keys, int64_t query_tile, int64_t key_tile) const {
    const int64_t key = keys_.begin(key_tile);
    const int64_t count = keys_.size(key_tile);
    const int64_t width = queries_.padded(query_tile);
    const int64_t dim = shape_.dim;
    product_(count, width, dim, keys.k.row(key), keys.k.ld, image.q_transposed, width, products_, width, false);
    if (need_dscores_) {
      product_(count, width, dim, keys.v.row(key), keys.v.ld, image.do_transposed, width, dprobabilities_, width,
               false);
    } else {
      std::fill_n(dprobabilities_, count * width, Real{0});
    }
  }

  // One key tile's part of the softmax of a query tile.
  void measure(const Queries& image, const Keys& keys, const TableTiles& tiles, int64_t query_tile,
               int64_t key_tile) const {
    const int64_t width = queries_.padded(query_tile);
    multiply(image, keys, query_tile, key_tile);
    ops_->statistics({.keys = keys_.size(key_tile),
                      .queries = width,
                      .products = {products_, width},
                      .dprobabilities = {dprobabilities_, width},
                      .gain = constant(tiles.table[0]),
                      .bias = constant(tiles.table[1]),
                      .gate = constant(tiles.table[2]),
                      .scale = static_cast<Real>(call_.scale),
                      .maximum = image.shift,
                      .sum = image.factor,
                      .delta = image.delta});
  }

  void finish_measuring(const Queries& image, int64_t query_tile) const {
    const int64_t rows = queries_.size(query_tile);
    for (int64_t r = 0; r < queries_.padded(query_tile); ++r) {
      const bool is_empty = r >= rows || image.factor[r] == Real{0};
      if (is_empty) image.shift[r] = kInfinity;
      image.delta[r] = is_empty ? Real{0} : image.delta[r] / image.factor[r];
      image.factor[r] = is_empty ? Real{0} : Real{1} / image.factor[r];
    }
  }

  void store_queries(const Queries& image, int64_t b, int64_t h, int64_t tile) const {
    if (call_.dq.data == nullptr) return;
    ops_->store_transposed({image.dq_transposed, queries_.padded(tile)}, queries_.size(tile), shape_.dim,
                           at<Source>(call_.dq, b, h, queries_.begin(tile)), call_.dq.token);
  }

  // One query tile of one image against one key tile. `fresh` starts dK and dV of these keys instead of adding to them.
  void step(const Queries& image, const Keys& keys, const TableTiles& tiles, int64_t query_tile, int64_t key_tile,
            bool fresh) const {
    const int64_t key = keys_.begin(key_tile);
    const int64_t count = keys_.size(key_tile);
    const int64_t rows = queries_.size(query_tile);
    const int64_t width = queries_.padded(query_tile);
    const int64_t dim = shape_.dim;
    multiply(image, keys, query_tile, key_tile);
    ops_->backward({.keys = count,
                    .queries = width,
                    .products = {products_, width},
                    .dprobabilities = {dprobabilities_, width},
                    .weights_out = {weights_, width},
                    .dproducts_out = {dproducts_, width},
                    .gain = constant(tiles.table[0]),
                    .bias = constant(tiles.table[1]),
                    .gate = constant(tiles.table[2]),
                    .dgain = tiles.dtable[0],
                    .dbias = tiles.dtable[1],
                    .dgate = tiles.dtable[2],
                    .scale = static_cast<Real>(call_.scale),
                    .shift = is_whole() && image.measured ? nullptr : image.shift,
                    .factor = image.measured ? image.factor : nullptr,
                    .delta = image.delta,
                    .probabilities = {probabilities_, width}});
    if (keys.dv) {
      product_(count, dim, rows, weights_, width, image.dout.data, image.dout.ld, keys.dv.row(key), keys.dv.ld, !fresh);
    }
    if (keys.dk) {
      product_(count, dim, rows, dproducts_, width, image.q.data, image.q.ld, keys.dk.row(key), keys.dk.ld, !fresh);
    }
    if (call_.dq.data != nullptr) {
      product_(dim, width, count, keys.k_transposed + key * dim, count, dproducts_, width, image.dq_transposed, width,
               key_tile > 0);
    }
  }

  // -- Short sequences ----------------------------------------------------------------------------------------------

  // The tiles of a whole table, one block [Nk, padded] per query tile.
  TableTiles blocks(int64_t query_tile, int64_t key_tile) const {
    TableTiles tiles;
    const int64_t width = queries_.padded(query_tile);
    const int64_t offset = queries_.begin(query_tile) * shape_.keys + keys_.begin(key_tile) * width;
    for (int i = 0; i < kTables; ++i) {
      if (tables_[i]->data != nullptr) tiles.table[i] = {table_[i] + offset, width};
      if (dtables_[i] != nullptr) tiles.dtable[i] = {dtable_[i] + offset, width};
    }
    return tiles;
  }

  void run_images(int64_t task) {
    const int64_t owner = task / runs_;
    const int64_t run = task % runs_;
    const int64_t g = owner / shape_.heads;
    const int64_t h = owner % shape_.heads;
    for (int i = 0; i < kTables; ++i) {
      if (tables_[i]->data == nullptr) continue;
      for (int64_t tile = 0; tile < queries_.count(); ++tile) {
        const int64_t first = queries_.begin(tile);
        ops_->transpose_table(at<Real>(*tables_[i], g, h, first, 0), queries_.size(tile), shape_.keys,
                              queries_.padded(tile), {table_[i] + first * shape_.keys, queries_.padded(tile)});
      }
    }
    const int64_t begin = run_begin(images_, runs_, run);
    const int64_t end = run_begin(images_, runs_, run + 1);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i * shape_.groups + g;
      if (need_dtable_ && (i - begin) % kImagesPerSum == 0) clear_table_sums();
      pack(b, h, packed_);
      Keys keys = keys_of(b, h, packed_);
      collect(keys, b, h, dkv_);
      for (int64_t tile = 0; tile < queries_.count(); ++tile) {
        Queries& image = image_[0];
        load_queries(image, b, h, tile);
        if (image.measured && !is_whole()) {
          for (int64_t key_tile = 0; key_tile < keys_.count(); ++key_tile) {
            measure(image, keys, blocks(tile, key_tile), tile, key_tile);
          }
          finish_measuring(image, tile);
        }
        for (int64_t key_tile = 0; key_tile < keys_.count(); ++key_tile) {
          step(image, keys, blocks(tile, key_tile), tile, key_tile, tile == 0);
        }
        store_queries(image, b, h, tile);
      }
      if constexpr (!kAccumulateInPlace) {
        store_keys(call_.dk, b, h, dkv_, 1, 0, {});
        store_keys(call_.dv, b, h, dkv_ + head_size(), 1, 0, {});
      }
      const bool last = i + 1 == end;
      if (need_dtable_ && (last || (i + 1 - begin) % kImagesPerSum == 0)) {
        flush_table_sums(run * owners_ + owner, i - begin >= kImagesPerSum);
      }
    }
  }

  void clear_table_sums() {
    for (int i = 0; i < kTables; ++i) {
      if (dtables_[i] != nullptr) std::fill_n(dtable_[i], table_size(), Real{0});
    }
  }

  void flush_table_sums(int64_t slot, bool accumulate) {
    for (int i = 0; i < kTables; ++i) {
      if (dtables_[i] != nullptr) {
        ops_->add(dtable_[i], table_size(), accumulate, table_sums_[i] + slot * table_size());
      }
    }
  }

  void sum_runs(int64_t owner) const {
    for (int i = 0; i < kTables; ++i) {
      if (dtables_[i] == nullptr) continue;
      Real* out = dtables_[i] + owner * shape_.queries * shape_.keys;
      for (int64_t tile = 0; tile < queries_.count(); ++tile) {
        const int64_t first = queries_.begin(tile);
        const Real* sums = table_sums_[i] + owner * table_size() + first * shape_.keys;
        ops_->sum_transposed_table({sums, queries_.padded(tile)}, runs_, owners_ * table_size(), queries_.size(tile),
                                   shape_.keys, factor(i), false, {out + first * shape_.keys, shape_.keys});
      }
    }
  }

  Real factor(int table) const { return table == 0 ? static_cast<Real>(call_.scale) : Real{1}; }

  void store_keys(const MutableHeads& gradient, int64_t b, int64_t h, const Real* parts, int64_t count, int64_t stride,
                  Matrix<const Real> first) const {
    if (gradient.data == nullptr) return;
    ops_->store_sum(parts, count, stride, first, shape_.keys, shape_.dim, at<Source>(gradient, b, h), gradient.token);
  }

  // -- Long sequences -----------------------------------------------------------------------------------------------

  void run_slab(int64_t task) {
    const int64_t owner = task / slabs_;
    const int64_t slab = task % slabs_;
    const int64_t g = owner / shape_.heads;
    const int64_t h = owner % shape_.heads;
    const int64_t first_tile = run_begin(queries_.count(), slabs_, slab);
    for (int64_t tile = first_tile; tile < run_begin(queries_.count(), slabs_, slab + 1); ++tile) {
      for (int64_t begin = 0; begin < images_; begin += kImagesPerSum) {
        const int64_t count = std::min(kImagesPerSum, images_ - begin);
        run_tile(g, h, slab, tile, begin, count, tile == first_tile);
      }
    }
  }

  // The tables of one pair of tiles, without sums for their gradients.
  TableTiles load_tables(int64_t g, int64_t h, int64_t tile, int64_t key_tile) const {
    TableTiles tiles;
    const int64_t width = queries_.padded(tile);
    for (int i = 0; i < kTables; ++i) {
      if (tables_[i]->data == nullptr) continue;
      tiles.table[i] = {table_[i], width};
      ops_->transpose_table(at<Real>(*tables_[i], g, h, queries_.begin(tile), keys_.begin(key_tile)),
                            queries_.size(tile), keys_.size(key_tile), width, tiles.table[i]);
    }
    return tiles;
  }

  void run_tile(int64_t g, int64_t h, int64_t slab, int64_t tile, int64_t begin, int64_t count, bool fresh) {
    const int64_t first = queries_.begin(tile);
    const int64_t rows = queries_.size(tile);
    const int64_t width = queries_.padded(tile);
    Keys keys[kImagesPerSum];
    bool any_measured = false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t b = (begin + i) * shape_.groups + g;
      const int64_t index = b * shape_.heads + h;
      load_queries(image_[i], b, h, tile);
      any_measured = any_measured || image_[i].measured;
      keys[i] = keys_of(b, h, packed_ + index * packed_size());
      const int64_t part = slab - (kAccumulateInPlace ? 1 : 0);
      collect(keys[i], b, h,
              part < 0 ? nullptr : partials_ + (part * shape_.batch * shape_.heads + index) * 2 * head_size());
    }
    if (any_measured && !is_whole()) {
      for (int64_t key_tile = 0; key_tile < keys_.count(); ++key_tile) {
        const TableTiles tiles = load_tables(g, h, tile, key_tile);
        for (int64_t i = 0; i < count; ++i) {
          if (image_[i].measured) measure(image_[i], keys[i], tiles, tile, key_tile);
        }
      }
      for (int64_t i = 0; i < count; ++i) {
        if (image_[i].measured) finish_measuring(image_[i], tile);
      }
    }
    for (int64_t key_tile = 0; key_tile < keys_.count(); ++key_tile) {
      const int64_t key = keys_.begin(key_tile);
      const int64_t size = keys_.size(key_tile);
      TableTiles tiles = load_tables(g, h, tile, key_tile);
      for (int i = 0; i < kTables; ++i) {
        if (dtables_[i] == nullptr) continue;
        tiles.dtable[i] = {dtable_[i], width};
        std::fill_n(dtable_[i], size * width, Real{0});
      }
      for (int64_t i = 0; i < count; ++i) step(image_[i], keys[i], tiles, tile, key_tile, fresh);
      for (int i = 0; i < kTables; ++i) {
        if (dtables_[i] == nullptr) continue;
        Real* out = dtables_[i] + ((g * shape_.heads + h) * shape_.queries + first) * shape_.keys + key;
        ops_->sum_transposed_table({dtable_[i], width}, 1, 0, rows, size, factor(i), begin > 0, {out, shape_.keys});
      }
    }
    for (int64_t i = 0; i < count; ++i) store_queries(image_[i], (begin + i) * shape_.groups + g, h, tile);
  }

  void sum_slabs(int64_t task) const {
    const int64_t b = task / shape_.heads;
    const int64_t h = task % shape_.heads;
    const int64_t stride = shape_.batch * shape_.heads * 2 * head_size();
    const auto sum = [&](const MutableHeads& gradient, const Real* parts) {
      Matrix<const Real> first;
      if constexpr (kAccumulateInPlace) {
        if (gradient.data != nullptr) first = {at<const Real>(gradient, b, h), gradient.token};
      }
      store_keys(gradient, b, h, parts, partial_slabs(), stride, first);
    };
    sum(call_.dk, partials_ + task * 2 * head_size());
    sum(call_.dv, partials_ + task * 2 * head_size() + head_size());
  }

  const AttentionBackward& call_;
  const AttentionShape& shape_;
  const Ops* ops_;
  Product product_;
  Tiles queries_;
  Tiles keys_;
  int64_t images_;  // of each group
  int64_t owners_;  // (group, head) pairs
  const Table* tables_[kTables];
  Real* dtables_[kTables];
  bool need_dtable_ = false;
  bool need_dscores_ = false;
  bool short_ = false;
  int64_t runs_ = 1;
  int64_t slabs_ = 1;

  // Of the thread.
  Queries image_[kImagesPerSum];
  Real* products_ = nullptr;
  Real* dprobabilities_ = nullptr;
  Real* probabilities_ = nullptr;
  Operand* weights_ = nullptr;
  Operand* dproducts_ = nullptr;
  Real* table_[kTables] = {};
  Real* dtable_[kTables] = {};
  Real* dkv_ = nullptr;
  // Shared, but for packed_ of short sequences.
  Operand* packed_ = nullptr;
  Real* table_sums_[kTables] = {};
  Real* partials_ = nullptr;
};

template <class Source, class Operand, class Real>
Backward<Source, Operand, Real> make(const AttentionBackward& call, const RowOps<Source, Operand, Real>& ops,
                                     MatMul::Function<Operand, Real> product) {
  return {call, &ops, product};
}

}  // namespace

Work plan(const AttentionBackward& call, const MatMul& matmul) {
  Work work;
  with_types(call.dtype, Level::kPlain, matmul,
             [&](const auto& ops, auto product) { work = make(call, ops, product).plan(); });
  return work;
}

void run(const AttentionBackward& call, Level level, const MatMul& matmul, int phase, std::int64_t begin,
         std::int64_t end, Scratch scratch) {
  with_types(call.dtype, level, matmul,
             [&](const auto& ops, auto product) { make(call, ops, product).run(phase, begin, end, scratch); });
}

}  // namespace violin::kernels::cpu
