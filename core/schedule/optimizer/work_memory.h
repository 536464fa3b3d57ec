// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/work_memory.h: the host memory in which a chunk is worked on: its record,
// its parameters and its gradient, each where it is not worked on where it lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/schedule/homes.h"
#include "core/schedule/optimizer/record_home.h"

namespace ziggurat {

/// The homes of a chunk's state.
struct StateHomes {
  ParamHome& params;
  GradHome& grads;
  RecordHome& records;
};

struct WorkMemory {
  std::span<std::byte> record{};  ///< also where it stays, if the CPU reaches it there
  std::span<std::byte> param{};   ///< for ParamHome::destination
  std::span<std::byte> grad{};    ///< for GradHome::fetch

  /// Bytes of lease that a chunk's work takes: record first, then parameters, then gradient. 0 if
  /// it needs none, or has its own.
  static std::uint64_t lease_bytes(const StateHomes& homes, const ChunkTable& table, ChunkId id) {
    if (homes.records.has_own_item(id)) return 0;
    const Chunk& chunk = table.chunk(id);
    return homes.records.item_bytes(id) + homes.params.item_bytes(chunk) +
           homes.grads.item_bytes(chunk);
  }

  /// The parts of `lease`, or of the chunk's own item.
  static WorkMemory of(const StateHomes& homes, const ChunkTable& table, ChunkId id,
                       std::span<std::byte> lease) {
    const Chunk& chunk = table.chunk(id);
    const bool own = homes.records.has_own_item(id);
    if (own) lease = homes.records.memory(id);
    const std::uint64_t record_bytes = own ? chunk.record_bytes() : homes.records.item_bytes(id);
    const std::uint64_t param_bytes = homes.params.item_bytes(chunk);
    return {.record = record_bytes > 0 ? lease.first(record_bytes) : homes.records.memory(id),
            .param = lease.subspan(record_bytes, param_bytes),
            .grad = lease.subspan(record_bytes + param_bytes, homes.grads.item_bytes(chunk))};
  }
};

}  // namespace ziggurat
