// SPDX-License-Identifier: Apache-2.0
// aio/direct_file.h: whole transfers over an IoEngine. A transfer is split into blocks, short ones
// are continued, and errors name path, offset, length and errno. The rest of Ziggurat reads and
// writes files only through this class. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "aio/io_activity.h"
#include "aio/io_engine.h"
#include "base/runtime/async.h"
#include "base/runtime/metrics.h"
#include "base/runtime/trace.h"

namespace ziggurat {

/// Where transfers are counted and traced; shared by the files of one drive. The objects that it
/// points to outlive the files.
struct IoObservers {
  Metrics* metrics = nullptr;
  Trace* trace = nullptr;
  /// Combines the busy times and trace rows of several files into one account. Without it each file
  /// keeps its own account, and the busy times of files that overlap add up.
  IoActivity* activity = nullptr;
};

class DirectFile {
 public:
  /// The size of one request; the requests of a transfer are in flight together. A request costs
  /// the processor about the same whatever its size. If a drive takes less at once, the kernel
  /// splits it.
  static constexpr std::uint32_t kBlockBytes = 4 << 20;
  static constexpr int kRetriesMax = 16;

  static std::unique_ptr<DirectFile> open(Reactor& reactor, IoEngine& engine,
                                          const std::string& path, const OpenOptions& options,
                                          IoObservers observers = {});
  ~DirectFile();  ///< no transfer may be in flight
  DirectFile(const DirectFile&) = delete;

  /// Fills `memory` from `offset_bytes`. An error is that of the first block that failed, and is
  /// thrown after all blocks have come back, because the kernel owns the memory until then. Errors:
  /// kDataLoss if the file ended before the memory was full; kInvalidArgument if the file was
  /// opened for direct transfers and offset, length or address is not a multiple of alignment();
  /// otherwise errno's code. EAGAIN and EINTR are retried at most kRetriesMax times per block.
  Task<> read(std::uint64_t offset_bytes, std::span<std::byte> memory,
              IoPriority priority = IoPriority::kDemand);
  Task<> write(std::uint64_t offset_bytes, std::span<const std::byte> memory,
               IoPriority priority = IoPriority::kDemand);
  /// Calls fdatasync. A failed one is never retried as if the data were still dirty.
  Task<> sync();
  /// Drops the file's clean pages: see IoEngine::drop_cache().
  void drop_cache() { engine_.drop_cache(file_); }

  /// Raises the priority of transfers that wait: see IoEngine::raise().
  void raise(std::span<const std::byte> memory, IoPriority priority) {
    engine_.raise(memory, priority);
  }

  const std::string& path() const noexcept { return path_; }
  FileHandle handle() const noexcept { return file_; }
  /// Tells this object the file's new path after a rename.
  void set_path(std::string path) { path_ = std::move(path); }
  std::uint64_t size_bytes();
  void allocate(std::uint64_t size_bytes);
  DirectAlignment alignment() const noexcept { return alignment_; }

 private:
  struct Transfer;
  DirectFile(Reactor& reactor, IoEngine& engine, std::string path, IoObservers observers);
  Task<> run(IoKind kind, std::uint64_t offset_bytes, std::span<std::byte> memory,
             IoPriority priority);

  Reactor& reactor_;
  IoEngine& engine_;
  std::string path_;
  IoObservers observers_;
  std::unique_ptr<IoActivity> own_activity_;  // set if observers_ has no IoActivity
  FileHandle file_;
  bool direct_ = true;
  DirectAlignment alignment_;
  std::size_t transfers_ = 0;  // under way
};

}  // namespace ziggurat
