// The progress bar of everything that takes long. On a terminal one line that is drawn again at most ten times a
// second; in a pipe plain lines, one about every tenth of the way.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace violin::cli {

class Progress {
 public:
  // "epoch 3 [████░░] 120/400 images  85.1/s  0:03 left  loss 1.23"
  // `start` is when the work began, where that was earlier.
  Progress(std::string label, std::int64_t total, std::string unit,
           std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now());
  ~Progress();  // as finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // So many more are done; `remark` stands at the end of the line until the next one. Safe from several threads.
  void advance(std::int64_t count, std::string_view remark = "");
  // A line above the bar.
  void message(std::string_view text);
  // The last state stays on the screen; nothing is drawn afterwards.
  void finish();

  std::int64_t done() const;
  double seconds() const;  // since the start

 private:
  using Clock = std::chrono::steady_clock;
  void draw_locked(bool last);
  std::string line(int columns, bool last) const;

  const std::string label_, unit_;
  const std::int64_t total_;
  const bool terminal_;
  const Clock::time_point start_;
  mutable std::mutex mutex_;
  std::int64_t done_ = 0;
  std::int64_t next_line_ = 1;  // tenth of the way at which a pipe gets its next line
  std::int64_t shown_ = -1;     // how many were done in its last one
  std::string remark_;
  Clock::time_point drawn_;
  bool finished_ = false;
};

// "0:03", "12:40", "3:05:00"
std::string clock_text(double seconds);

}  // namespace violin::cli
