#include "tests/ops/exact.h"

#include <cmath>
#include <limits>
#include <numeric>

namespace violin::tests {
namespace {

using Long = long double;
using Index = std::int64_t;

std::vector<Long> values_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

at::Tensor tensor_of(const std::vector<Long>& values, at::IntArrayRef sizes) {
  at::Tensor result = at::empty(sizes, at::kDouble);
  std::copy(values.begin(), values.end(), result.mutable_data_ptr<double>());
  return result;
}

// An optional table [G or nothing,h or 1,Nq,Nk] and its gradient.
class ExactTable {
 public:
  explicit ExactTable(const ops::MaybeTensor& table) : given_(table.has_value()) {
    if (!given_) return;
    sizes_ = table->sizes().vec();
    groups_ = table->dim() == 3 ? 1 : table->size(0);
    heads_ = table->size(-3);
    area_ = table->size(-2) * table->size(-1);
    value_ = values_of(*table);
    gradient_.resize(value_.size());
  }
  bool given() const { return given_; }
  // Of image b, head h and the place i * Nk + j; `otherwise` where there is no table.
  Long value(Index b, Index h, Index place, Long otherwise) const {
    return given_ ? value_[index(b, h, place)] : otherwise;
  }
  void add(Index b, Index h, Index place, Long amount) {
    if (given_) gradient_[index(b, h, place)] += amount;
  }
  void store(const char* name, Results& results) const {
    if (given_) results[name] = tensor_of(gradient_, sizes_);
  }

 private:
  Index index(Index b, Index h, Index place) const {
    return (b % groups_ * heads_ + (heads_ == 1 ? 0 : h)) * area_ + place;
  }

  bool given_;
  std::vector<Index> sizes_;
  Index groups_ = 1, heads_ = 1, area_ = 0;
  std::vector<Long> value_, gradient_;
};

Long dot(const Long* a, const Long* b, Index count) {
  return std::inner_product(a, a + count, b, Long{0});
}

// to += factor * from
void add_multiple(Long factor, const Long* from, Long* to, Index count) {
  for (Index c = 0; c < count; ++c) to[c] += factor * from[c];
}

}  // namespace

Results exact_attention(const AttentionInputs& inputs) {
  constexpr Long kInfinity = std::numeric_limits<Long>::infinity();
  const Index batch = inputs.q.size(0), heads = inputs.q.size(1), queries = inputs.q.size(2), dim = inputs.q.size(3);
  const Index keys = inputs.k.size(2);
  const Long scale = inputs.scale.value_or(1.0 / std::sqrt(static_cast<double>(dim)));
  const std::vector<Long> q = values_of(inputs.q), k = values_of(inputs.k), v = values_of(inputs.v),
                          dout = values_of(inputs.dout);
  ExactTable gain(inputs.tables.gain), bias(inputs.tables.bias), gate(inputs.tables.gate), after(inputs.tables.after);
  std::vector<Long> out(q.size()), dq(q.size()), dk(k.size()), dv(v.size()), lse(batch * heads * queries, -kInfinity);
  std::vector<Long> products(keys), weights(keys), dweights(keys);
  for (Index row = 0; row < batch * heads * queries; ++row) {
    const Index b = row / (heads * queries), h = row / queries % heads, i = row % queries;
    const Index first_key = (b * heads + h) * keys * dim, first_place = i * keys;
    const Long *query = &q[row * dim], *dout_row = &dout[row * dim];
    Long largest = -kInfinity;
    for (Index j = 0; j < keys; ++j) {
      products[j] = dot(query, &k[first_key + j * dim], dim);
      weights[j] = scale * products[j] * gain.value(b, h, first_place + j, 1) + bias.value(b, h, first_place + j, 0);
      largest = std::max(largest, weights[j]);
    }
    Long sum = 0;
    for (Long& weight : weights) sum += weight = largest == -kInfinity ? 0 : std::exp(weight - largest);
    if (sum > 0) lse[row] = largest + std::log(sum);
    Long delta = 0;
    for (Index j = 0; j < keys; ++j) {
      const Index place = first_place + j;
      weights[j] = sum > 0 ? weights[j] / sum : 0;
      const Long weight = weights[j] * gate.value(b, h, place, 1) + after.value(b, h, place, 0);
      const Long dweight = dot(dout_row, &v[first_key + j * dim], dim);
      add_multiple(weight, &v[first_key + j * dim], &out[row * dim], dim);
      add_multiple(weight, dout_row, &dv[first_key + j * dim], dim);
      after.add(b, h, place, dweight);
      gate.add(b, h, place, weights[j] * dweight);
      dweights[j] = dweight * gate.value(b, h, place, 1);
      delta += weights[j] * dweights[j];
    }
    for (Index j = 0; j < keys; ++j) {
      const Index place = first_place + j;
      const Long dlogit = weights[j] * (dweights[j] - delta);
      bias.add(b, h, place, dlogit);
      gain.add(b, h, place, dlogit * scale * products[j]);
      const Long dproduct = dlogit * scale * gain.value(b, h, place, 1);
      add_multiple(dproduct, &k[first_key + j * dim], &dq[row * dim], dim);
      add_multiple(dproduct, query, &dk[first_key + j * dim], dim);
    }
  }
  Results results = {{"out", tensor_of(out, inputs.q.sizes())},
                     {"dq", tensor_of(dq, inputs.q.sizes())},
                     {"dk", tensor_of(dk, inputs.k.sizes())},
                     {"dv", tensor_of(dv, inputs.v.sizes())},
                     {"lse", tensor_of(lse, inputs.q.sizes().slice(0, 3))}};
  gain.store("dgain", results);
  bias.store("dbias", results);
  gate.store("dgate", results);
  after.store("dafter", results);
  return results;
}

}  // namespace violin::tests
