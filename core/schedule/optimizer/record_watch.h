// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/record_watch.h: an interface for a copier of records, which copies the
// records of one generation while the next ones are made. A sweep tells it of each record that it
// makes, and asks it before it overwrites a record. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/runtime/async.h"
#include "tiers/store/state_store.h"

namespace ziggurat {

class RecordWatch {
 public:
  virtual ~RecordWatch() = default;
  /// Whether a copy is under way, so that it is told of changes.
  virtual bool watching() const noexcept = 0;
  /// Called when the chunk's record of `generation` is made. `record` stays valid until the Task
  /// ends.
  virtual Task<> made(ChunkId chunk, std::uint64_t generation,
                      std::span<const std::byte> record) = 0;
  /// Called before the sweep that makes `generation` changes the record where it stays in memory.
  virtual Task<> before_change(ChunkId chunk, std::uint64_t generation) = 0;
  /// Called before the sweep writes the record as the store's generation `stored`, because it may
  /// overwrite a record that is still needed.
  virtual Task<> before_write(ChunkId chunk, std::uint64_t generation, std::uint64_t stored) = 0;
};

}  // namespace ziggurat
