// One function per layout, used by dataset.cpp only. Each fills classes, train, val and test of a dataset.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "violin/data/dataset.h"

namespace violin::data {

// Images that are files of their own.
class FileSource : public Source {
 public:
  explicit FileSource(const DecodeLimits& limits) : limits_(limits) {}
  Image decode(const Sample& sample) const override;

 private:
  DecodeLimits limits_;
};

// Entries of a folder by name, hidden ones left out.
std::vector<std::filesystem::path> sorted_entries(const std::filesystem::path& folder);

// Image files below a folder, sorted. `others` counts files that are none, and keeps the first of them.
struct OtherFiles {
  std::int64_t count = 0;
  std::string first;
};
std::vector<std::string> image_files(const std::filesystem::path& folder, OtherFiles& others);

// For a message that images are missing: " but 3 other files, the first 'a.heic' (JPEG, PNG and WebP are read)"; empty
// where there are none.
std::string instead_of_images(const OtherFiles& others);

// "train", "val" or "test" for the names that people give to splits, in capitals or not.
std::optional<std::string> split_of(std::string_view given);

// The CIFAR files of a folder, or of the folder inside it that the archives unpack to.
std::optional<std::filesystem::path> cifar_folder(const std::filesystem::path& path, Layout& layout);

Dataset open_folders(const std::filesystem::path& path, const DatasetOptions& options);
Dataset open_cifar(const std::filesystem::path& folder, Layout layout);
Dataset open_manifest(const std::filesystem::path& path, const DatasetOptions& options);

// The texts of such files; `path` is what they name images relative to and what messages say.
Dataset read_manifest(std::string_view text, const std::filesystem::path& path, const DatasetOptions& options);
std::vector<std::string> read_class_list(std::string_view text, const std::filesystem::path& path,
                                         std::int64_t classes);

}  // namespace violin::data
