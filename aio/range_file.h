// SPDX-License-Identifier: Apache-2.0
// aio/range_file.h: a file moved in ranges that begin and end anywhere, as tensors lie in files of
// others' formats.
//
// Whole blocks of a range go directly between memory and drive; its edges, less than a block each,
// through the page cache, which joins those of neighbours. No block is moved both ways at a time
// unless ranges overlap. So a checkpoint larger than memory does not drive everything else out of
// the page cache, and costs one copy less. Reactor's thread.
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
  /// A page, so that no page is moved both ways.
  static constexpr std::uint64_t kBlockBytes = AlignedBytes::kAlignment;

  /// `options.direct` has no effect. Errors: as DirectFile::open().
  static std::unique_ptr<RangeFile> open(Reactor& reactor, IoEngine& engine,
                                         const std::string& path, OpenOptions options,
                                         IoObservers observers = {});

  /// Memory for a range from `offset_bytes` of the file.
  static AlignedBytes memory_for(std::uint64_t offset_bytes, std::uint64_t size_bytes,
                                 AlignedPool& pool) {
    return pool.take(size_bytes, offset_bytes % kBlockBytes);
  }

  /// The range may be any; memory from memory_for() makes its blocks go directly, any other goes
  /// through the page cache as a whole. Errors: as DirectFile's.
  Task<> read(std::uint64_t offset_bytes, std::span<std::byte> memory,
              IoPriority priority = IoPriority::kDemand);
  Task<> write(std::uint64_t offset_bytes, std::span<const std::byte> memory,
               IoPriority priority = IoPriority::kDemand);
  /// Blocks and edges.
  Task<> sync() { return edges_->sync(); }

  const std::string& path() const noexcept { return edges_->path(); }
  std::uint64_t size_bytes() { return edges_->size_bytes(); }
  void allocate(std::uint64_t size_bytes) { edges_->allocate(size_bytes); }

 private:
  explicit RangeFile(Reactor& reactor) : reactor_(reactor) {}
  /// Moves [begin, end) of the range with `file`.
  using Move = Task<> (*)(DirectFile& file, std::uint64_t offset_bytes, std::span<std::byte> memory,
                          IoPriority priority);
  Task<> run(Move move, std::uint64_t offset_bytes, std::span<std::byte> memory,
             IoPriority priority);

  Reactor& reactor_;
  std::unique_ptr<DirectFile> edges_;   // through the page cache
  std::unique_ptr<DirectFile> blocks_;  // the same file; null: its blocks are larger than ours
};

}  // namespace ziggurat
