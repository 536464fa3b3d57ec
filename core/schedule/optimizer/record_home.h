// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/record_home.h: where each chunk's optimizer record is between two sweeps:
// on the device, in host memory, or in the store alone.
//
// A record that stays in memory is updated where it is: in the device's memory by the device, where
// the CPU cannot reach it. Where optimizer state is placed on NVMe a sweep reads records that do
// not stay from the store and writes them back, and a sweep that seals a generation writes all;
// otherwise all stay, and checkpoints write them.
//
// Those that stay are the first ones. Every sweep passes all records once, so what was used longest
// ago is needed next: staying with the newest ones (LRU) would never hit, and any fixed set of k of
// n records saves k/n of the reads, which is the most there is. A sweep in forward order needs the
// first ones first, right after the norm, while the next forward waits for their units; a backward
// that speculates ends with them, and no compute is left to hide a read behind.
//
// A record that stayed is not verified again. Its hash was taken when it was made, in this memory.
// Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/schedule/context.h"

namespace ziggurat {

/// Which records stay in memory; constant ones, which no sweep reads, never do.
struct RecordPlan {
  std::size_t device_chunks = 0;  ///< on the device: the first ones
  /// Where sweeps go through the store: host memory of the first chunks', 0 for one that is on the
  /// device or constant. A work item's worth each, so that the chunk never waits for memory.
  std::span<const std::uint64_t> kept_item_bytes{};
};

class RecordHome {
 public:
  /// Takes the memory of all that stay, for good. Errors: kResourceExhausted.
  RecordHome(Context& context, const RecordPlan& plan);

  /// Sweeps read and write the store. Else all records are in memory.
  bool through_store() const noexcept { return through_store_; }
  /// In memory from one sweep to the next.
  bool stays(ChunkId chunk) const noexcept { return stays_.size() > chunk && stays_[chunk]; }
  /// It stays where the CPU cannot reach it: the device updates it.
  bool updated_on_device(ChunkId chunk) const noexcept;
  /// It stays in a work item of its own: there is room for the chunk's parameters and gradient
  /// too.
  bool has_own_item(ChunkId chunk) const noexcept;

  /// Lease memory that the CPU needs to look at the record: 0 where it looks at it where it stays.
  std::uint64_t item_bytes(ChunkId chunk) const noexcept;
  /// The memory of one that stays within the CPU's reach; the record comes first.
  std::span<std::byte> memory(ChunkId chunk) const noexcept;

  /// One that the device updates.
  DeviceSpan<std::byte> on_device(ChunkId chunk) const noexcept;
  /// Its bytes from the device, and to it. Host memory is the pool's. Errors: kUnavailable when the
  /// device is lost.
  Task<> fetch(ChunkId chunk, std::span<std::byte> record) const;
  Task<> bring_home(ChunkId chunk, std::span<const std::byte> record) const;

  /// What stays is the record of `generation`, whole and known to be right.
  bool holds(ChunkId chunk, std::uint64_t generation) const noexcept {
    return stays(chunk) && generations_[chunk] == generation;
  }
  void set_holds(ChunkId chunk, std::uint64_t generation) noexcept {
    generations_[chunk] = generation;
  }
  /// Its bytes are about to change.
  void forget(ChunkId chunk) noexcept { generations_[chunk] = kNone; }

  /// Records that stay on the device, and in host memory.
  std::size_t device_count() const noexcept;
  std::size_t host_count() const noexcept;

 private:
  static constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

  Context& context_;
  bool through_store_;
  std::vector<bool> stays_;                 // per chunk
  std::vector<Lease> host_;                 // per chunk
  std::vector<DeviceBuffer> device_;        // per chunk
  std::vector<std::uint64_t> generations_;  // per chunk
};

}  // namespace ziggurat
