#include "violin/train/predictions.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "violin/data/csv.h"
#include "violin/data/file.h"
#include "violin/error.h"
#include "violin/number_text.h"

namespace violin::train {
namespace {

constexpr std::int64_t kMaxFile = std::int64_t{1} << 30;
constexpr const char* kHeader = "image,label,predicted,probability";

// 2 P(X <= fewer) for X binomial(n, 1/2), at most 1; sums of logarithms, so that no n is too large.
double two_sided(std::int64_t fewer, std::int64_t n) {
  const auto count = static_cast<double>(n);
  double sum = 0;
  for (std::int64_t i = 0; i <= fewer; ++i) {
    const auto k = static_cast<double>(i);
    sum += std::exp(std::lgamma(count + 1) - std::lgamma(k + 1) - std::lgamma(count - k + 1) - count * std::log(2.0));
  }
  return std::min(1.0, 2 * sum);
}

}  // namespace

std::vector<Prediction> predictions(const Evaluation& evaluation, const data::SampleSet& set,
                                    const std::vector<std::string>& names, const std::vector<std::int64_t>& columns) {
  std::vector<Prediction> result;
  if (evaluation.indices.empty()) return result;
  const auto [values, order] = at::softmax(evaluation.logits, 1).max(1);
  const auto* probability = values.const_data_ptr<float>();
  const auto* predicted = order.const_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < evaluation.indices.size(); ++i) {
    const std::int64_t index = evaluation.indices[i], label = set[index].label;
    const std::int64_t column = columns.empty() ? label : columns.at(static_cast<std::size_t>(label));
    result.push_back({set.name(index), names.at(static_cast<std::size_t>(column)),
                      names.at(static_cast<std::size_t>(predicted[i])), static_cast<double>(probability[i])});
  }
  return result;
}

std::string to_csv(const std::vector<Prediction>& predictions) {
  std::string csv = std::string(kHeader) + "\n";
  for (const Prediction& row : predictions) {
    csv += data::csv_field(row.image) + "," + data::csv_field(row.label) + "," + data::csv_field(row.predicted) + "," +
           number_text(row.probability, "%.6f") + "\n";
  }
  return csv;
}

std::vector<Prediction> read_predictions(const std::filesystem::path& file) {
  const Bytes bytes = read_file(file, kMaxFile);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  data::CsvReader reader(text, file);
  std::vector<std::string> fields;
  if (!reader.next(fields) || fields != std::vector<std::string>{"image", "label", "predicted", "probability"})
    throw Error("'" + file.string() + "' does not begin with the line '" + kHeader +
                "'; violin eval --predictions writes such files");
  std::vector<Prediction> result;
  while (reader.next(fields)) {
    if (fields.size() != 4)
      throw Error("'" + file.string() + "', line " + std::to_string(reader.line()) + ": " +
                  std::to_string(fields.size()) + " fields instead of 4");
    result.push_back({fields[0], fields[1], fields[2], std::strtod(fields[3].c_str(), nullptr)});
  }
  return result;
}

Comparison compare(const std::vector<Prediction>& first, const std::vector<Prediction>& second) {
  // An image that is listed several times is compared in the order of its rows, which a multimap keeps.
  std::multimap<std::string_view, const Prediction*> others;
  for (const Prediction& row : second) others.emplace(row.image, &row);
  if (first.size() != second.size())
    throw Error("the models were evaluated on " + std::to_string(first.size()) + " and " +
                std::to_string(second.size()) + " images; only the same images can be compared");
  Comparison result;
  for (const Prediction& row : first) {
    const auto other = others.lower_bound(row.image);
    if (other == others.end() || other->first != row.image || other->second->label != row.label)
      throw Error("image '" + row.image + "' of class '" + row.label +
                  "' is not among the other model's; only the same images can be compared");
    const bool one = row.right(), two = other->second->right();
    ++(one && two ? result.both : one ? result.only_first : two ? result.only_second : result.neither);
    others.erase(other);
  }
  const std::int64_t apart = result.only_first + result.only_second;
  if (apart > 0) result.p = two_sided(std::min(result.only_first, result.only_second), apart);
  return result;
}

}  // namespace violin::train
