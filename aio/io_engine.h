// SPDX-License-Identifier: Apache-2.0
// aio/io_engine.h: the one interface to storage: files by handle, and raw transfers whose every
// result is reported.
//
// Implementations: uring_engine.h (io_uring), libaio_engine.h (io_submit), thread_engine.h (pread
// on threads) and simulated_engine.h (a disk in memory with virtual time and crashes). Two classes
// wrap any of these: drive_queue.h orders what a drive is given, faulty_engine.h injects faults.
// One conformance suite covers all: tests/aio/io_engine_conformance_test.cc. Engines only report
// results; for whole transfers, retries of short ones and readable errors use DirectFile
// (direct_file.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/runtime/reactor.h"

namespace ziggurat {

/// A file opened on an IoEngine. A plain value that only the engine that returned it understands.
struct FileHandle {
  int id = -1;
};

enum class IoKind : std::uint8_t { kRead, kWrite, kSync };  ///< kSync is fdatasync

/// How soon a transfer is needed. Engines take operations as they come; DriveQueue (drive_queue.h)
/// orders them.
enum class IoPriority : std::uint8_t {
  kDemand,     ///< something waits for the transfer now
  kPrefetch,   ///< something will soon wait for it
  kWriteBack,  ///< nothing waits for it, but it holds memory and the step's end needs it
  kDurable,    ///< only the step's end needs it
};
inline constexpr std::size_t kIoPriorities = 4;

/// One raw transfer. The caller owns the operation, and keeps it and its memory alive until
/// `complete` was called.
struct IoOp {
  IoKind kind = IoKind::kRead;
  FileHandle file;
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  std::uint32_t size_bytes = 0;
  IoPriority priority = IoPriority::kDemand;
  /// Called once, on the reactor's thread, never from inside submit(). `result` is the number of
  /// bytes transferred (perhaps fewer than asked), or -errno.
  void (*complete)(IoOp& op, std::int32_t result) = nullptr;
  void* user = nullptr;
  IoOp* next = nullptr;  ///< for the engine's own queues
};

struct OpenOptions {
  bool create = false;  ///< O_CREAT|O_EXCL, mode 0600 with `lock`, otherwise by umask; if false,
                        ///< the file must exist
  bool writable = false;
  bool direct = true;    ///< O_DIRECT; if refused, the page cache is used, and this is
                         ///< logged once
  bool unnamed = false;  ///< `path` is a directory: O_TMPFILE in it (or created and unlinked)
  bool lock = false;     ///< flock(LOCK_EX) on the data file, waiting at most lock_wait, or a
                         ///< minute for the last writes of a process that has ended
  std::chrono::milliseconds lock_wait{10'000};
};

/// The alignment that direct transfers of a file need (statx STATX_DIOALIGN; 4096 if statx does not
/// report it).
struct DirectAlignment {
  std::uint32_t memory_bytes = 4096;
  std::uint32_t offset_bytes = 4096;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  /// The engine's name and the features that it uses: "io_uring (SINGLE_ISSUER, DEFER_TASKRUN,
  /// registered buffers)", "threads (4, pread and pwrite)".
  virtual std::string description() const = 0;
  virtual std::uint32_t queue_depth() const noexcept = 0;

  /// Opens a file by name. This and the other calls by name are synchronous, for start-up and
  /// commit by rename. Symlinks in the last component are refused. Errors: Error with path and
  /// errno; kUnavailable if another process holds the lock, naming the path and how long this one
  /// waited.
  virtual FileHandle open(const std::string& path, const OpenOptions& options) = 0;
  virtual void close(FileHandle file) noexcept = 0;
  virtual std::uint64_t file_size_bytes(FileHandle file) = 0;
  /// Reserves the space (fallocate). Errors: kResourceExhausted naming path, size and free space.
  virtual void allocate(FileHandle file, std::uint64_t size_bytes) = 0;
  virtual DirectAlignment alignment(FileHandle file) = 0;
  virtual void rename(const std::string& from, const std::string& to) = 0;
  virtual void remove(const std::string& path) = 0;
  virtual bool exists(const std::string& path) = 0;
  virtual void sync_directory(const std::string& path) = 0;
  /// Makes a directory. It may exist already; the directory above it must exist.
  virtual void make_directory(const std::string& path) = 0;
  /// Removes an empty directory.
  virtual void remove_directory(const std::string& path) = 0;
  /// Returns the names of the files and directories in `directory`, in order. Errors: ENOENT if it
  /// does not exist.
  virtual std::vector<std::string> names_in(const std::string& directory) = 0;
  /// Returns the bytes that this user can still write to the filesystem of `directory`. Errors:
  /// errno's, naming the directory.
  virtual std::uint64_t free_bytes(const std::string& directory) = 0;
  /// Makes later reads of `file` come from the drive and not from pages that are clean now
  /// (posix_fadvise): after a failed sync such pages may show bytes that the drive never got. Sync
  /// first, because dirty pages stay.
  virtual void drop_cache(FileHandle file) = 0;

  /// Offers memory that transfers will use; it is registered with the kernel where that helps.
  /// Called on the reactor's thread, before use. The memory stays mapped as long as the engine
  /// lives: an address that is unmapped and used again for other memory must be offered again.
  virtual void register_memory(std::span<std::byte> memory) = 0;

  /// Raises transfers that fill or empty any of `memory` and have not been given to the drive yet
  /// to at least `priority`. Engines that keep no order of their own have nothing to do.
  virtual void raise(std::span<const std::byte> /*memory*/, IoPriority /*priority*/) {}

  /// Queues `op`. Reactor's thread. If more than queue_depth() are submitted, the rest wait inside
  /// the engine, in order.
  virtual void submit(IoOp& op) = 0;
  virtual std::size_t in_flight() const noexcept = 0;
};

}  // namespace ziggurat
