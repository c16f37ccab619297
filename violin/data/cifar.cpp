// The binary files of CIFAR-10 and CIFAR-100: records of one or two label bytes and 32x32 pixels in three planes.
#include <array>
#include <sstream>
#include <utility>

#include "violin/data/layouts.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::data {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSide = 32;
constexpr std::int64_t kPlane = kSide * kSide;
constexpr std::int64_t kMaxFile = std::int64_t{4} << 30;

struct Format {
  std::int64_t label_bytes;  // the last of them is the label
  std::int64_t classes;
  const char* names;
  std::int64_t record() const { return label_bytes + 3 * kPlane; }
};

Format format_of(Layout layout) {
  return layout == Layout::kCifar10 ? Format{1, 10, "batches.meta.txt"} : Format{2, 100, "fine_label_names.txt"};
}

class CifarSource : public Source {
 public:
  explicit CifarSource(const Format& format) : format_(format) {}

  // Reads a file and appends its samples.
  void add(const fs::path& path, std::vector<Sample>& samples) {
    Bytes bytes = read_file(path, kMaxFile);
    const std::int64_t record = format_.record();
    if (bytes.empty() || std::ssize(bytes) % record != 0) {
      throw Error("'" + path.string() + "' has " + std::to_string(bytes.size()) + " bytes, which is no multiple of " +
                  std::to_string(record) + ": the file is truncated or not of this kind");
    }
    for (std::int64_t i = 0; i < std::ssize(bytes) / record; ++i) {
      const std::int64_t label = bytes[static_cast<std::size_t>(i * record + format_.label_bytes - 1)];
      if (label >= format_.classes) {
        throw Error("'" + path.string() + "' has label " + std::to_string(label) + " in record " + std::to_string(i) +
                    ", but there are " + std::to_string(format_.classes) + " classes");
      }
      samples.push_back({path.string(), i, label});
    }
    files_[path.string()] = std::move(bytes);
  }

  Image decode(const Sample& sample) const override {
    const Bytes& bytes = files_.at(sample.path);
    const std::uint8_t* planes = bytes.data() + sample.record * format_.record() + format_.label_bytes;
    Image image(kSide, kSide);
    for (std::int64_t i = 0; i < kPlane; ++i) {
      for (std::int64_t c = 0; c < 3; ++c) image.pixels[static_cast<std::size_t>(i * 3 + c)] = planes[c * kPlane + i];
    }
    return image;
  }

 private:
  Format format_;
  std::map<std::string, Bytes> files_;
};

bool has(const fs::path& folder, const char* name) {
  std::error_code error;
  return fs::is_regular_file(folder / name, error);
}

}  // namespace

std::vector<std::string> read_class_list(std::string_view text, const fs::path& path, std::int64_t classes) {
  std::istringstream lines{std::string(text)};
  std::vector<std::string> names;
  for (std::string line; std::getline(lines, line);) {
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (!is_utf8(line)) throw Error("'" + path.string() + "' is not UTF-8");
    if (!line.empty()) names.push_back(line);
  }
  if (std::ssize(names) != classes) {
    throw Error("'" + path.string() + "' names " + std::to_string(names.size()) + " classes instead of " +
                std::to_string(classes));
  }
  return names;
}

std::optional<fs::path> cifar_folder(const fs::path& path, Layout& layout) {
  for (const char* inside : {"", "cifar-10-batches-bin", "cifar-100-binary"}) {
    fs::path folder = *inside == '\0' ? path : path / inside;
    if (has(folder, "data_batch_1.bin") || has(folder, "test_batch.bin")) {
      layout = Layout::kCifar10;
      return folder;
    }
    if (has(folder, "train.bin") || has(folder, "test.bin")) {
      layout = Layout::kCifar100;
      return folder;
    }
  }
  return std::nullopt;
}

Dataset open_cifar(const fs::path& folder, Layout layout) {
  const Format format = format_of(layout);
  Dataset dataset;
  dataset.layout = layout;
  if (has(folder, format.names)) {
    const fs::path list = folder / format.names;
    const Bytes bytes = read_file(list, 1 << 20);
    dataset.classes =
        read_class_list({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, list, format.classes);
  } else {
    for (std::int64_t i = 0; i < format.classes; ++i) dataset.classes.push_back(std::to_string(i));
    dataset.notes.push_back("no " + std::string(format.names) + " in '" + folder.string() +
                            "': classes are called by their numbers");
  }
  const auto source = std::make_shared<CifarSource>(format);
  std::vector<Sample> train;
  std::vector<Sample> test;
  if (layout == Layout::kCifar10) {
    std::string missing;
    for (int i = 1; i <= 5; ++i) {
      const std::string name = "data_batch_" + std::to_string(i) + ".bin";
      if (has(folder, name.c_str())) {
        source->add(folder / name, train);
      } else {
        missing += (missing.empty() ? "" : ", ") + name;
      }
    }
    if (!missing.empty() && !train.empty())
      dataset.notes.push_back("not all of CIFAR-10 is in '" + folder.string() + "', without " + missing +
                              " there are " + std::to_string(train.size()) + " training images");
    if (has(folder, "test_batch.bin")) source->add(folder / "test_batch.bin", test);
  } else {
    if (has(folder, "train.bin")) source->add(folder / "train.bin", train);
    if (has(folder, "test.bin")) source->add(folder / "test.bin", test);
  }
  dataset.train = {source, std::move(train), format.classes, folder};
  dataset.test = {source, std::move(test), format.classes, folder};
  return dataset;
}

}  // namespace violin::data
