// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/record_home.h: where each chunk's optimizer record is between two sweeps:
// on the device, in host memory, or only in the store.
//
// A record that stays in memory is updated where it is. If the CPU cannot reach it, the device
// updates it. If optimizer state is placed on NVMe, a sweep reads the records that do not stay in
// memory from the store and writes them back, and a sweep that seals a generation writes all
// records. Otherwise all records stay in memory, and checkpoints write them.
//
// The records that stay are always the first ones. Every sweep uses all records once, in the same
// order, so the record that was used longest ago is needed next. Keeping the newest ones (LRU)
// would never hit. Any fixed set of k of n records saves k/n of the reads, which is the most that
// is possible. The first ones are best: a sweep in forward order needs them right after the norm,
// while the next forward waits for their units; and a backward that speculates ends with them, when
// no compute is left during which a read would cost no time.
//
// A record that stayed is not verified again: its hash was taken when it was made, in this memory.
// Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/schedule/context.h"

namespace ziggurat {

/// Which records stay in memory. Constant records never stay, because no sweep reads them.
struct RecordPlan {
  std::size_t device_chunks = 0;  ///< the first chunks, whose records stay on the device
  /// If sweeps go through the store: the size of each chunk's item in host memory; 0 if its record
  /// is on the device or constant. An item is as large as a work item, so that the chunk never
  /// waits for memory.
  std::span<const std::uint64_t> kept_item_bytes{};
};

class RecordHome {
 public:
  /// Takes the memory of all records that stay, for the whole run. Errors: kResourceExhausted.
  RecordHome(Context& context, const RecordPlan& plan);

  /// Whether sweeps read from and write to the store. If not, all records are in memory.
  bool through_store() const noexcept { return through_store_; }
  /// Whether the record stays in memory from one sweep to the next.
  bool stays(ChunkId chunk) const noexcept { return stays_.size() > chunk && stays_[chunk]; }
  /// Whether the device updates the record, because it stays where the CPU cannot reach it.
  bool updated_on_device(ChunkId chunk) const noexcept;
  /// Whether the record stays in a work item of its own, which has room for the chunk's parameters
  /// and gradient too.
  bool has_own_item(ChunkId chunk) const noexcept;

  /// Returns how much lease memory the CPU needs to read the record; 0 if it can read it where it
  /// stays.
  std::uint64_t item_bytes(ChunkId chunk) const noexcept;
  /// Returns the memory of a record that stays where the CPU can reach it. The record is at its
  /// beginning.
  std::span<std::byte> memory(ChunkId chunk) const noexcept;

  /// Returns the memory of a record that the device updates.
  DeviceSpan<std::byte> on_device(ChunkId chunk) const noexcept;
  /// Copy the record from the device, and to the device. The host memory must be the pool's.
  /// Errors: kUnavailable when the device is lost.
  Task<> fetch(ChunkId chunk, std::span<std::byte> record) const;
  Task<> bring_home(ChunkId chunk, std::span<const std::byte> record) const;

  /// Whether the record that stays is known to be the complete and correct record of `generation`.
  bool holds(ChunkId chunk, std::uint64_t generation) const noexcept {
    return stays(chunk) && generations_[chunk] == generation;
  }
  void set_holds(ChunkId chunk, std::uint64_t generation) noexcept {
    generations_[chunk] = generation;
  }
  /// Notes that the record's bytes are about to change, so that holds() becomes false.
  void forget(ChunkId chunk) noexcept { generations_[chunk] = kNone; }

  /// Return how many records stay on the device, and in host memory.
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
