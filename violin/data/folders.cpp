// Folders of images: a folder per class, with or without a folder per split above it.
#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "violin/data/layouts.h"
#include "violin/error.h"
#include "violin/text.h"

namespace violin::data {
namespace {

namespace fs = std::filesystem;

// Deeper nesting is a link that leads back.
constexpr int kMaxDepth = 24;

std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

// A file that is called an image but is none counts as a broken image, not as something that happens to lie there.
bool named_like_image(const fs::path& path) {
  const std::string extension = lower_case(path.extension().string());
  return extension == ".jpg" || extension == ".jpeg" || extension == ".png" || extension == ".webp";
}

// A pipe or a device would be waited for; a link that leads nowhere is a broken image.
bool is_image(const fs::path& entry, const fs::file_status& status) {
  const bool readable = !fs::exists(status) || fs::is_regular_file(status);
  return readable && (named_like_image(entry) || is_image_file(entry));
}

void add(OtherFiles& files, const std::string& name) {
  if (files.count++ == 0) files.first = name;
}

void collect(const fs::path& folder, int depth, std::vector<std::string>& files, OtherFiles& others) {
  if (depth > kMaxDepth)
    throw Error("folders below '" + folder.string() + "' are nested too deeply: a link leads back?");
  for (const fs::path& entry : sorted_entries(folder)) {
    std::error_code error;
    const fs::file_status status = fs::status(entry, error);
    if (fs::is_directory(status)) {
      collect(entry, depth + 1, files, others);
      continue;
    }
    if (is_image(entry, status)) {
      files.push_back(entry.string());
    } else {
      add(others, entry.string());
    }
  }
}

std::vector<fs::path> folders_in(const fs::path& folder) {
  std::vector<fs::path> folders = sorted_entries(folder);
  std::erase_if(folders, [](const fs::path& entry) {
    std::error_code error;
    return !fs::is_directory(entry, error);
  });
  return folders;
}

// Images that lie beside folders, where no class is theirs.
void count_strays(const fs::path& folder, OtherFiles& strays) {
  for (const fs::path& entry : sorted_entries(folder)) {
    std::error_code error;
    const fs::file_status status = fs::status(entry, error);
    if (!fs::is_directory(status) && is_image(entry, status)) add(strays, entry.string());
  }
}

// "'a', 'b' and 3 more"
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i) text += (i == 0 ? "'" : ", '") + names[i] + "'";
  return names.size() > kMost ? text + " and " + std::to_string(names.size() - kMost) + " more" : text;
}

// The classes of one split.
struct Classes {
  std::vector<std::string> names;
  std::vector<std::vector<std::string>> files;  // of each
};

Classes read_classes(const fs::path& folder, OtherFiles& others) {
  Classes classes;
  for (const fs::path& entry : folders_in(folder)) {
    classes.names.push_back(entry.filename().string());
    if (!is_utf8(classes.names.back())) {
      throw Error("the name of class folder " + file_in_quotes(entry.string()) + " is not UTF-8: rename it");
    }
    OtherFiles here;
    classes.files.push_back(image_files(entry, here));
    if (classes.files.back().empty()) {
      throw Error("class folder '" + entry.string() + "' has no images" + instead_of_images(here) +
                  (here.count > 0 ? ": convert them or remove it" : ": fill or remove it"));
    }
    if (others.count == 0) others.first = here.first;
    others.count += here.count;
  }
  if (classes.names.empty()) {
    OtherFiles here;
    const bool images = !image_files(folder, here).empty();
    throw Error(images
                    ? "'" + folder.string() + "' has images but no class folders: sort them into folders, one per class"
                    : "'" + folder.string() + "' has no images" + instead_of_images(here) +
                          ": expected a folder per class with images in it");
  }
  return classes;
}

SampleSet labelled(const Classes& classes, const std::vector<std::string>& names,
                   const std::shared_ptr<const Source>& source, const fs::path& root, const fs::path& folder) {
  std::vector<Sample> samples;
  for (std::size_t c = 0; c < classes.names.size(); ++c) {
    const auto place = std::lower_bound(names.begin(), names.end(), classes.names[c]);
    if (place == names.end() || *place != classes.names[c]) {
      throw Error("class '" + classes.names[c] + "' of '" + folder.string() + "' is not among the classes of train");
    }
    for (const std::string& file : classes.files[c]) samples.push_back({file, -1, place - names.begin()});
  }
  return {source, std::move(samples), std::ssize(names), root};
}

}  // namespace

std::vector<fs::path> sorted_entries(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (!entry->path().filename().string().starts_with('.')) entries.push_back(entry->path());
  }
  if (error) throw Error("cannot read folder '" + folder.string() + "': " + error.message());
  // By bytes of the name, which does not depend on the locale; fs::path would compare parts.
  std::sort(entries.begin(), entries.end(),
            [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  return entries;
}

std::vector<std::string> image_files(const fs::path& folder, OtherFiles& others) {
  std::vector<std::string> files;
  collect(folder, 0, files, others);
  return files;
}

std::string instead_of_images(const OtherFiles& others) {
  if (others.count == 0) return "";
  return " but " + std::to_string(others.count) + " other file" + (others.count == 1 ? "" : "s, the first") + " '" +
         others.first + "' (" + (decodes_webp() ? "JPEG, PNG and WebP are" : "JPEG and PNG are") + " read)";
}

std::optional<std::string> split_of(std::string_view given) {
  const std::string name = lower_case(given);
  if (name == "train" || name == "training") return "train";
  if (name == "val" || name == "valid" || name == "validation") return "val";
  if (name == "test" || name == "testing") return "test";
  return std::nullopt;
}

Dataset open_folders(const fs::path& path, const DatasetOptions& options) {
  const auto source = std::make_shared<FileSource>(options.limits);
  Dataset dataset;
  OtherFiles others, strays;
  count_strays(path, strays);
  std::map<std::string, fs::path> splits;
  std::vector<std::string> left_out;
  const std::vector<fs::path> folders = folders_in(path);
  const auto split_name = [](const fs::path& folder) { return split_of(folder.filename().string()); };
  const bool has_others = !std::all_of(folders.begin(), folders.end(), split_name);
  for (const fs::path& folder : folders) {
    const auto split = split_name(folder);
    // Trains, for one, are a class of CIFAR-100: a folder of images beside other folders is no split.
    if (!split || (has_others && folders_in(folder).empty())) {
      left_out.push_back(folder.filename().string());
      continue;
    }
    if (const auto [same, fresh] = splits.emplace(*split, folder); !fresh) {
      throw Error("'" + path.string() + "' has two folders for " + *split + ", '" + same->second.filename().string() +
                  "' and '" + folder.filename().string() + "': keep one");
    }
  }
  if (splits.empty()) {
    const Classes classes = read_classes(path, others);
    dataset.layout = Layout::kClassFolders;
    dataset.classes = classes.names;
    dataset.train = labelled(classes, dataset.classes, source, path, path);
  } else {
    dataset.layout = Layout::kSplitFolders;
    std::map<std::string, Classes> read;
    for (const auto& [split, folder] : splits) {
      read[split] = read_classes(folder, others);
      count_strays(folder, strays);
    }
    // Without train there is only something to evaluate, and its classes are all there are.
    if (const auto train = read.find("train"); train != read.end()) {
      dataset.classes = train->second.names;
    } else {
      for (const auto& [split, classes] : read) {
        dataset.classes.insert(dataset.classes.end(), classes.names.begin(), classes.names.end());
      }
      std::sort(dataset.classes.begin(), dataset.classes.end());
      dataset.classes.erase(std::unique(dataset.classes.begin(), dataset.classes.end()), dataset.classes.end());
    }
    const std::array<std::pair<const char*, SampleSet*>, 3> targets = {
        {{"train", &dataset.train}, {"val", &dataset.val}, {"test", &dataset.test}}};
    for (const auto& [split, set] : targets) {
      if (splits.contains(split)) *set = labelled(read[split], dataset.classes, source, path, splits[split]);
    }
    if (!left_out.empty()) {
      dataset.notes.push_back("folders beside the splits of '" + path.string() + "' left out: " + listed(left_out));
    }
  }
  if (strays.count > 0) {
    dataset.notes.push_back(counted(strays.count, "image") + " beside the class folders left out, the first '" +
                            strays.first + "'");
  }
  if (others.count > 0) {
    dataset.notes.push_back(std::to_string(others.count) + (others.count == 1 ? " file that is" : " files that are") +
                            " not JPEG, PNG or WebP left out, the first '" + others.first + "'");
  }
  return dataset;
}

}  // namespace violin::data
