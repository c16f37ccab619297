// Labelled images on disk, in the layouts people have them:
//   image folders   DIR/train/<class>/… with DIR/val/<class>/… and DIR/test/<class>/…, the last two optional; or one
//                   folder of classes, DIR/<class>/…
//   CIFAR           the binary files of CIFAR-10 (data_batch_*.bin, test_batch.bin, batches.meta.txt) and of CIFAR-100
//                   (train.bin, test.bin, fine_label_names.txt)
//   a manifest      CSV or JSON lines with path, label and optionally split; paths are relative to the manifest.
//                   An image may be listed several times, with one label and in one split
// Nothing here depends on the order in which a file system lists its entries: classes and files are sorted.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "violin/data/image.h"

namespace violin::data {

struct Sample {
  std::string path;          // of the image, or of the file that holds it
  std::int64_t record = -1;  // its position in that file; -1: the file is the image
  std::int64_t label = 0;    // index into the class names

  std::string name() const;  // for messages: "photos/cat/1.jpg", "data_batch_1.bin[17]"
};

// Where samples come from; decode() may be called from many threads at once.
class Source {
 public:
  virtual ~Source() = default;
  // Throws violin::Error that names the image.
  virtual Image decode(const Sample& sample) const = 0;
};

// A list of labelled images: one split, or a part of one.
class SampleSet {
 public:
  SampleSet() = default;
  // `root` is what fingerprints leave out of the paths, so that a moved dataset stays the same dataset.
  SampleSet(std::shared_ptr<const Source> source, std::vector<Sample> samples, std::int64_t classes,
            std::filesystem::path root);

  std::int64_t size() const { return static_cast<std::int64_t>(samples_.size()); }
  bool empty() const { return samples_.empty(); }
  std::int64_t classes() const { return classes_; }
  const std::vector<Sample>& samples() const { return samples_; }
  const Sample& operator[](std::int64_t index) const { return samples_.at(static_cast<std::size_t>(index)); }
  // Its place below the root, the same wherever the data lie: "test/cat/1.jpg", "test.bin[17]".
  std::string name(std::int64_t index) const;

  Image decode(std::int64_t index) const { return source_->decode((*this)[index]); }
  std::vector<std::int64_t> labels() const;
  std::vector<std::int64_t> class_counts() const;  // [classes]

  // `count` images, drawn so that classes keep their shares (every class keeps at least one where `count` allows);
  // all of them when `count` is 0 or larger than the set. The order of the set is kept.
  SampleSet limited(std::int64_t count, std::uint64_t seed) const;

  // A stratified share: (the rest, the share). Every class with two images or more leaves at least one in each part;
  // an image that is listed several times is in one part with all its copies.
  std::pair<SampleSet, SampleSet> split(double share, std::uint64_t seed) const;

  // The images of both, this one's first: all data again after a rate was chosen on a share of it.
  SampleSet joined(const SampleSet& other) const;

  SampleSet subset(const std::vector<std::int64_t>& indices) const;

  // 16 hexadecimal digits that follow from the names below the root, the labels and their order.
  std::string fingerprint() const;

 private:
  std::shared_ptr<const Source> source_;
  std::vector<Sample> samples_;
  std::int64_t classes_ = 0;
  std::filesystem::path root_;
};

struct DatasetOptions {
  double held_out = 0.1;  // share of train that becomes val where there is no val; 0: val stays empty
  std::uint64_t seed = 0;
  DecodeLimits limits;
};

enum class Layout { kSplitFolders, kClassFolders, kCifar10, kCifar100, kManifest };
std::string_view layout_name(Layout layout);

struct Dataset {
  std::filesystem::path path;
  Layout layout = Layout::kClassFolders;
  std::vector<std::string> classes;
  SampleSet train;
  SampleSet val;                   // chooses the best epoch
  SampleSet test;                  // only ever evaluated
  bool held_out = false;           // val is a share of train
  std::vector<std::string> notes;  // what the user should hear, one line each

  // What `violin eval` measures: test where there is one, else val, else (and for one folder of classes) everything.
  SampleSet evaluated() const;
  std::string evaluated_name() const;  // "test", "val" or "all"
  std::string fingerprint() const;     // of the class names and of the three splits
};

// Recognises the layout. Throws violin::Error that says what is missing: no images, a class folder without images, a
// class in val that train lacks, a label without a name, a line of the manifest that cannot be read, …
Dataset open_dataset(const std::filesystem::path& path, const DatasetOptions& options = {});

// The images of a folder (recursive, sorted, hidden ones left out) or the one file given; all with label 0.
SampleSet open_images(const std::vector<std::filesystem::path>& paths, const DecodeLimits& limits = {});

// True when the first bytes are those of a format that is decoded here; a file that cannot be read is none.
bool is_image_file(const std::filesystem::path& path);

// Weights for the loss, inverse to how often a class occurs, with mean 1 over the samples; 0 for a class without
// images. [classes]
std::vector<double> class_weights(const std::vector<std::int64_t>& class_counts);

}  // namespace violin::data
