// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/work_memory.h: the host memory in which a chunk is worked on: its record,
// its parameters and its gradient, except those that are worked on where they live.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/schedule/homes/grad_home.h"
#include "core/schedule/homes/param_home.h"
#include "core/schedule/optimizer/record_home.h"

namespace ziggurat {

/// The homes of a chunk's state.
struct StateHomes {
  ParamHome& params;
  GradHome& grads;
  RecordHome& records;
};

struct WorkMemory {
  std::span<std::byte> record{};  ///< also set if the record stays where the CPU can reach it
  std::span<std::byte> param{};   ///< for ParamHome::destination
  std::span<std::byte> grad{};    ///< for GradHome::fetch

  /// Returns the size of the lease that work on a chunk needs: the record, then the parameters,
  /// then the gradient. 0 if it needs none, or if the chunk has an item of its own.
  static std::uint64_t lease_bytes(const StateHomes& homes, const ChunkTable& table, ChunkId id) {
    if (homes.records.has_own_item(id)) return 0;
    const Chunk& chunk = table.chunk(id);
    return homes.records.item_bytes(id) + homes.params.item_bytes(chunk) +
           homes.grads.item_bytes(chunk);
  }

  /// Divides `lease`, or the chunk's own item, into its parts.
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
