// SPDX-License-Identifier: Apache-2.0
// aio/range_file.h: moves ranges of a file that begin and end anywhere, as tensors do in the file
// formats of other projects.
//
// The whole blocks of a range go directly between memory and drive. Its edges, less than a block
// each, go through the page cache, which joins the edges of neighbouring ranges. A block is moved
// both ways only if ranges overlap. So a checkpoint larger than memory does not drive everything
// else out of the page cache, and costs one copy less. Reactor's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "aio/aligned_bytes.h"
#include "aio/direct_file.h"

namespace ziggurat {

class RangeFile {
 public:
  /// The size of a page, so that no page is moved both directly and through the page cache.
  static constexpr std::uint64_t kBlockBytes = AlignedBytes::kAlignment;

  /// Opens the file; `options.direct` has no effect. Errors: as DirectFile::open().
  static std::unique_ptr<RangeFile> open(Reactor& reactor, IoEngine& engine,
                                         const std::string& path, OpenOptions options,
                                         IoObservers observers = {});

  /// Takes memory for a range from `offset_bytes` of the file.
  static AlignedBytes memory_for(std::uint64_t offset_bytes, std::uint64_t size_bytes,
                                 AlignedPool& pool) {
    return pool.take(size_bytes, offset_bytes % kBlockBytes);
  }

  /// Whether memory lies so that the blocks of its range go directly, as memory_for() makes it.
  static bool is_placed(std::uint64_t offset_bytes, std::span<const std::byte> memory) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return address % kBlockBytes == offset_bytes % kBlockBytes;
  }

  /// Fills `memory` from any range. If the memory is_placed(), the range's blocks go directly;
  /// otherwise the whole range goes through the page cache. Errors: as DirectFile's.
  Task<> read(std::uint64_t offset_bytes, std::span<std::byte> memory,
              IoPriority priority = IoPriority::kDemand);
  Task<> write(std::uint64_t offset_bytes, std::span<const std::byte> memory,
               IoPriority priority = IoPriority::kDemand);
  /// Syncs blocks and edges.
  Task<> sync() { return edges_->sync(); }

  const std::string& path() const noexcept { return edges_->path(); }
  std::uint64_t size_bytes() { return edges_->size_bytes(); }
  void allocate(std::uint64_t size_bytes) { edges_->allocate(size_bytes); }

 private:
  explicit RangeFile(Reactor& reactor) : reactor_(reactor) {}
  /// Moves the part of the range that begins at `offset_bytes` through `file`.
  using Move = Task<> (*)(DirectFile& file, std::uint64_t offset_bytes, std::span<std::byte> memory,
                          IoPriority priority);
  Task<> run(Move move, std::uint64_t offset_bytes, std::span<std::byte> memory,
             IoPriority priority);

  Reactor& reactor_;
  std::unique_ptr<DirectFile> edges_;   // through the page cache
  std::unique_ptr<DirectFile> blocks_;  // the same file, direct; null if it needs larger blocks
                                        // than ours
};

}  // namespace ziggurat
