#include "violin/data/dataset.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "violin/data/codecs.h"
#include "violin/data/layouts.h"
#include "violin/data/random.h"
#include "violin/error.h"

namespace violin::data {
namespace {

namespace fs = std::filesystem;

std::string_view without_slashes(std::string_view path) {
  path.remove_prefix(std::min(path.find_first_not_of('/'), path.size()));
  return path;
}

// A path as it is unless it lies below the root; a folder whose name only begins like the root's does not.
std::string_view below(const fs::path& root, std::string_view path) {
  const std::string_view prefix = root.native();
  if (!path.starts_with(prefix) || !(prefix.ends_with('/') || path.substr(prefix.size()).starts_with('/'))) return path;
  path.remove_prefix(prefix.size());
  return without_slashes(path);
}

// FNV-1a: fingerprints tell data sets apart, they are no protection.
class Fingerprint {
 public:
  void add(std::string_view text) {
    for (const char c : text) add_byte(static_cast<std::uint8_t>(c));
    add_byte(0xff);  // occurs in no UTF-8 text: "ab","c" differs from "a","bc"
  }
  std::string digits() const {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash_));
    return text;
  }

 private:
  void add_byte(std::uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3; }

  std::uint64_t hash_ = 0xcbf29ce484222325;
};

// Positions of each class's samples.
std::vector<std::vector<std::int64_t>> by_class(const std::vector<Sample>& samples, std::int64_t classes) {
  std::vector<std::vector<std::int64_t>> members(static_cast<std::size_t>(classes));
  for (std::size_t i = 0; i < samples.size(); ++i) {
    members[static_cast<std::size_t>(samples[i].label)].push_back(static_cast<std::int64_t>(i));
  }
  return members;
}

// `positions` in groups of the same image: where a manifest lists one several times, its copies belong together.
std::vector<std::vector<std::int64_t>> by_image(const std::vector<Sample>& samples,
                                                const std::vector<std::int64_t>& positions) {
  std::vector<std::vector<std::int64_t>> images;
  std::map<std::pair<std::string_view, std::int64_t>, std::size_t> seen;
  for (const std::int64_t position : positions) {
    const Sample& sample = samples[static_cast<std::size_t>(position)];
    const auto [image, fresh] = seen.try_emplace({sample.path, sample.record}, images.size());
    if (fresh) images.emplace_back();
    images[image->second].push_back(position);
  }
  return images;
}

template <typename T>
void shuffle(std::vector<T>& values, Random& random) {
  for (std::int64_t i = std::ssize(values) - 1; i > 0; --i) {
    std::swap(values[static_cast<std::size_t>(i)], values[static_cast<std::size_t>(random.below(i + 1))]);
  }
}

// `count` shared out in proportion to `sizes`, none above its size; each nonempty class gets one where that is
// possible.
std::vector<std::int64_t> shared_out(std::int64_t count, const std::vector<std::vector<std::int64_t>>& members) {
  std::int64_t total = 0;
  std::int64_t nonempty = 0;
  for (const auto& member : members) {
    total += std::ssize(member);
    nonempty += member.empty() ? 0 : 1;
  }
  const std::int64_t least = count >= nonempty ? 1 : 0;
  std::vector<std::int64_t> shares(members.size());
  std::vector<std::pair<double, std::size_t>> wanting;  // how far below its exact share a class is
  std::int64_t given = 0;
  for (std::size_t c = 0; c < members.size(); ++c) {
    const double exact =
        static_cast<double>(count) * static_cast<double>(members[c].size()) / static_cast<double>(total);
    shares[c] = std::min(std::max(static_cast<std::int64_t>(exact), least), std::ssize(members[c]));
    given += shares[c];
    wanting.emplace_back(exact - static_cast<double>(shares[c]), c);
  }
  std::stable_sort(wanting.begin(), wanting.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  while (given < count) {
    for (const auto& [missing, c] : wanting) {
      if (given == count || shares[c] == std::ssize(members[c])) continue;
      ++shares[c];
      ++given;
    }
  }
  // The least of one may have given too much: the classes furthest above their share give it back.
  while (given > count) {
    for (auto entry = wanting.rbegin(); entry != wanting.rend() && given > count; ++entry) {
      if (shares[entry->second] <= least) continue;
      --shares[entry->second];
      --given;
    }
  }
  return shares;
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%g%%", share * 100);
  return text;
}

void hold_out(Dataset& dataset, const DatasetOptions& options) {
  if (!dataset.val.empty() || dataset.train.empty() || options.held_out == 0) return;
  if (!(options.held_out > 0 && options.held_out < 1)) throw Error("the held-out share must be at least 0 and below 1");
  auto [rest, share] = dataset.train.split(options.held_out, options.seed);
  if (share.empty()) {
    dataset.notes.push_back("no validation images, and too few in each class of '" + dataset.path.string() +
                            "' to hold some out");
    return;
  }
  dataset.train = std::move(rest);
  dataset.val = std::move(share);
  dataset.held_out = true;
  dataset.notes.push_back("no validation images in '" + dataset.path.string() + "': " + percent(options.held_out) +
                          " of each class held out (" + std::to_string(dataset.val.size()) + " images, seed " +
                          std::to_string(options.seed) + ")");
}

}  // namespace

std::string Sample::name() const {
  return record < 0 ? path : path + "[" + std::to_string(record) + "]";
}

SampleSet::SampleSet(std::shared_ptr<const Source> source, std::vector<Sample> samples, std::int64_t classes,
                     fs::path root)
    : source_(std::move(source)), samples_(std::move(samples)), classes_(classes), root_(std::move(root)) {
  for (const Sample& sample : samples_) {
    if (sample.label < 0 || sample.label >= classes) {
      throw Error("'" + sample.name() + "' has label " + std::to_string(sample.label) + ", but there are " +
                  std::to_string(classes) + " classes");
    }
  }
}

std::vector<std::int64_t> SampleSet::labels() const {
  std::vector<std::int64_t> result(samples_.size());
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = samples_[i].label;
  return result;
}

std::vector<std::int64_t> SampleSet::class_counts() const {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(classes_));
  for (const Sample& sample : samples_) ++counts[static_cast<std::size_t>(sample.label)];
  return counts;
}

SampleSet SampleSet::subset(const std::vector<std::int64_t>& indices) const {
  std::vector<Sample> chosen;
  chosen.reserve(indices.size());
  for (const std::int64_t index : indices) chosen.push_back((*this)[index]);
  return {source_, std::move(chosen), classes_, root_};
}

SampleSet SampleSet::limited(std::int64_t count, std::uint64_t seed) const {
  if (count < 0) throw Error("a limit of " + std::to_string(count) + " images makes no sense: choose 0 (all) or more");
  if (count == 0 || count >= size()) return *this;
  auto members = by_class(samples_, classes_);
  const std::vector<std::int64_t> shares = shared_out(count, members);
  std::vector<std::int64_t> chosen;
  for (std::size_t c = 0; c < members.size(); ++c) {
    Random random(seed, Purpose::kSubset, {static_cast<std::int64_t>(c)});
    shuffle(members[c], random);
    chosen.insert(chosen.end(), members[c].begin(), members[c].begin() + shares[c]);
  }
  std::sort(chosen.begin(), chosen.end());
  return subset(chosen);
}

std::pair<SampleSet, SampleSet> SampleSet::split(double share, std::uint64_t seed) const {
  const auto members = by_class(samples_, classes_);
  std::vector<std::int64_t> rest;
  std::vector<std::int64_t> taken;
  for (std::size_t c = 0; c < members.size(); ++c) {
    Random random(seed, Purpose::kHoldOut, {static_cast<std::int64_t>(c)});
    auto images = by_image(samples_, members[c]);
    shuffle(images, random);
    const std::int64_t size = std::ssize(images);
    const std::int64_t wanted = std::llround(static_cast<double>(size) * share);
    const std::int64_t count = size < 2 ? 0 : std::clamp<std::int64_t>(wanted, 1, size - 1);
    for (std::int64_t i = 0; i < size; ++i) {
      const auto& copies = images[static_cast<std::size_t>(i)];
      auto& part = i < count ? taken : rest;
      part.insert(part.end(), copies.begin(), copies.end());
    }
  }
  std::sort(rest.begin(), rest.end());
  std::sort(taken.begin(), taken.end());
  return {subset(rest), subset(taken)};
}

SampleSet SampleSet::joined(const SampleSet& other) const {
  if (empty()) return other;
  if (other.empty()) return *this;
  if (source_ != other.source_ || classes_ != other.classes_) throw Error("only parts of one data set can be joined");
  SampleSet both = *this;
  both.samples_.insert(both.samples_.end(), other.samples_.begin(), other.samples_.end());
  return both;
}

std::string SampleSet::name(std::int64_t index) const {
  Sample sample = (*this)[index];
  sample.path = below(root_, sample.path);
  return sample.name();
}

std::string SampleSet::fingerprint() const {
  Fingerprint print;
  for (const Sample& sample : samples_) {
    print.add(without_slashes(below(root_, sample.path)));
    print.add(std::to_string(sample.record));
    print.add(std::to_string(sample.label));
  }
  return print.digits();
}

std::string_view layout_name(Layout layout) {
  switch (layout) {
    case Layout::kSplitFolders:
      return "image folder with splits";
    case Layout::kClassFolders:
      return "folder of classes";
    case Layout::kCifar10:
      return "CIFAR-10 files";
    case Layout::kCifar100:
      return "CIFAR-100 files";
    case Layout::kManifest:
      return "manifest";
  }
  return "";
}

std::string Dataset::evaluated_name() const {
  if (!test.empty()) return "test";
  if (layout == Layout::kClassFolders || val.empty()) return "all";
  return "val";
}

SampleSet Dataset::evaluated() const {
  const std::string name = evaluated_name();
  if (name == "test") return test;
  return name == "val" ? val : train.joined(val);
}

std::string Dataset::fingerprint() const {
  Fingerprint print;
  for (const std::string& name : classes) print.add(name);
  for (const SampleSet* set : {&train, &val, &test}) print.add(set->fingerprint());
  return print.digits();
}

Image FileSource::decode(const Sample& sample) const {
  return load_image(sample.path, limits_);
}

bool is_image_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  char head[16];
  file.read(head, sizeof head);
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(head), static_cast<std::size_t>(file.gcount()));
  return codec::is_jpeg(bytes) || codec::is_png(bytes) || codec::is_webp(bytes);
}

Dataset open_dataset(const fs::path& path, const DatasetOptions& options) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw Error("no data at '" + path.string() + "': give a folder of images or a manifest");
  Dataset dataset;
  Layout cifar{};
  if (!fs::is_directory(status)) {
    dataset = open_manifest(path, options);
  } else if (const auto folder = cifar_folder(path, cifar)) {
    dataset = open_cifar(*folder, cifar);
  } else {
    dataset = open_folders(path, options);
  }
  dataset.path = path;
  hold_out(dataset, options);
  return dataset;
}

SampleSet open_images(const std::vector<fs::path>& paths, const DecodeLimits& limits) {
  std::vector<Sample> samples;
  for (const fs::path& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) throw Error("no image at '" + path.string() + "'");
    if (!fs::is_directory(status)) {
      samples.push_back({path.string()});
      continue;
    }
    OtherFiles others;
    const std::vector<std::string> files = image_files(path, others);
    if (files.empty()) throw Error("no images in '" + path.string() + "'" + instead_of_images(others));
    for (const std::string& file : files) samples.push_back({file});
  }
  return {std::make_shared<FileSource>(limits), std::move(samples), 1, {}};
}

std::vector<double> class_weights(const std::vector<std::int64_t>& class_counts) {
  const auto used = std::count_if(class_counts.begin(), class_counts.end(), [](std::int64_t n) { return n > 0; });
  const auto total = std::accumulate(class_counts.begin(), class_counts.end(), std::int64_t{0});
  std::vector<double> weights(class_counts.size());
  for (std::size_t c = 0; c < weights.size(); ++c) {
    if (class_counts[c] > 0) {
      weights[c] = static_cast<double>(total) / (static_cast<double>(used) * static_cast<double>(class_counts[c]));
    }
  }
  return weights;
}

}  // namespace violin::data
