#include "violin/checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "violin/error.h"
#include "violin/text.h"

namespace violin::checkpoint {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& why) {
  throw Error("cannot read " + file_in_quotes(path.string()) + ": " + why);
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  // Not blocking, or a pipe without a writer would hold us here.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail(path, std::strerror(errno));
  return std::shared_ptr<const MappedFile>(new MappedFile(descriptor, path));
}

MappedFile::MappedFile(int descriptor, std::filesystem::path path) : descriptor_(descriptor), path_(std::move(path)) {
  const auto give_up = [&](const std::string& why) {
    ::close(descriptor_);
    fail(path_, why);
  };
  struct stat status = {};
  if (::fstat(descriptor_, &status) != 0) give_up(std::strerror(errno));
  if (S_ISDIR(status.st_mode)) give_up("it is a folder");
  if (!S_ISREG(status.st_mode)) give_up("it is not a regular file");
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  // Writable, so that tensors on it can be trained in place; private, so that this never reaches the file.
  void* data = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
  if (data == MAP_FAILED) give_up(std::strerror(errno));
  data_ = static_cast<std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
  ::close(descriptor_);
}

void MappedFile::read(ByteSpan from, std::span<std::byte> to) const {
  auto offset = static_cast<off_t>(from.data() - data_);
  while (!to.empty()) {
    const ssize_t got = ::pread(descriptor_, to.data(), to.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, std::strerror(errno));
    if (got == 0) fail(path_, "it became shorter while it was read");
    to = to.subspan(static_cast<std::size_t>(got));
    offset += got;
  }
}

}  // namespace violin::checkpoint
