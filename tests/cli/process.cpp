#include "tests/cli/process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

#include "tests/temporary_folder.h"
#include "violin/data/file.h"

namespace violin {
namespace {

std::string text_of(const std::string& path) {
  const Bytes bytes = read_file(path, 1 << 28);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

Outcome run_violin(const std::vector<std::string>& arguments, const std::string& stdout_path) {
  const TemporaryFolder folder;
  const std::string out = stdout_path.empty() ? folder.file("out") : stdout_path;
  const std::string err = folder.file("err");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT, 0600);

  std::vector<char*> argv = {const_cast<char*>(VIOLIN_BINARY)};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_t child = 0;
  const int problem = posix_spawn(&child, VIOLIN_BINARY, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (problem != 0) throw std::runtime_error("cannot start " VIOLIN_BINARY);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, stdout_path.empty() ? text_of(out) : "", text_of(err)};
}

}  // namespace violin
