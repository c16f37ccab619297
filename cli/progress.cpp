#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cli/common.h"
#include "violin/viz/terminal.h"

namespace violin::cli {
namespace {

// One that can draw a line again.
bool is_terminal() {
  const char* type = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && (type == nullptr || std::strcmp(type, "dumb") != 0);
}

int screen_columns() {
  winsize size = {};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

constexpr int kMostCells = 24;
constexpr int kFewestCells = 4;

std::string bar(double share, int cells) {
  const auto eighths = static_cast<int>(std::floor(share * cells * 8));
  static constexpr const char* kParts[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  std::string text;
  for (int i = 0; i < eighths / 8; ++i) text += "█";
  int used = eighths / 8;
  if (eighths % 8 != 0) {
    text += kParts[eighths % 8];
    ++used;
  }
  return "▕" + text + std::string(static_cast<std::size_t>(cells - used), ' ') + "▏";
}

// As many whole characters as fit into the columns.
std::string cut(const std::string& text, int columns) {
  int used = 0;
  std::size_t end = 0;
  while (end < text.size()) {
    std::size_t next = end + 1;
    while (next < text.size() && (static_cast<unsigned char>(text[next]) & 0xC0) == 0x80) ++next;
    if (++used > columns) break;
    end = next;
  }
  return text.substr(0, end);
}

}  // namespace

std::string clock_text(double seconds) {
  const long long whole = std::llround(std::min(std::max(seconds, 0.0), 3.6e8));
  char text[48];
  if (whole >= 3600) {
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
  } else {
    std::snprintf(text, sizeof text, "%lld:%02lld", whole / 60, whole % 60);
  }
  return text;
}

Progress::Progress(std::string label, std::int64_t total, std::string unit, Clock::time_point start)
    : label_(std::move(label)),
      unit_(std::move(unit)),
      total_(std::max<std::int64_t>(total, 0)),
      terminal_(is_terminal()),
      start_(start) {}

Progress::~Progress() {
  finish();
}

std::int64_t Progress::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

double Progress::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

void Progress::advance(std::int64_t count, std::string_view remark) {
  const std::lock_guard lock(mutex_);
  done_ += count;
  remark_ = remark;
  if (!finished_) draw_locked(false);
}

void Progress::message(std::string_view text) {
  const std::lock_guard lock(mutex_);
  if (terminal_) std::fputs("\r\x1b[K", stderr);
  note(text);
  drawn_ = {};
  if (terminal_ && !finished_) draw_locked(false);
}

void Progress::finish() {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  draw_locked(true);
  finished_ = true;
}

std::string Progress::line(int columns, bool last) const {
  const double passed = seconds();
  const double rate = passed > 0 ? static_cast<double>(done_) / passed : 0;
  char speed[48];
  std::snprintf(speed, sizeof speed, rate >= 100 ? "%.0f/s" : "%.1f/s", rate);
  std::string text =
      " " + std::to_string(done_) + (total_ > 0 ? "/" + std::to_string(total_) : "") + " " + unit_ + "  " + speed;
  if (!last && done_ < total_ && rate > 0) {
    text += "  " + clock_text(static_cast<double>(total_ - done_) / rate) + " left";
  } else {
    text += "  " + clock_text(passed);
  }
  if (!remark_.empty()) text += "  " + remark_;
  if (terminal_ && total_ > 0) {
    // What the words leave: on a narrow screen they say more than a long bar.
    const int cells = std::min(kMostCells, columns - static_cast<int>(viz::columns_of(label_ + text)) - 3);
    if (cells >= kFewestCells)
      text = " " + bar(std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_)), cells) + text;
  }
  text = label_ + text;
  return columns > 0 ? cut(text, columns) : text;
}

void Progress::draw_locked(bool last) {
  if (terminal_) {
    const Clock::time_point now = Clock::now();
    if (!last && now - drawn_ < std::chrono::milliseconds(100)) return;
    drawn_ = now;
    std::fprintf(stderr, "\r\x1b[K%s%s", line(screen_columns() - 1, last).c_str(), last ? "\n" : "");
    std::fflush(stderr);
    return;
  }
  const std::int64_t tenth = total_ > 0 ? done_ * 10 / total_ : 0;
  if (last ? shown_ == done_ : tenth < next_line_) return;
  next_line_ = tenth + 1;
  shown_ = done_;
  note(line(0, last));
}

}  // namespace violin::cli
