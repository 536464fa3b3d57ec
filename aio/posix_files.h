// SPDX-License-Identifier: Apache-2.0
// aio/posix_files.h: the part of IoEngine that opens, locks, allocates and renames files, for the
// engines that use the operating system's files.
//
// Owns the descriptors behind the handles. A mutex guards the table, because an engine's threads
// look up descriptors in it.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "aio/io_engine.h"

namespace ziggurat {

/// A file descriptor, closed by its destructor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd();

  int get() const noexcept { return fd_; }
  /// Gives the descriptor up to the caller.
  int release() noexcept { return std::exchange(fd_, -1); }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

class PosixFiles : public IoEngine {
 public:
  /// Ignores SIGXFSZ unless the embedding program handles it. By default a write past the process's
  /// file size limit kills the process without a message; with the signal ignored, the write fails
  /// with EFBIG.
  PosixFiles();

  FileHandle open(const std::string& path, const OpenOptions& options) override;
  void close(FileHandle file) noexcept override;
  std::uint64_t file_size_bytes(FileHandle file) override;
  void allocate(FileHandle file, std::uint64_t size_bytes) override;
  DirectAlignment alignment(FileHandle file) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  bool exists(const std::string& path) override;
  void sync_directory(const std::string& path) override;
  void make_directory(const std::string& path) override;
  void remove_directory(const std::string& path) override;
  std::vector<std::string> names_in(const std::string& directory) override;
  std::uint64_t free_bytes(const std::string& directory) override;
  void drop_cache(FileHandle file) override;

  /// Returns the descriptor behind an open handle, for facts that no engine reports (extents,
  /// residency). The engine keeps ownership of it.
  int native_descriptor(FileHandle file) const { return descriptor(file).fd; }

 protected:
  /// The descriptor behind an open handle. Descriptors and handles are used again; serials never
  /// are.
  struct Descriptor {
    int fd;
    std::uint64_t serial;
    bool direct;  ///< transfers bypass the page cache
  };
  Descriptor descriptor(FileHandle file) const;

 private:
  struct File {
    UniqueFd fd;
    std::string path;
    bool locked = false;
    bool direct = false;
    std::uint64_t serial = 0;
  };
  std::string path_of(FileHandle file) const;

  mutable std::mutex mutex_;
  std::vector<File> files_;
  std::uint64_t next_serial_ = 1;
};

}  // namespace ziggurat
