#include "violin/ops/checks.h"

#include <c10/util/Exception.h>

#include "violin/ops/device.h"

namespace violin::ops {
namespace {

bool is_input_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

void check_strided(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "violin::", op, ": ", name, " has layout ", tensor.layout(),
                   "; expected a dense tensor");
}

void check_device(const char* op, const char* name, const at::Tensor& tensor, const char* first_name,
                  const at::Tensor& first) {
  TORCH_CHECK(tensor.device() == first.device(), "violin::", op, ": ", name, " is on ", tensor.device(), " and ",
              first_name, " on ", first.device(), "; expected one device for all");
}

// q, k or v.
void check_heads(const char* name, const at::Tensor& tensor) {
  check_strided("attention", name, tensor);
  TORCH_CHECK_VALUE(tensor.dim() == 4, "violin::attention: ", name, " has shape ", tensor.sym_sizes(),
                    "; expected [batch, heads, tokens, dim]");
  TORCH_CHECK_TYPE(is_input_type(tensor.scalar_type()), "violin::attention: ", name, " is ", tensor.scalar_type(),
                   "; expected float32, float64, bfloat16 or float16");
  TORCH_CHECK_VALUE(tensor.sym_size(3) >= 1, "violin::attention: ", name, " has shape ", tensor.sym_sizes(),
                    "; expected at least one number per head in the last dimension");
  TORCH_CHECK_VALUE(tensor.sym_size(3) == 1 || tensor.sym_stride(3) == 1, "violin::attention: ", name, " has stride ",
                    tensor.sym_stride(3),
                    " in its last dimension; expected 1 (a copy by .contiguous() has it; other strides are free)");
}

void check_groups(const char* name, const at::Tensor& table, AttentionSizes& sizes) {
  const c10::SymInt groups = table.sym_size(0);
  if (groups == 1) return;
  TORCH_CHECK_VALUE(groups >= 1 && sizes.batch % groups == 0, "violin::attention: ", name, " has ", groups,
                    " groups (shape ", table.sym_sizes(), "), which do not divide the batch of ", sizes.batch,
                    "; image b uses table b mod G");
  TORCH_CHECK_VALUE(sizes.groups == 1 || sizes.groups == groups, "violin::attention: ", name, " has ", groups,
                    " groups and another table has ", sizes.groups, "; expected the same number, or one");
  sizes.groups = groups;
}

void check_packed_gain(const char* name, const at::Tensor& table, const at::Tensor& q, const AttentionSizes& sizes) {
  TORCH_CHECK_TYPE(std::string_view(name) == "gain" && (on_gpu(q) || q.is_meta()) &&
                       at::isReducedFloatingType(q.scalar_type()) &&
                       table.scalar_type() == packed_type(q.scalar_type()),
                   "violin::attention: ", name, " is packed (", table.scalar_type(), ") beside q of ", q.scalar_type(),
                   " on ", q.device(), "; expected what pack_gain made for this type and device");
  TORCH_CHECK_VALUE((table.sym_size(1) == 1 || table.sym_size(1) == sizes.heads) &&
                        table.sym_size(2) == packed_tiles(sizes.keys) &&
                        table.sym_size(3) == packed_tiles(sizes.queries) &&
                        table.sym_size(4) == packed_size(q.scalar_type()) && table.is_contiguous(),
                    "violin::attention: ", name, " is packed with shape ", table.sym_sizes(), " beside q of shape ",
                    q.sym_sizes(), " and ", sizes.keys, " keys; expected what pack_gain made for these sizes");
}

void check_table(const char* name, const MaybeTensor& maybe_table, const at::Tensor& q, AttentionSizes& sizes) {
  const at::Tensor table = or_undefined(maybe_table);
  if (!table.defined()) return;
  check_strided("attention", name, table);
  check_device("attention", name, table, "q", q);
  if (is_packed_gain(table)) {
    check_packed_gain(name, table, q, sizes);
    check_groups(name, table, sizes);
    return;
  }
  TORCH_CHECK_TYPE(at::isFloatingType(table.scalar_type()), "violin::attention: ", name, " is ", table.scalar_type(),
                   "; expected a floating-point table (float32, or float64 beside float64)");
  const auto describe = [&] {
    std::ostringstream text;
    text << "violin::attention: " << name << " has shape " << table.sym_sizes() << "; expected [" << sizes.heads
         << " or 1, " << sizes.queries << ", " << sizes.keys << "] (heads, queries, keys), with a group dimension in "
         << "front or without";
    return text.str();
  };
  TORCH_CHECK_VALUE(table.dim() == 3 || table.dim() == 4, describe());
  TORCH_CHECK_VALUE(table.sym_size(-3) == 1 || table.sym_size(-3) == sizes.heads, describe());
  TORCH_CHECK_VALUE(table.sym_size(-2) == sizes.queries && table.sym_size(-1) == sizes.keys, describe());
  if (table.dim() == 4) check_groups(name, table, sizes);
}

}  // namespace

AttentionSizes check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& gain,
                               const MaybeTensor& bias, const MaybeTensor& gate) {
  check_heads("q", q);
  AttentionSizes sizes{q.sym_size(0), q.sym_size(1), q.sym_size(2), c10::SymInt(0), q.sym_size(3)};
  const auto check_keys = [&](const char* name, const at::Tensor& tensor) {
    check_heads(name, tensor);
    check_device("attention", name, tensor, "q", q);
    TORCH_CHECK_TYPE(tensor.scalar_type() == q.scalar_type(), "violin::attention: ", name, " is ", tensor.scalar_type(),
                     " and q is ", q.scalar_type(), "; expected one type for q, k and v");
    TORCH_CHECK_VALUE(
        tensor.sym_size(0) == sizes.batch && tensor.sym_size(1) == sizes.heads && tensor.sym_size(3) == sizes.dim,
        "violin::attention: ", name, " has shape ", tensor.sym_sizes(), " beside q of shape ", q.sym_sizes(),
        "; expected [", sizes.batch, ", ", sizes.heads, ", tokens, ", sizes.dim, "]");
  };
  check_keys("k", k);
  check_keys("v", v);
  sizes.keys = k.sym_size(2);
  TORCH_CHECK_VALUE(v.sym_size(2) == sizes.keys, "violin::attention: v has ", v.sym_size(2), " tokens and k has ",
                    sizes.keys, "; expected the same number");
  check_table("gain", gain, q, sizes);
  check_table("bias", bias, q, sizes);
  check_table("gate", gate, q, sizes);
  return sizes;
}

bool is_packed_gain(const at::Tensor& gain) {
  return gain.dim() == 5 && at::isIntegralType(gain.scalar_type(), false);
}
at::ScalarType packed_type(at::ScalarType q) {
  return q == at::kBFloat16 ? at::kShort : at::kByte;
}
std::int64_t packed_size(at::ScalarType q) {
  return kernels::kPackedBytes / static_cast<std::int64_t>(c10::elementSize(packed_type(q)));
}

void check_packed(const at::Tensor& qkv) {
  TORCH_CHECK_VALUE(qkv.dim() == 5 && qkv.sym_size(2) == 3, "violin::attention_qkv: qkv has shape ", qkv.sym_sizes(),
                    "; expected [batch, tokens, 3, heads, dim]");
}

void check_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& lse, const at::Tensor& rows,
                const MaybeTensor& gain, const MaybeTensor& bias, const MaybeTensor& gate) {
  const AttentionSizes sizes = check_attention(q, k, k, gain, bias, gate);
  TORCH_CHECK_TYPE(!gain || !gain->defined() || !is_packed_gain(*gain),
                   "violin::attention_rows: gain is packed; expected the table itself");
  check_device("attention_rows", "lse", lse, "q", q);
  TORCH_CHECK_TYPE(lse.scalar_type() == accumulate_type(q.scalar_type()), "violin::attention_rows: lse is ",
                   lse.scalar_type(), " beside q of ", q.scalar_type(), "; expected what attention_with_lse returned");
  TORCH_CHECK_VALUE(lse.dim() == 3 && lse.sym_size(0) == sizes.batch && lse.sym_size(1) == sizes.heads &&
                        lse.sym_size(2) == sizes.queries,
                    "violin::attention_rows: lse has shape ", lse.sym_sizes(), "; expected [", sizes.batch, ", ",
                    sizes.heads, ", ", sizes.queries, "] (batch, heads, queries)");
  check_device("attention_rows", "rows", rows, "q", q);
  TORCH_CHECK_TYPE(rows.scalar_type() == at::kLong, "violin::attention_rows: rows is ", rows.scalar_type(),
                   "; expected int64");
  TORCH_CHECK_VALUE(rows.dim() == 1, "violin::attention_rows: rows has shape ", rows.sym_sizes(),
                    "; expected [R], the query tokens whose weights are wanted");
}

DecayMaskSizes check_decay_mask(const at::Tensor& ranks, const at::Tensor& log_decay, const MaybeTensor& weight,
                                std::int64_t prefix, const MaybeTensor& prefix_decay) {
  check_strided("decay_mask", "ranks", ranks);
  TORCH_CHECK_TYPE(ranks.scalar_type() == at::kInt, "violin::decay_mask: ranks is ", ranks.scalar_type(),
                   "; expected int32");
  TORCH_CHECK_VALUE(ranks.dim() >= 2 && ranks.dim() <= 4, "violin::decay_mask: ranks has shape ", ranks.sym_sizes(),
                    "; expected [curves, tokens], [curves, axes, tokens] or [groups, curves, axes, tokens]");
  DecayMaskSizes sizes;
  sizes.grouped = ranks.dim() == 4;
  sizes.groups = sizes.grouped ? ranks.sym_size(0) : c10::SymInt(1);
  sizes.curves = ranks.sym_size(sizes.grouped ? 1 : 0);
  sizes.axes = ranks.dim() == 2 ? c10::SymInt(1) : ranks.sym_size(-2);
  sizes.tokens = ranks.sym_size(-1);
  TORCH_CHECK_VALUE(sizes.curves >= 1 && sizes.axes >= 1, "violin::decay_mask: ranks has shape ", ranks.sym_sizes(),
                    "; expected at least one curve and one axis");

  const auto check_floating = [&](const char* name, const at::Tensor& tensor) {
    check_strided("decay_mask", name, tensor);
    check_device("decay_mask", name, tensor, "ranks", ranks);
    TORCH_CHECK_TYPE(at::isFloatingType(tensor.scalar_type()), "violin::decay_mask: ", name, " is ",
                     tensor.scalar_type(), "; expected a floating-point tensor");
  };
  check_floating("log_decay", log_decay);
  sizes.decay_per_axis = log_decay.dim() == 3;
  const bool decay_fits = (log_decay.dim() == 2 || log_decay.dim() == 3) && log_decay.sym_size(0) == sizes.curves &&
                          (!sizes.decay_per_axis || log_decay.sym_size(1) == sizes.axes);
  TORCH_CHECK_VALUE(decay_fits, "violin::decay_mask: log_decay has shape ", log_decay.sym_sizes(),
                    " beside ranks of shape ", ranks.sym_sizes(), "; expected [", sizes.curves, ", heads], or [",
                    sizes.curves, ", ", sizes.axes, ", heads] for one decay per axis");
  sizes.heads = log_decay.sym_size(-1);
  const at::Tensor w = or_undefined(weight);
  if (w.defined()) {
    check_floating("weight", w);
    TORCH_CHECK_VALUE(w.dim() == 2 && w.sym_size(0) == sizes.curves && w.sym_size(1) == sizes.heads,
                      "violin::decay_mask: weight has shape ", w.sym_sizes(), "; expected [", sizes.curves, ", ",
                      sizes.heads, "] (curves, heads)");
  }
  TORCH_CHECK_VALUE(prefix >= 0, "violin::decay_mask: prefix is ", prefix, "; expected the number of prefix tokens");
  const at::Tensor p = or_undefined(prefix_decay);
  if (p.defined()) {
    check_floating("prefix_decay", p);
    TORCH_CHECK_VALUE(p.dim() == 1 && p.sym_size(0) == sizes.heads, "violin::decay_mask: prefix_decay has shape ",
                      p.sym_sizes(), "; expected [", sizes.heads, "] (heads)");
  }
  return sizes;
}

}  // namespace violin::ops
