// SPDX-License-Identifier: Apache-2.0
// aio/io_engine.h: the one seam to storage: files by handle, and raw transfers whose every result
// is reported.
//
// Implementations: uring_engine.h (io_uring), libaio_engine.h (io_submit), thread_engine.h (pread
// on threads) and simulated_engine.h (a disk in memory with virtual time and crashes); and two that
// wrap any of them: drive_queue.h orders what a drive is given, faulty_engine.h injects faults. One
// conformance suite covers all: tests/aio/io_engine_conformance_test.cc. Engines report; whoever
// wants whole transfers, retries of short ones and readable errors uses DirectFile (direct_file.h).
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

/// A file opened on an IoEngine. Plain value; meaningful only to the engine that gave it.
struct FileHandle {
  int id = -1;
};

enum class IoKind : std::uint8_t { kRead, kWrite, kSync };  ///< kSync is fdatasync

/// How soon somebody needs it. Engines take operations as they come; DriveQueue (drive_queue.h)
/// orders them.
enum class IoPriority : std::uint8_t {
  kDemand,     ///< someone waits for it now
  kPrefetch,   ///< someone will
  kWriteBack,  ///< nobody does; memory and the step's end do
  kDurable,    ///< the step's end alone does
};
inline constexpr std::size_t kIoPriorities = 4;

/// One raw transfer. The caller owns it and keeps it and its memory alive until `complete` was
/// called.
struct IoOp {
  IoKind kind = IoKind::kRead;
  FileHandle file;
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  std::uint32_t size_bytes = 0;
  IoPriority priority = IoPriority::kDemand;
  /// Called once on the reactor's thread, never from inside submit(): bytes transferred (maybe
  /// fewer than asked), or -errno.
  void (*complete)(IoOp& op, std::int32_t result) = nullptr;
  void* user = nullptr;
  IoOp* next = nullptr;  ///< for the engine's own queues
};

struct OpenOptions {
  bool create = false;  ///< O_CREAT|O_EXCL (0600 with `lock`, else by umask); else it must exist
  bool writable = false;
  bool direct = true;    ///< O_DIRECT; where the filesystem refuses, degrades, logged once
  bool unnamed = false;  ///< `path` is a directory: O_TMPFILE in it (or created and unlinked)
  bool lock = false;     ///< flock(LOCK_EX) on the data file, waiting at most lock_wait
  std::chrono::milliseconds lock_wait{10'000};
};

/// Alignment that direct transfers of a file need (statx STATX_DIOALIGN; 4096 where it says
/// nothing).
struct DirectAlignment {
  std::uint32_t memory_bytes = 4096;
  std::uint32_t offset_bytes = 4096;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  /// "io_uring", "threads", ... with what is in force: "io_uring (SINGLE_ISSUER, DEFER_TASKRUN,
  /// registered buffers)".
  virtual std::string description() const = 0;
  virtual std::uint32_t queue_depth() const noexcept = 0;

  /// Name-level operations: synchronous, for start-up and commit by rename. Symlinks in the last
  /// component are refused. Errors: Error with path and errno; a lock held elsewhere: kUnavailable
  /// naming the path and how long it waited.
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
  /// One that is there already is fine; the one that it is made in must be.
  virtual void make_directory(const std::string& path) = 0;
  /// An empty one.
  virtual void remove_directory(const std::string& path) = 0;
  /// Names of the files and directories in one, in order. Errors: ENOENT where there is none.
  virtual std::vector<std::string> names_in(const std::string& directory) = 0;
  /// Free on the filesystem of a directory, for this user. Errors: errno's, naming it.
  virtual std::uint64_t free_bytes(const std::string& directory) = 0;
  /// Later reads of `file` come from the drive, not from pages that were clean when this was called
  /// (posix_fadvise): after a failed sync those may show what the drive never got. Sync first, as
  /// dirty pages stay.
  virtual void drop_cache(FileHandle file) = 0;

  /// Offers memory that transfers will use; registered with the kernel where that helps. Reactor's
  /// thread, before use. It stays mapped as long as the engine lives: an address that is unmapped
  /// and used again for other memory must be offered again.
  virtual void register_memory(std::span<std::byte> memory) = 0;

  /// Somebody waits for `memory` now: transfers that fill or empty any of it and are still to be
  /// given to the drive go with at least `priority`. Engines that keep no order of their own have
  /// nothing to do.
  virtual void raise(std::span<const std::byte> /*memory*/, IoPriority /*priority*/) {}

  /// Queues `op`. Reactor's thread. More than queue_depth() wait inside, in order.
  virtual void submit(IoOp& op) = 0;
  virtual std::size_t in_flight() const noexcept = 0;
};

}  // namespace ziggurat
