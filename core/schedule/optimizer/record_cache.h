// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/record_cache.h: records of NVMe-placed state that host memory keeps from
// one sweep to the next, so that they are written each step but not read.
//
// Every sweep passes all records once, so what was used longest ago is needed next: keeping the
// newest ones (LRU) would never hit, and any fixed set of k of n records saves k/n of the reads,
// which is the most there is. The first k are kept: a sweep in forward order needs them first,
// right after the norm, while the next forward waits for their units; a backward that speculates
// ends with them, and no compute is left to hide a read behind.
//
// A kept record is not verified again. Its hash was taken when it was made, in this memory, and
// what stays in memory is trusted here as it is for host-placed state. Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/schedule/context.h"

namespace ziggurat {

class RecordCache {
 public:
  /// Takes `item_bytes[i]` of host memory for chunk i, for good: a work item's worth each, so that
  /// a kept chunk never waits for memory; 0 for one that is constant, which no sweep reads. Errors:
  /// kResourceExhausted.
  RecordCache(Context& context, std::span<const std::uint64_t> item_bytes);

  /// Chunks [0, kept_chunks()) are kept, but for constant ones.
  std::size_t kept_chunks() const noexcept { return items_.size(); }
  bool keeps(ChunkId chunk) const noexcept {
    return chunk < items_.size() && static_cast<bool>(items_[chunk].lease);
  }
  /// The chunk's work item; its record comes first.
  std::span<std::byte> item(ChunkId chunk) const noexcept { return items_[chunk].lease.bytes(); }

  /// The item holds the record of `generation`, whole and known to be right.
  bool holds(ChunkId chunk, std::uint64_t generation) const noexcept {
    return keeps(chunk) && items_[chunk].generation == generation;
  }
  void set_holds(ChunkId chunk, std::uint64_t generation) noexcept {
    items_[chunk].generation = generation;
  }
  /// The item's bytes are about to change.
  void forget(ChunkId chunk) noexcept { items_[chunk].generation = kNone; }

 private:
  static constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  struct Item {
    Lease lease;
    std::uint64_t generation = kNone;
  };
  std::vector<Item> items_;
};

}  // namespace ziggurat
