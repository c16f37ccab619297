// The folder of a run:
//   config.json   everything needed to repeat the run
//   log.jsonl     one object per line; log.csv has the epochs as a table
//   last/         model.safetensors, optimizer.safetensors, state.json: where to go on
//   best/         model.safetensors of the best epoch on val
//   (with --ema both hold ema.safetensors too, the average of the weights)
//   initial.safetensors   what a run with given weights begins with, until the first checkpoint
//   .replaced/    the run that was here before, until the first checkpoint after a step
// A kill at any moment leaves it readable: single files are written beside and renamed, and the three files of last/
// are exchanged as a folder, so they always belong together. One process at a time works in it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace violin::train {

class RunFolder {
 public:
  enum class Mode {
    kNew,      // the folder must not hold a run
    kResume,   // it must
    kReplace,  // a run that is there is set aside until this one has a checkpoint after a step
  };
  // Throws violin::Error for what the mode does not allow, for a folder that is not a run's and not empty, and where
  // another process holds it.
  RunFolder(std::filesystem::path path, Mode mode);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path last() const { return path_ / "last"; }
  std::filesystem::path best_weights() const { return path_ / "best" / "model.safetensors"; }
  std::filesystem::path initial_weights() const;

  void write(const std::string& name, const nlohmann::ordered_json& json) const;
  void write_text(const std::string& name, const std::string& text) const;

  // Appends a line to log.jsonl; an object of type "epoch" also becomes a row of log.csv.
  void log(const nlohmann::ordered_json& line);
  std::int64_t log_bytes() const;
  // Forgets what was logged after a checkpoint was written.
  void truncate_log(std::int64_t bytes);

  // `fill` writes the files of the next last/ into the folder it is given; then the two are exchanged, and initial
  // weights and a run that was replaced are no longer needed.
  void replace_last(const std::function<void(const std::filesystem::path& folder)>& fill) const;
  bool has_checkpoint() const;
  bool has_steps() const;  // a checkpoint with more in it than the weights that training begins with
  // Whether the run that was here before could be brought back.
  bool replaces() const;
  // Removes the files of the run; the one that was here before comes back.
  void discard() const;

 private:
  void set_aside() const;
  void forget_replaced() const;
  void bring_back() const;
  void recover() const;
  std::string what_is_left() const;
  void write_csv() const;

  std::filesystem::path path_;
  int lock_ = -1;
};

// What the constructor would refuse is refused here, and nothing is made or removed: to ask before work that takes
// long.
void check_run_folder(const std::filesystem::path& path, RunFolder::Mode mode);

// True for the config.json of a run, and for a folder that has one.
bool is_run_config(const nlohmann::json& config);
bool is_run_folder(const std::filesystem::path& path);
// True for the place of a file that a run writes for itself; a page about it is none.
bool is_run_file(const std::filesystem::path& path);
nlohmann::json read_json_file(const std::filesystem::path& path);                  // an object
std::optional<nlohmann::json> readable_object(const std::filesystem::path& path);  // nothing where there is none
// A number that may be missing, or null because it was not finite.
std::optional<double> number_in(const nlohmann::json& object, const char* key);
// The objects of log.jsonl that have a type; a last line that a kill cut off is left out.
std::vector<nlohmann::json> read_log(const std::filesystem::path& run);

}  // namespace violin::train
