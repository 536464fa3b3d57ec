// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_saver.h: writes a rank's records to a sink, tensor by tensor, bit for bit.
#pragma once

#include <cstdint>
#include <span>

#include "aio/aligned_bytes.h"
#include "base/runtime/worker_pool.h"
#include "core/checkpoint/chunk_runs.h"
#include "core/checkpoint/state_source.h"

namespace ziggurat {

class StateSaver {
 public:
  /// Makes a saver of chunks. All references must outlive it.
  StateSaver(Reactor& reactor, Workers& workers, const ChunkTable& table, StateSink& sink)
      : reactor_(reactor), workers_(workers), table_(table), sink_(sink), runs_(table) {}

  /// Writes a chunk to the sink. `record` is the chunk's record, and must not change until the Task
  /// ends. Errors: those of the sink.
  Task<> save(ChunkId chunk, std::span<const std::byte> record);

 private:
  /// Most arrays that are saved at once. A chunk has several for each parameter: as many as its
  /// optimizer has.
  static constexpr std::size_t kArraysAtOnce = 4;
  Task<> save_array(const ChunkRuns::OfTensor& of, ChunkRecord record);

  Reactor& reactor_;
  Workers& workers_;
  const ChunkTable& table_;
  StateSink& sink_;
  ChunkRuns runs_;
  AlignedPool memory_;
};

}  // namespace ziggurat
