#include "violin/train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "violin/data/file.h"
#include "violin/error.h"
#include "violin/nn/json_text.h"
#include "violin/text.h"

namespace violin::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// What a run consists of: what may be moved to make place for another. config.json goes last: it is what tells a run,
// so a move that was interrupted can be told from one that was not.
constexpr std::array kFiles = {"log.jsonl",           "log.csv",    "result.json", "lr_search.json", "README.md",
                               "report.html",         "last",       "last.next",   "last.old",       "best",
                               "initial.safetensors", "config.json"};

constexpr std::string_view kInitial = "initial.safetensors";
constexpr std::string_view kReplaced = ".replaced";
constexpr std::string_view kForgotten = ".replaced.gone";

// What write_file_atomically() leaves of a file when the process is killed.
constexpr std::string_view kUnfinished = ".part-";

// One of the files above; a report may be in the making while a run goes on.
bool is_unfinished(const std::string& name) {
  const std::size_t end = name.find(kUnfinished);
  const std::string whole = name.substr(0, end);
  return end != std::string::npos && whole != "report.html" &&
         std::find(kFiles.begin(), kFiles.end(), whole) != kFiles.end();
}

void remove_unfinished(const fs::path& run) {
  std::error_code ignored;
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(run, ignored))
    if (is_unfinished(entry.path().filename().string())) files.push_back(entry.path());
  for (const fs::directory_entry& entry : fs::directory_iterator(run / "best", ignored))
    if (entry.path().filename().string().find(kUnfinished) != std::string::npos) files.push_back(entry.path());
  for (const fs::path& file : files) fs::remove(file, ignored);
}

std::string quoted(const fs::path& path) {
  return file_in_quotes(path.string());
}

// Exchanges two names in one step where the system can; otherwise in two, which recover() knows.
void exchange(const fs::path& next, const fs::path& last) {
#ifdef SYS_renameat2
  constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE
  if (::syscall(SYS_renameat2, AT_FDCWD, next.c_str(), AT_FDCWD, last.c_str(), kExchange) == 0) {
    fs::remove_all(next);
    return;
  }
#endif
  const fs::path old = last.parent_path() / "last.old";
  fs::rename(last, old);
  fs::rename(next, last);
  fs::remove_all(old);
}

template <class Work>
void or_error(const std::string& what, const Work& work) {
  try {
    work();
  } catch (const fs::filesystem_error& error) {
    throw Error(what + ": " + error.code().message());
  }
}

}  // namespace

bool is_run_config(const json& config) {
  // Models from elsewhere have a config.json too; these keys every run has written since the first.
  return config.is_object() && config.contains("command") && config.contains("fingerprint") &&
         config.contains("options") && config.contains("classes");
}

bool is_run_folder(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path / "config.json", ignored)) return false;
  try {
    return is_run_config(read_json_file(path / "config.json"));
  } catch (const Error&) {
    return false;
  }
}

bool is_run_file(const fs::path& path) {
  const fs::path file = fs::absolute(path).lexically_normal(), folder = file.parent_path();
  if (folder.filename() == "best" || folder.filename() == "last") return is_run_folder(folder.parent_path());
  const bool own = std::find(kFiles.begin(), kFiles.end(), file.filename()) != kFiles.end();
  return own && file.filename() != "report.html" && is_run_folder(folder);
}

json read_json_file(const fs::path& path) {
  const Bytes bytes = read_file(path, std::int64_t{256} << 20);
  json parsed = nn::parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, quoted(path));
  if (!parsed.is_object()) {
    throw Error(quoted(path) + " holds " + (parsed.is_array() ? "a list" : "a single value") +
                "; expected an object {\"name\": value, …}");
  }
  return parsed;
}

std::optional<json> readable_object(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::nullopt;
  try {
    return read_json_file(path);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::optional<double> number_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

std::vector<json> read_log(const fs::path& run) {
  std::vector<json> lines;
  std::ifstream file(run / "log.jsonl");
  for (std::string line; std::getline(file, line);) {
    json parsed = json::parse(line, nullptr, false);
    if (parsed.is_object() && parsed.contains("type") && parsed.at("type").is_string())
      lines.push_back(std::move(parsed));
  }
  return lines;
}

void check_run_folder(const fs::path& path, RunFolder::Mode mode) {
  using Mode = RunFolder::Mode;
  or_error("cannot use " + quoted(path), [&] {
    const bool there = fs::exists(path);
    if (there && !fs::is_directory(path)) throw Error(quoted(path) + " is not a folder; give another with --out");
    const bool run = there && (is_run_folder(path) || is_run_folder(path / kReplaced));
    if (mode == Mode::kResume && !run) throw Error(quoted(path) + " holds no run that could be resumed");
    if (mode == Mode::kNew && run)
      throw Error(quoted(path) + " holds a run already; --resume continues it, --force replaces it");
    if (mode == Mode::kResume || !there || run) return;
    // What a run leaves that ended before it wrote anything else.
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
      const std::string name = entry.path().filename().string();
      if (name != ".lock" && name != kReplaced && name != kForgotten && name != kInitial && !is_unfinished(name))
        throw Error(quoted(path) + " is not empty and holds no run; give another folder with --out");
    }
  });
}

RunFolder::RunFolder(fs::path path, Mode mode) : path_(std::move(path)) {
  check_run_folder(path_, mode);
  or_error("cannot use " + quoted(path_), [&] { fs::create_directories(path_); });
  lock_ = ::open((path_ / ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0) throw Error("cannot write to " + quoted(path_) + ": " + std::strerror(errno));
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    ::close(lock_);
    throw Error(quoted(path_) + " is in use by another process; wait for it or give another folder with --out");
  }
  or_error("cannot use " + quoted(path_), [&] {
    recover();
    if (mode == Mode::kReplace) set_aside();
  });
}

RunFolder::~RunFolder() {
  if (lock_ >= 0) ::close(lock_);
}

bool RunFolder::replaces() const {
  return !has_steps() && is_run_folder(path_ / kReplaced);
}

void RunFolder::discard() const {
  std::error_code ignored;
  for (const char* name : kFiles) fs::remove_all(path_ / name, ignored);
  if (replaces()) or_error("cannot bring back the run that was in " + quoted(path_), [&] { bring_back(); });
}

void RunFolder::forget_replaced() const {
  // A removal that is cut off must not look like a run that was being set aside.
  std::error_code ignored;
  fs::remove_all(path_ / kForgotten, ignored);
  fs::rename(path_ / kReplaced, path_ / kForgotten, ignored);
  fs::remove_all(path_ / kForgotten, ignored);
}

void RunFolder::set_aside() const {
  const fs::path aside = path_ / kReplaced;
  if (has_steps()) fs::remove_all(aside);  // where that failed before
  // What is here may have replaced another run and come to nothing yet: then that one is kept.
  if (fs::exists(aside) || !is_run_folder(path_)) {
    for (const char* name : kFiles) fs::remove_all(path_ / name);
    return;
  }
  fs::create_directories(aside);
  for (const char* name : kFiles)
    if (fs::exists(path_ / name)) fs::rename(path_ / name, aside / name);
}

void RunFolder::bring_back() const {
  const fs::path aside = path_ / kReplaced;
  for (const char* name : kFiles) {
    if (!fs::exists(aside / name)) continue;
    fs::remove_all(path_ / name);
    fs::rename(aside / name, path_ / name);
  }
  fs::remove_all(aside);
  if (has_checkpoint()) fs::remove(initial_weights());  // of the run that came to nothing
}

void RunFolder::recover() const {
  // Killed while a run was set aside or brought back, or before the one that replaced it was told by its config.json.
  const fs::path aside = path_ / kReplaced;
  if (has_steps() && fs::exists(path_ / "config.json") && fs::exists(aside / "config.json")) forget_replaced();
  if (fs::exists(aside) && !(fs::exists(aside / "config.json") && fs::exists(path_ / "config.json"))) bring_back();
  // Killed between two renames: what is complete is last.next (its state.json is written last of all), else last.old.
  if (!fs::exists(last())) {
    if (fs::exists(path_ / "last.next" / "state.json")) {
      fs::rename(path_ / "last.next", last());
    } else if (fs::exists(path_ / "last.old")) {
      fs::rename(path_ / "last.old", last());
    }
  }
  fs::remove_all(path_ / "last.next");
  fs::remove_all(path_ / "last.old");
  std::error_code ignored;
  fs::remove_all(path_ / kForgotten, ignored);
  remove_unfinished(path_);
}

void RunFolder::write(const std::string& name, const nlohmann::ordered_json& object) const {
  write_text(name, nn::json_text(object, 2) + "\n");
}

void RunFolder::write_text(const std::string& name, const std::string& text) const {
  write_file_atomically(path_ / name, text);
}

fs::path RunFolder::initial_weights() const {
  return path_ / kInitial;
}

std::int64_t RunFolder::log_bytes() const {
  std::error_code missing;
  const auto size = fs::file_size(path_ / "log.jsonl", missing);
  return missing ? 0 : static_cast<std::int64_t>(size);
}

void RunFolder::truncate_log(std::int64_t bytes) {
  if (log_bytes() > bytes)
    or_error("cannot shorten the log of " + quoted(path_),
             [&] { fs::resize_file(path_ / "log.jsonl", static_cast<std::uintmax_t>(bytes)); });
  if (log_bytes() > 0) write_csv();
}

void RunFolder::log(const nlohmann::ordered_json& line) {
  const std::string text = nn::json_text(line) + "\n";
  const int file = ::open((path_ / "log.jsonl").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const bool written = file >= 0 && ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int problem = errno;
  if (file >= 0) ::close(file);
  if (!written) throw Error("cannot write to " + quoted(path_ / "log.jsonl") + ": " + std::strerror(problem));
  if (line.value("type", "") == "epoch") write_csv();
}

void RunFolder::write_csv() const {
  constexpr std::array kColumns = {"epoch",    "step",     "lr",       "train_loss",        "gradient_norm",
                                   "val_loss", "val_top1", "val_top5", "images_per_second", "seconds"};
  std::ostringstream csv;
  for (std::size_t i = 0; i < kColumns.size(); ++i) csv << (i == 0 ? "" : ",") << kColumns[i];
  csv << '\n';
  for (const json& line : read_log(path_)) {
    if (line.value("type", "") != "epoch") continue;
    for (std::size_t i = 0; i < kColumns.size(); ++i) {
      csv << (i == 0 ? "" : ",");
      if (line.contains(kColumns[i]) && !line.at(kColumns[i]).is_null()) csv << line.at(kColumns[i]).dump();
    }
    csv << '\n';
  }
  write_file_atomically(path_ / "log.csv", csv.str());
}

void RunFolder::replace_last(const std::function<void(const fs::path& folder)>& fill) const {
  const fs::path next = path_ / "last.next";
  try {
    fs::remove_all(next);
    fs::create_directories(next);
    fill(next);
    if (fs::exists(last())) {
      exchange(next, last());
    } else {
      fs::rename(next, last());
    }
    fs::remove(initial_weights());
    if (has_steps()) forget_replaced();
  } catch (const fs::filesystem_error& error) {
    std::error_code ignored;
    fs::remove_all(next, ignored);
    throw Error("cannot write a checkpoint to " + quoted(path_) + ": " + error.code().message() + what_is_left());
  } catch (const Error& error) {
    std::error_code ignored;
    fs::remove_all(next, ignored);
    throw Error(error.what() + what_is_left());
  }
}

std::string RunFolder::what_is_left() const {
  return has_steps() ? "; the previous checkpoint is still there" : "; there is no checkpoint yet";
}

bool RunFolder::has_checkpoint() const {
  return fs::exists(last() / "state.json");
}

bool RunFolder::has_steps() const {
  const std::optional<json> state = readable_object(last() / "state.json");
  return state && number_in(*state, "step").value_or(0) > 0;
}

}  // namespace violin::train
