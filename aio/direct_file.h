// SPDX-License-Identifier: Apache-2.0
// aio/direct_file.h: whole transfers over an IoEngine: split into blocks, short ones continued,
// errors with path, offset, length and errno. The only way the engine reads or writes a file.
// Reactor's thread.
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

/// Shared by the files of one drive: where transfers are counted and traced. What it points to
/// outlives the files.
struct IoObservers {
  Metrics* metrics = nullptr;
  Trace* trace = nullptr;
  /// Makes busy time and trace rows one account over several files; without it each file keeps its
  /// own, and busy times of files that overlap add up.
  IoActivity* activity = nullptr;
};

class DirectFile {
 public:
  /// One request; a transfer's requests are in flight together. What a request costs the processor
  /// hardly grows with its size, and a drive that takes less at once gets it cut by the kernel.
  static constexpr std::uint32_t kBlockBytes = 4 << 20;
  static constexpr int kRetriesMax = 16;

  static std::unique_ptr<DirectFile> open(Reactor& reactor, IoEngine& engine,
                                          const std::string& path, const OpenOptions& options,
                                          IoObservers observers = {});
  ~DirectFile();  ///< nothing may be in flight
  DirectFile(const DirectFile&) = delete;

  /// Fills `memory` from `offset_bytes`. Errors: the first failed block, after all blocks have come
  /// back (the kernel owns the memory until then): kDataLoss for end of file before the memory was
  /// full, otherwise errno's code. EAGAIN and EINTR are retried at most kRetriesMax times a block.
  /// Offset, length and address must be multiples of alignment() if the file was opened for direct
  /// transfers: kInvalidArgument.
  Task<> read(std::uint64_t offset_bytes, std::span<std::byte> memory,
              IoPriority priority = IoPriority::kDemand);
  Task<> write(std::uint64_t offset_bytes, std::span<const std::byte> memory,
               IoPriority priority = IoPriority::kDemand);
  /// fdatasync. A failed one is never retried as if the data were still dirty.
  Task<> sync();
  /// IoEngine::drop_cache().
  void drop_cache() { engine_.drop_cache(file_); }

  /// IoEngine::raise() for transfers that wait.
  void raise(std::span<const std::byte> memory, IoPriority priority) {
    engine_.raise(memory, priority);
  }

  const std::string& path() const noexcept { return path_; }
  FileHandle handle() const noexcept { return file_; }
  /// After the file was renamed.
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
  std::unique_ptr<IoActivity> own_activity_;  // where observers_ brought none
  FileHandle file_;
  bool direct_ = true;
  DirectAlignment alignment_;
  std::size_t transfers_ = 0;  // under way
};

}  // namespace ziggurat
