// SPDX-License-Identifier: Apache-2.0
// core/plan/host_plan.h: how the host budget is divided, decided before anything is allocated.
//
//   budget = what stays (parameters, optimizer state placed on host; among ranks, buckets)
//          + all gradients (if placed on host): with clipping, none can go before the last
//          has come
//          + reserves: one largest item of each class that waits on the pool
//          + 11 more of the optimizer's work items, shared by every class; a chunk is the largest
//          that leaves them room
//          + records that are kept from sweep to sweep (core/schedule/optimizer/record_home.h)
//          + where checkpoints are saved while training goes on, the buffers of such a save
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"
#include "core/sharding/reduction.h"
#include "tiers/pinned_pool.h"

namespace ziggurat {

/// Tiles in a chunk at most: 6 MiB of fp32 AdamW's record.
inline constexpr std::uint64_t kChunkTilesMax = 32;
/// Work items of the optimizer's sweep that keep a drive and the cores busy; a chunk is the largest
/// that leaves them room.
inline constexpr std::uint64_t kWorkItemsWanted = 12;

/// Buffers of the largest record that a save in the background has (core/engine/background_save.h).
/// They are set aside for as long as the engine lives, beside the pool.
inline constexpr std::uint64_t kSaveRecords = 4;

/// What a rank may have of host memory, and whether it saves checkpoints in the background.
struct HostBudget {
  HostBudget(std::uint64_t budget_bytes, bool with_saves = false)
      : size_bytes(budget_bytes), saves(with_saves) {}

  std::uint64_t size_bytes;
  bool saves;
};

struct HostPlan {
  std::uint64_t permanent_bytes = 0;  ///< parameters and optimizer state on host, buckets
  std::uint64_t norm_bytes = 0;       ///< of those, sums of squares and their way between ranks
  std::uint64_t bucket_bytes = 0;     ///< gradients between ranks
  std::uint64_t quantized_bytes = 0;  ///< quantized parameters between them
  std::uint64_t staged_bytes = 0;     ///< parameters gathered on their way to a GPU
  std::uint64_t gradient_bytes = 0;   ///< all gradients, if on host
  std::uint64_t save_bytes = 0;       ///< for saves in the background: all else is the pool's
  std::uint64_t item_bytes = 0;       ///< the optimizer's largest work item; 0: it takes none
  std::size_t device_chunks = 0;      ///< the first ones, whose records are on the device
  std::uint64_t items = 0;            ///< work items that fit beside all that is above and kept
  std::vector<std::uint64_t> kept_item_bytes;  ///< of the next chunks, whose records are kept; 0
                                               ///< for the first ones
  std::uint64_t kept_bytes = 0;                ///< of host memory, for these
  std::vector<PinnedPoolOptions::Reserve> reserves;

  /// Smallest budget with this chunk size.
  std::uint64_t smallest_bytes() const;
  /// And the smallest that leaves the sweep all the work items it can use.
  std::uint64_t comfortable_bytes() const;
  /// Leases of `chunk_count` chunks' sweep and of loads from NVMe, at the most.
  std::uint64_t work_bytes(std::uint64_t chunk_count) const;
  /// Work items that `budget_bytes` would hold if no record was kept.
  std::uint64_t items_unless_kept(std::uint64_t budget_bytes) const;
};

/// What a new store's chunks are cut from, and where everything is.
struct HostRequest {
  const ModelSpec& model;
  const StateKind& state;
  const Sharding& sharding;
  const Placement& placement;
  const ReductionSettings& reduction;
  bool saves = false;  ///< checkpoints, in the background
};

/// The division of `budget` for an existing chunk table. With `reduction.staged` the CPU
/// works on host memory in place of what is on the device.
HostPlan plan_host(const ChunkTable& table, const Placement& placement,
                   const ReductionSettings& reduction, const HostBudget& budget);

/// Chunk size for a new store: the largest (up to 32 tiles, 6 MiB of fp32 AdamW's record) that
/// leaves 12 work items. Errors: MemoryExhausted, with the smallest budget and what it is made of,
/// if not even one-tile chunks fit.
std::uint64_t choose_chunk_tiles(const HostRequest& request, std::uint64_t budget_bytes);

/// The division of the smallest budget that works, of the chunks that make it so: of one tile,
/// unless whole records stay on the host and rounding makes small ones larger together.
HostPlan smallest_host_plan(const HostRequest& request);

/// Errors: MemoryExhausted, with the smallest budget and what it is made of.
void require_host_budget(const HostPlan& plan, std::uint64_t budget_bytes);

}  // namespace ziggurat
