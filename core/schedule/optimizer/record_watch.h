// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/record_watch.h: who copies the records of a generation while the next
// ones are made. A sweep tells it of each record that it makes, and asks before one is gone for
// good. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/runtime/async.h"
#include "tiers/state_store.h"

namespace ziggurat {

class RecordWatch {
 public:
  virtual ~RecordWatch() = default;
  /// The chunk's record of `generation` is made, and is `record` until the Task ends.
  virtual Task<> made(ChunkId chunk, std::uint64_t generation,
                      std::span<const std::byte> record) = 0;
  /// The sweep that makes `generation` changes the record where it stays in memory.
  virtual Task<> before_change(ChunkId chunk, std::uint64_t generation) = 0;
  /// It writes the record as the store's generation `stored`, over one that may be wanted.
  virtual Task<> before_write(ChunkId chunk, std::uint64_t generation, std::uint64_t stored) = 0;
};

}  // namespace ziggurat
