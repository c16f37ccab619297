#include "violin/data/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "violin/error.h"

namespace violin {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what, const fs::path& path, int code) {
  throw Error("cannot " + what + " '" + path.string() + "': " + std::strerror(code));
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }

  int number() const { return number_; }
  bool valid() const { return number_ >= 0; }
  // Some file systems report a failed write only here.
  int close() { return valid() ? ::close(std::exchange(number_, -1)) : 0; }

 private:
  int number_;
};

void write_all(const Descriptor& file, std::span<const std::uint8_t> bytes, const fs::path& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file.number(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", path, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

// Removes an unfinished file unless it was renamed to its place.
struct Leftover {
  fs::path path;
  bool armed = true;
  ~Leftover() {
    if (armed) ::unlink(path.c_str());
  }
};

}  // namespace

Bytes read_file(const fs::path& path, std::int64_t max_bytes) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) fail("open", path, errno);
  struct stat status = {};
  if (::fstat(file.number(), &status) != 0) fail("open", path, errno);
  if (S_ISDIR(status.st_mode)) fail("read", path, EISDIR);

  Bytes bytes;
  // One byte more than the file has, so that its end is seen without growing; pipes say 0 and grow as they go.
  std::size_t room = static_cast<std::size_t>(std::clamp<std::int64_t>(status.st_size, 0, max_bytes)) + 1;
  std::size_t used = 0;
  for (;;) {
    bytes.resize(used + room);
    const ssize_t got = ::read(file.number(), bytes.data() + used, room);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path, errno);
    if (got == 0) break;
    used += static_cast<std::size_t>(got);
    if (static_cast<std::int64_t>(used) > max_bytes) {
      throw Error("'" + path.string() + "' is larger than " + std::to_string(max_bytes >> 20) +
                  " MiB, the limit for this kind of file");
    }
    room = std::max<std::size_t>(bytes.size() - used, std::size_t{1} << 16);
  }
  bytes.resize(used);
  return bytes;
}

void write_file_atomically(const fs::path& path, const std::function<void(const ByteSink&)>& produce) {
  struct stat status = {};
  const bool exists = ::stat(path.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) fail("write", path, EISDIR);
  if (exists && ::access(path.c_str(), W_OK) != 0) fail("write", path, errno);

  if (exists && !S_ISREG(status.st_mode)) {
    Descriptor device(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (!device.valid()) fail("write", path, errno);
    produce([&](std::span<const std::uint8_t> bytes) { write_all(device, bytes, path); });
    if (device.close() != 0) fail("write", path, errno);
    return;
  }

  std::error_code ignored;
  const fs::path target = exists ? fs::canonical(path, ignored) : path;
  static std::atomic<unsigned> counter{0};
  Leftover temporary{target.string() + ".part-" + std::to_string(::getpid()) + "-" + std::to_string(counter++)};
  Descriptor file(::open(temporary.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file.valid()) {
    temporary.armed = false;
    fail("write", path, errno);
  }
  if (exists && ::fchmod(file.number(), status.st_mode & 07777) != 0) fail("write", path, errno);
  produce([&](std::span<const std::uint8_t> bytes) { write_all(file, bytes, path); });
  if (::fsync(file.number()) != 0 && errno != EINVAL) fail("write", path, errno);
  if (file.close() != 0) fail("write", path, errno);
  if (::rename(temporary.path.c_str(), target.c_str()) != 0) fail("write", path, errno);
  temporary.armed = false;
}

void write_file_atomically(const fs::path& path, std::span<const std::uint8_t> bytes) {
  write_file_atomically(path, [&](const ByteSink& sink) { sink(bytes); });
}

void write_file_atomically(const fs::path& path, std::string_view text) {
  write_file_atomically(path, std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size()));
}

}  // namespace violin
