#include "cli/child.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>

#include "cli/common.h"
#include "violin/data/file.h"

namespace violin::cli {
namespace {

std::atomic<pid_t> running = 0;

extern "C" void pass_on(int signal) {
  if (const pid_t child = running; child > 0) ::kill(child, signal);
}

// While a child runs it hears of signals, and how this program ends follows from how the child does. It is in a group
// of its own, so that Ctrl-C does not reach it twice.
class PassSignalsOn {
 public:
  explicit PassSignalsOn(pid_t child) {
    running = child;
    struct sigaction action = {};
    action.sa_handler = pass_on;
    action.sa_flags = SA_RESTART;
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before_[i]);
  }
  ~PassSignalsOn() {
    running = 0;
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
  }
  PassSignalsOn(const PassSignalsOn&) = delete;
  PassSignalsOn& operator=(const PassSignalsOn&) = delete;

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_ = {};
};

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

// Its standard output goes to a file, its standard error to the number given, and nothing is typed.
pid_t start(const std::vector<std::string>& words, const std::filesystem::path& out, int errors) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, errors, STDERR_FILENO);
  posix_spawnattr_t group;
  posix_spawnattr_init(&group);
  posix_spawnattr_setflags(&group, POSIX_SPAWN_SETPGROUP);
  std::string program = "violin";
  std::vector<std::string> copies = words;
  std::vector<char*> arguments = {program.data()};
  for (std::string& word : copies) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int problem = posix_spawn(&child, "/proc/self/exe", &actions, &group, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&group);
  if (problem != 0) throw Error("cannot start violin " + words.front() + ": " + std::strerror(problem));
  return child;
}

// Every line of the pipe; returns the last one that is not empty.
std::string read_lines(std::FILE* pipe, const std::filesystem::path& log,
                       const std::function<void(std::string_view)>& heed) {
  std::ofstream file(log, std::ios::app);
  std::string line, last;
  for (int c = std::fgetc(pipe);; c = std::fgetc(pipe)) {
    if (c != EOF && c != '\n') {
      line += static_cast<char>(c);
      continue;
    }
    if (!line.empty()) {
      file << line << '\n';
      if (heed) heed(line);
      last = std::move(line);
      line.clear();
    }
    if (c == EOF) return last;
  }
}

}  // namespace

std::string run_verb(const std::vector<std::string>& words, const std::filesystem::path& log,
                     const std::function<void(std::string_view)>& heed) {
  std::filesystem::path out = log;
  out += ".out";
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw Error(std::string("cannot make a pipe: ") + std::strerror(errno));
  const File pipe(::fdopen(ends[0], "r"));
  if (!pipe) throw Error(std::string("cannot read from a pipe: ") + std::strerror(errno));
  pid_t child = 0;
  try {
    child = start(words, out, ends[1]);
  } catch (...) {
    ::close(ends[1]);
    throw;
  }
  ::close(ends[1]);
  const PassSignalsOn signals(child);
  const std::string last = read_lines(pipe.get(), log, heed);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const Bytes printed = read_file(out, std::int64_t{1} << 28);
  std::filesystem::remove(out);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != kDone) {
    const std::string how = WIFSIGNALED(status) ? "ended by signal " + std::to_string(WTERMSIG(status)) : last;
    throw Error((how.empty() ? "violin " + words.front() + " failed" : how) + " (all that it said is in " +
                file_in_quotes(log.string()) + ")");
  }
  return {printed.begin(), printed.end()};
}

}  // namespace violin::cli
