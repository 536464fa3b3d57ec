// SPDX-License-Identifier: Apache-2.0
// aio/posix_files.cc: opens files without following links, locks them for one owner, and reserves
// space or says in numbers why it cannot.
#include "aio/posix_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "aio/file_lock.h"
#include "aio/fork_closed.h"
#include "base/bytes.h"
#include "base/check.h"
#include "base/disk_full.h"
#include "base/error.h"
#include "base/log.h"

namespace ziggurat {
namespace {

/// The mode of locked files and of unnamed ones. Whoever may open a file may also lock it, and a
/// store or checkpoint folder whose lock a stranger holds is of no use to its owner.
constexpr mode_t kPrivateMode = 0600;
/// The mode of all other files, less the umask: they may be shared.
constexpr mode_t kMode = 0666;
constexpr int kReopensMax = 8;

// statx's fields for direct I/O (Linux 6.1), by their offset in the kernel's struct, because older
// C libraries do not declare them.
constexpr unsigned kStatxDioAlign = 0x2000;
constexpr std::size_t kDioMemoryAlignOffset = 0x98;
constexpr std::size_t kDioOffsetAlignOffset = 0x9c;

[[noreturn]] void throw_open_error(int error, const std::string& path) {
  if (error == ELOOP) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("cannot open {}: {}: symbolic links are not followed; name the file itself",
                    path, errno_text(error)),
        error);
  }
  if (error == EEXIST) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("cannot create {}: {}; a file that exists is not overwritten", path,
                            errno_text(error)),
                error);
  }
  throw system_error(error, "open " + path);
}

UniqueFd open_named(const std::string& path, const OpenOptions& options) {
  int flags = O_CLOEXEC | O_NOFOLLOW | (options.writable ? O_RDWR : O_RDONLY);
  if (options.create) flags |= O_CREAT | O_EXCL;
  UniqueFd fd(::open(path.c_str(), flags, options.lock ? kPrivateMode : kMode));
  if (!fd) throw_open_error(errno, path);
  return fd;
}

UniqueFd open_unnamed(const std::string& directory) {
  UniqueFd fd(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kPrivateMode));
  if (fd) return fd;
  const int error = errno;
  if (error != EOPNOTSUPP && error != EISDIR && error != EINVAL) {
    throw system_error(error, "cannot create an unnamed file in " + directory);
  }
  std::string name = directory + "/.ziggurat-XXXXXX";
  fd = UniqueFd(::mkostemp(name.data(), O_CLOEXEC));  // exclusive, mode 0600
  if (!fd) throw system_error(errno, "cannot create a temporary file in " + directory);
  if (::unlink(name.c_str()) != 0) throw system_error(errno, "unlink " + name);
  return fd;
}

// Returns whether `path` still names the open file: the file may have been replaced while this
// process waited for its lock.
bool still_named(const UniqueFd& fd, const std::string& path) {
  struct stat open_file {};
  struct stat named {};
  if (::fstat(fd.get(), &open_file) != 0) throw system_error(errno, "fstat " + path);
  if (::lstat(path.c_str(), &named) != 0) return false;
  return open_file.st_dev == named.st_dev && open_file.st_ino == named.st_ino;
}

// Switches the open file to direct I/O and returns whether that worked. O_DIRECT is not given to
// open(): with O_CREAT, a filesystem that refuses it leaves the new file behind.
bool make_direct(const UniqueFd& fd, const std::string& path) {
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (flags < 0) throw system_error(errno, "fcntl(F_GETFL) " + path);
  if (::fcntl(fd.get(), F_SETFL, flags | O_DIRECT) == 0) return true;
  const int error = errno;
  if (error != EINVAL) throw system_error(error, "fcntl(F_SETFL, O_DIRECT) " + path);
  note_degraded(
      "direct I/O " + path.substr(0, path.rfind('/') + 1),
      fmt::format(
          "the filesystem of {} refuses O_DIRECT: transfers go through the page cache, which costs "
          "CPU and memory; put it on ext4, XFS or another one with direct I/O",
          path));
  return false;
}

/// Throws unless `fd` is a regular file, or a block device that is not to be written.
void require_regular(const UniqueFd& fd, const std::string& path, bool writable) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw system_error(errno, "fstat " + path);
  if (!S_ISREG(status.st_mode) && (writable || !S_ISBLK(status.st_mode))) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("cannot open {}: it is not a regular file", path));
  }
}

/// An open file that children forked from now on do not keep: with a lock they would hold it.
class ForkClosedFile {
 public:
  explicit ForkClosedFile(UniqueFd fd) : fd_(std::move(fd)) { close_in_children(fd_.get()); }
  ForkClosedFile(ForkClosedFile&&) = default;
  ForkClosedFile& operator=(ForkClosedFile&&) = delete;
  ~ForkClosedFile() {
    if (fd_) forget_for_children(fd_.get());
  }
  const UniqueFd& fd() const noexcept { return fd_; }
  /// Gives the descriptor to one who calls forget_for_children() before it closes it.
  UniqueFd release() noexcept { return std::move(fd_); }

 private:
  UniqueFd fd_;
};

/// Opens the file, and waits for its lock if it is to be locked.
ForkClosedFile opened(const std::string& path, const OpenOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  for (int opens = 0;; ++opens) {
    // Before the lock is waited for: another thread may fork meanwhile.
    ForkClosedFile file(options.unnamed ? open_unnamed(path) : open_named(path, options));
    require_regular(file.fd(), path, options.writable);
    if (!options.lock) return file;
    lock_file({.fd = file.fd().get(), .path = path, .wait = options.lock_wait, .begin = begin});
    if (options.unnamed || still_named(file.fd(), path)) return file;
    if (opens == kReopensMax || options.create) {
      throw Error(ErrorCode::kUnavailable,
                  fmt::format("another process replaces {} again and again; stop that process, or "
                              "name another file",
                              path));
    }
  }
}

/// To this user.
std::uint64_t free_bytes_of(const struct statvfs& filesystem) {
  const auto blocks = ::geteuid() == 0 ? filesystem.f_bfree : filesystem.f_bavail;
  return std::uint64_t{blocks} * filesystem.f_frsize;
}

std::uint64_t free_bytes_at(int fd, const std::string& path) {
  struct statvfs filesystem {};
  if (::fstatvfs(fd, &filesystem) != 0) throw system_error(errno, "statvfs " + path);
  return free_bytes_of(filesystem);
}

DiskFull no_space(int error, const std::string& path, std::uint64_t size_bytes,
                  std::uint64_t missing_bytes, std::uint64_t free) {
  const std::string why =
      free < missing_bytes
          ? fmt::format("because {} more bytes are needed and {} are free ({} of {})",
                        missing_bytes, free, format_bytes(free), format_bytes(missing_bytes))
          : fmt::format(
                "although the filesystem says that {} are free: a quota or another limit "
                "forbids {} more",
                format_bytes(free), format_bytes(missing_bytes));
  return {path,
          fmt::format("{}: there is no room for a file of {}, {}: {}; free some space, or put the "
                      "file on another filesystem",
                      path, format_bytes(size_bytes), why, errno_text(error)),
          error};
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

UniqueFd::~UniqueFd() {
  // An error of close() tells nothing useful: what must be durable was synced before, and after
  // EINTR the descriptor is closed too.
  if (fd_ >= 0) static_cast<void>(::close(fd_));
}

PosixFiles::PosixFiles() {
  struct sigaction action {};
  if (::sigaction(SIGXFSZ, nullptr, &action) != 0) throw system_error(errno, "sigaction SIGXFSZ");
  if (action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  if (::sigaction(SIGXFSZ, &action, nullptr) != 0) throw system_error(errno, "sigaction SIGXFSZ");
}

FileHandle PosixFiles::open(const std::string& path, const OpenOptions& options) {
  ForkClosedFile file = opened(path, options);
  const bool direct = options.direct && make_direct(file.fd(), path);

  const std::lock_guard guard(mutex_);
  const auto free_slot =
      std::find_if(files_.begin(), files_.end(), [](const File& other) { return !other.fd; });
  const int id = static_cast<int>(free_slot - files_.begin());
  if (free_slot == files_.end()) files_.emplace_back();
  files_[static_cast<std::size_t>(id)] = {file.release(), path, options.lock, direct,
                                          next_serial_++};
  return {id};
}

void PosixFiles::close(FileHandle file) noexcept {
  const std::lock_guard guard(mutex_);
  File& entry = files_[static_cast<std::size_t>(file.id)];
  // Unlocks explicitly: a ring that has the file registered, or a forked child, would keep the
  // lock.
  if (entry.locked) static_cast<void>(::flock(entry.fd.get(), LOCK_UN));
  forget_for_children(entry.fd.get());
  entry = {};
}

PosixFiles::Descriptor PosixFiles::descriptor(FileHandle file) const {
  const std::lock_guard guard(mutex_);
  const auto id = static_cast<std::size_t>(file.id);
  ZIGGURAT_CHECK(file.id >= 0 && id < files_.size() && files_[id].fd, "handle {} is not open",
                 file.id);
  return {files_[id].fd.get(), files_[id].serial, files_[id].direct};
}

std::string PosixFiles::path_of(FileHandle file) const {
  const std::lock_guard guard(mutex_);
  return files_[static_cast<std::size_t>(file.id)].path;
}

std::uint64_t PosixFiles::file_size_bytes(FileHandle file) {
  struct stat status {};
  if (::fstat(descriptor(file).fd, &status) != 0)
    throw system_error(errno, "fstat " + path_of(file));
  return static_cast<std::uint64_t>(status.st_size);
}

void PosixFiles::allocate(FileHandle file, std::uint64_t size_bytes) {
  const int fd = descriptor(file).fd;
  const std::string path = path_of(file);
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw system_error(errno, "fstat " + path);
  const std::uint64_t held_bytes = static_cast<std::uint64_t>(status.st_blocks) * 512;
  const std::uint64_t missing_bytes = size_bytes - std::min(size_bytes, held_bytes);
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0) throw system_error(errno, "getrlimit(RLIMIT_FSIZE)");
  if (limit.rlim_cur != RLIM_INFINITY && size_bytes > limit.rlim_cur) {
    throw DiskFull(path,
                   fmt::format("{}: cannot make a file of {}: {}: this process may write files of "
                               "at most {}; raise RLIMIT_FSIZE (ulimit -f unlimited)",
                               path, format_bytes(size_bytes), errno_text(EFBIG),
                               format_bytes(limit.rlim_cur)),
                   EFBIG);
  }
  // Compares with the free space first: to find out by filling the filesystem would take the space
  // from everybody else meanwhile.
  const std::uint64_t free = free_bytes_at(fd, path);
  if (missing_bytes > free) throw no_space(ENOSPC, path, size_bytes, missing_bytes, free);

  int error = 0;
  do {
    error = ::fallocate(fd, 0, 0, static_cast<off_t>(size_bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP) {
    note_degraded("fallocate " + path.substr(0, path.rfind('/') + 1),
                  fmt::format("the filesystem of {} cannot reserve space, so a full disk may show "
                              "only during the run",
                              path));
    if (static_cast<std::uint64_t>(status.st_size) < size_bytes) {
      error = ::ftruncate(fd, static_cast<off_t>(size_bytes)) == 0 ? 0 : errno;
    } else {
      error = 0;
    }
  }
  if (error == 0) return;
  const bool restored =
      ::ftruncate(fd, status.st_size) == 0;  // gives back what was reserved before it failed
  if (error == ENOSPC || error == EDQUOT) {
    throw no_space(error, path, size_bytes, missing_bytes, free_bytes_at(fd, path));
  }
  throw system_error(
      error, fmt::format("cannot reserve {} bytes for {}{}", size_bytes, path,
                         restored ? "" : ", and the file could not be cut back to its old size"));
}

DirectAlignment PosixFiles::alignment(FileHandle file) {
  struct statx status {};
  if (::statx(descriptor(file).fd, "", AT_EMPTY_PATH, kStatxDioAlign, &status) != 0) {
    throw system_error(errno, "statx " + path_of(file));
  }
  DirectAlignment alignment;
  if ((status.stx_mask & kStatxDioAlign) == 0) return alignment;
  std::array<std::byte, sizeof(status)> raw;
  std::memcpy(raw.data(), &status, sizeof(status));
  DirectAlignment stated;
  std::memcpy(&stated.memory_bytes, raw.data() + kDioMemoryAlignOffset,
              sizeof(stated.memory_bytes));
  std::memcpy(&stated.offset_bytes, raw.data() + kDioOffsetAlignOffset,
              sizeof(stated.offset_bytes));
  // Zeros mean that this file has no direct I/O.
  return stated.memory_bytes > 0 && stated.offset_bytes > 0 ? stated : alignment;
}

void PosixFiles::rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    throw system_error(errno, fmt::format("rename {} to {}", from, to));
  }
}

void PosixFiles::remove(const std::string& path) {
  if (::unlink(path.c_str()) != 0) throw system_error(errno, "remove " + path);
}

bool PosixFiles::exists(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) return true;
  const int error = errno;
  if (error == ENOENT || error == ENOTDIR) return false;
  throw system_error(error, "look for " + path);
}

void PosixFiles::sync_directory(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw system_error(errno, "open directory " + path);
  if (::fsync(fd.get()) != 0) throw system_error(errno, "fsync of directory " + path);
}

void PosixFiles::make_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) == 0) return;
  const int error = errno;
  struct ::stat about {};
  const bool there = error == EEXIST && ::stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
  if (!there) throw system_error(error, "make directory " + path);
}

void PosixFiles::remove_directory(const std::string& path) {
  if (::rmdir(path.c_str()) != 0) throw system_error(errno, "remove directory " + path);
}

std::vector<std::string> PosixFiles::names_in(const std::string& directory) {
  std::error_code failure;
  std::vector<std::string> names;
  std::filesystem::directory_iterator entry(directory, failure);
  for (; !failure && entry != std::filesystem::directory_iterator(); entry.increment(failure))
    names.push_back(entry->path().filename().string());
  if (failure) throw system_error(failure.value(), "list directory " + directory);
  std::ranges::sort(names);
  return names;
}

std::uint64_t PosixFiles::free_bytes(const std::string& directory) {
  struct statvfs filesystem {};
  if (::statvfs(directory.c_str(), &filesystem) != 0)
    throw system_error(errno, "statvfs " + directory);
  return free_bytes_of(filesystem);
}

void PosixFiles::drop_cache(FileHandle file) {
  const int error = ::posix_fadvise(descriptor(file).fd, 0, 0, POSIX_FADV_DONTNEED);
  if (error != 0) throw system_error(error, "posix_fadvise(POSIX_FADV_DONTNEED) " + path_of(file));
}

}  // namespace ziggurat
