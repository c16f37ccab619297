// Attention forward on the CPU.
//
// For one image and head: K^T is packed once, tile by tile; then, for a tile of query rows and a tile of keys, S = Q
// K^T by a tile product, one pass over S that applies the tables and turns it into probabilities against the row's
// running maximum, and O += P V by a second tile product. With all keys in one tile (N <= 512) there is nothing to
// correct afterwards.
//
// Tables are shared by the images of a batch, so a task walks over images while its part of the tables stays in cache:
//   short sequences: a task is (group, head, run of images), all rows; it packs K^T of each image for itself;
//   long ones: a task is (group, head, query tile), all images; K^T of all images is packed before, in a phase of its
//   own.
#include <limits>

#include "violin/kernels/cpu/attention.h"
#include "violin/kernels/cpu/tiling.h"

namespace violin::kernels::cpu {
namespace {

constexpr int64_t kQueryTile = 80;
constexpr int64_t kKeyTile = 512;

template <class Source, class Operand, class Real>
class Forward {
 public:
  using Ops = RowOps<Source, Operand, Real>;
  using Product = MatMul::Function<Operand, Real>;
  // Where operands have the tensors' own type they are read in place; otherwise they are converted while being packed.
  static constexpr bool kInPlace = std::is_same_v<Source, Operand>;

  Forward(const AttentionForward& call, const Ops* ops, Product product)
      : call_(call),
        shape_(call.shape),
        ops_(ops),
        product_(product),
        queries_(shape_.queries, kQueryTile, 1),
        keys_(shape_.keys, kKeyTile, kLane),
        images_(shape_.batch / shape_.groups),
        short_(keys_.count() <= 1 && shape_.batch * shape_.heads >= kTasksWanted) {
    const int64_t owners = shape_.groups * shape_.heads;
    runs_ = std::min(images_, divide_up(2 * kTasksWanted, owners));
  }

  Work plan() const {
    Work work;
    if (shape_.batch * shape_.heads * shape_.queries == 0) return work;
    const int64_t owners = shape_.groups * shape_.heads;
    Arena thread(nullptr);
    take_thread(thread);
    work.thread_scratch_bytes = thread.used();
    if (short_) {
      work.phases = 1;
      work.tasks[0] = owners * runs_;
    } else {
      Arena shared(nullptr);
      shared.take<Operand>(shape_.batch * shape_.heads * packed_size());
      work.shared_scratch_bytes = shared.used();
      work.phases = 2;
      work.tasks[0] = shape_.batch * shape_.heads;
      work.tasks[1] = owners * queries_.count();
    }
    return work;
  }

  void run(int phase, int64_t begin, int64_t end, Scratch scratch) {
    Arena arena(scratch.thread);
    take_thread(arena);
    auto* packed = static_cast<Operand*>(scratch.shared);
    for (int64_t task = begin; task < end; ++task) {
      if (short_) {
        run_images(task);
      } else if (phase == 0) {
        pack(task / shape_.heads, task % shape_.heads, packed + task * packed_size());
      } else {
        run_query_tile(task, packed);
      }
    }
  }

 private:
  // K^T of one image and head, [d, padded] per key tile, and V where it cannot be read in place.
  int64_t packed_size() const { return keys_.padded_length() * shape_.dim + (kInPlace ? 0 : shape_.keys * shape_.dim); }

  void take_thread(Arena& arena) {
    const int64_t rows = queries_.largest();
    logits_ = arena.take<Real>(rows * keys_.largest());
    out_ = arena.take<Real>(rows * shape_.dim);
    maximum_ = arena.take<Real>(rows);
    sum_ = arena.take<Real>(rows);
    correction_ = arena.take<Real>(rows);
    if constexpr (!kInPlace) query_ = arena.take<Operand>(rows * shape_.dim);
    if constexpr (std::is_same_v<Operand, Real>) {
      probabilities_ = logits_;
    } else {
      probabilities_ = arena.take<Operand>(rows * keys_.largest());
    }
    if (short_) packed_ = arena.take<Operand>(packed_size());
  }
  void take_thread(Arena& arena) const { const_cast<Forward*>(this)->take_thread(arena); }

  void pack(int64_t b, int64_t h, Operand* to) const {
    for (int64_t tile = 0; tile < keys_.count(); ++tile) {
      const int64_t begin = keys_.begin(tile);
      ops_->pack_transposed(at<const Source>(call_.k, b, h, begin), call_.k.token, keys_.size(tile), shape_.dim,
                            keys_.padded(tile), {to + begin * shape_.dim, keys_.padded(tile)});
    }
    if constexpr (!kInPlace) {
      ops_->pack(at<const Source>(call_.v, b, h), call_.v.token, shape_.keys, shape_.dim,
                 {to + keys_.padded_length() * shape_.dim, shape_.dim});
    }
  }

  void run_images(int64_t task) const {
    const int64_t owner = task / runs_;
    const int64_t run = task % runs_;
    const int64_t g = owner / shape_.heads;
    const int64_t h = owner % shape_.heads;
    for (int64_t i = run_begin(images_, runs_, run); i < run_begin(images_, runs_, run + 1); ++i) {
      const int64_t b = i * shape_.groups + g;
      pack(b, h, packed_);
      for (int64_t tile = 0; tile < queries_.count(); ++tile) attend(g, b, h, tile, packed_);
    }
  }

  void run_query_tile(int64_t task, const Operand* packed) const {
    const int64_t owner = task / queries_.count();
    const int64_t tile = task % queries_.count();
    const int64_t g = owner / shape_.heads;
    const int64_t h = owner % shape_.heads;
    for (int64_t b = g; b < shape_.batch; b += shape_.groups) {
      attend(g, b, h, tile, packed + (b * shape_.heads + h) * packed_size());
    }
  }

  void attend(int64_t g, int64_t b, int64_t h, int64_t query_tile, const Operand* packed) const {
    const int64_t first = queries_.begin(query_tile);
    const int64_t rows = queries_.size(query_tile);
    const int64_t dim = shape_.dim;
    Matrix<const Operand> q;
    Matrix<const Operand> v;
    if constexpr (kInPlace) {
      q = {at<const Source>(call_.q, b, h, first), call_.q.token};
      v = {at<const Source>(call_.v, b, h), call_.v.token};
    } else {
      ops_->pack(at<const Source>(call_.q, b, h, first), call_.q.token, rows, dim, {query_, dim});
      q = {query_, dim};
      v = {packed + keys_.padded_length() * dim, dim};
    }
    std::fill_n(maximum_, rows, -std::numeric_limits<Real>::infinity());
    std::fill_n(sum_, rows, Real{0});
    if (keys_.count() == 0) std::fill_n(out_, rows * dim, Real{0});

    for (int64_t tile = 0; tile < keys_.count(); ++tile) {
      const int64_t key = keys_.begin(tile);
      const int64_t columns = keys_.size(tile);
      const int64_t padded = keys_.padded(tile);
      product_(rows, padded, dim, q.data, q.ld, packed + key * dim, padded, logits_, padded, false);
      ops_->softmax({.rows = rows,
                     .columns = columns,
                     .logits = {logits_, padded},
                     .probabilities = {probabilities_, padded},
                     .gain = at<Real>(call_.gain, g, h, first, key),
                     .bias = at<Real>(call_.bias, g, h, first, key),
                     .gate = at<Real>(call_.gate, g, h, first, key),
                     .scale = static_cast<Real>(call_.scale),
                     .maximum = maximum_,
                     .sum = sum_,
                     .correction = correction_});
      if (tile > 0) ops_->scale_rows({out_, dim}, rows, dim, correction_);
      product_(rows, dim, columns, probabilities_, padded, v.row(key), v.ld, out_, dim, tile > 0);
    }
    ops_->finish_rows({out_, dim}, rows, dim, maximum_, sum_, at<Source>(call_.out, b, h, first), call_.out.token,
                      static_cast<Real*>(call_.lse) + (b * shape_.heads + h) * shape_.queries + first);
  }

  const AttentionForward& call_;
  const AttentionShape& shape_;
  const Ops* ops_;
  Product product_;
  Tiles queries_;
  Tiles keys_;
  int64_t images_;  // of each group
  bool short_;
  int64_t runs_;

  // Of the thread.
  Real* logits_ = nullptr;
  Operand* probabilities_ = nullptr;
  Real* out_ = nullptr;
  Real* maximum_ = nullptr;
  Real* sum_ = nullptr;
  Real* correction_ = nullptr;
  Operand* query_ = nullptr;
  Operand* packed_ = nullptr;
};

template <class Source, class Operand, class Real>
Forward<Source, Operand, Real> make(const AttentionForward& call, const RowOps<Source, Operand, Real>& ops,
                                    MatMul::Function<Operand, Real> product) {
  return {call, &ops, product};
}

}  // namespace

Work plan(const AttentionForward& call, const MatMul& matmul) {
  Work work;
  with_types(call.dtype, Level::kPlain, matmul,
             [&](const auto& ops, auto product) { work = make(call, ops, product).plan(); });
  return work;
}

void run(const AttentionForward& call, Level level, const MatMul& matmul, int phase, std::int64_t begin,
         std::int64_t end, Scratch scratch) {
  with_types(call.dtype, level, matmul,
             [&](const auto& ops, auto product) { make(call, ops, product).run(phase, begin, end, scratch); });
}

}  // namespace violin::kernels::cpu
