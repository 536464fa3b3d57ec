// SPDX-License-Identifier: Apache-2.0
// core/plan/host_plan.h: divides the host budget before anything is allocated.
//
//    budget = memory that is used all the time (parameters and optimizer state placed on host; with
//             several ranks, buckets)
//           + all gradients, if they are placed on host, because with clipping none is used before
//             the last has arrived
//           + reserves: one largest item of each class that waits on the pool
//           + 11 more of the optimizer's work items, shared by all classes; a chunk is the largest
//             that leaves room for them
//           + records that are kept from sweep to sweep (core/schedule/optimizer/record_home.h)
//           + buffers for a save, if checkpoints are saved while training goes on
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"
#include "core/sharding/reduction.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat {

/// The largest chunk, in tiles: its record takes 6 MiB with fp32 AdamW.
inline constexpr std::uint64_t kChunkTilesMax = 32;
/// The number of work items with which the optimizer's sweep keeps a drive and the cores busy. A
/// chunk is the largest that leaves room for them.
inline constexpr std::uint64_t kWorkItemsWanted = 12;

/// The number of buffers that a save in the background has, each as large as the largest record
/// (core/engine/state/background_save.h). They are set aside for as long as the engine lives,
/// beside the pool.
inline constexpr std::uint64_t kSaveRecords = 4;

/// The host memory that a rank may use, and whether it saves checkpoints in the background.
struct HostBudget {
  HostBudget(std::uint64_t budget_bytes, bool with_saves = false)
      : size_bytes(budget_bytes), saves(with_saves) {}

  std::uint64_t size_bytes;
  bool saves;
};

struct HostPlan {
  /// Parameters and optimizer state on host, and the four kinds of buffers below.
  std::uint64_t permanent_bytes = 0;
  /// In permanent_bytes: sums of squares, and copies of them for the exchange between ranks.
  std::uint64_t norm_bytes = 0;
  std::uint64_t bucket_bytes = 0;  ///< in permanent_bytes: gradients on their way between ranks
  /// In permanent_bytes: quantized parameters on their way between ranks.
  std::uint64_t quantized_bytes = 0;
  /// In permanent_bytes: parameters gathered on their way to a GPU.
  std::uint64_t staged_bytes = 0;
  std::uint64_t gradient_bytes = 0;  ///< all gradients, if they are placed on host
  std::uint64_t save_bytes = 0;      ///< for saves in the background; the pool has all the rest
  std::uint64_t item_bytes = 0;      ///< the optimizer's largest work item; 0 if it takes none
  std::uint64_t items_wanted = kWorkItemsWanted;  ///< with which a sweep has no need of more
  std::size_t device_chunks = 0;  ///< the first chunks, whose records are on the device
  std::uint64_t items = 0;  ///< work items that fit beside all the state above and the kept records
  /// Sizes of the records that are kept in host memory, by chunk; 0 for the first device_chunks.
  std::vector<std::uint64_t> kept_item_bytes;
  std::uint64_t kept_bytes = 0;   ///< host memory for the kept records
  std::uint64_t swept_bytes = 0;  ///< what all other work items would take at once
  std::vector<PinnedPoolOptions::Reserve> reserves;

  /// Returns the smallest budget that works with this chunk size.
  std::uint64_t smallest_bytes() const;
  /// Returns the smallest budget that also leaves the sweep all the work items it can use.
  std::uint64_t comfortable_bytes() const;
  /// Returns the largest item for which `purpose` has a reserve; 0 if it has none.
  std::uint64_t reserve_bytes(Purpose purpose) const;
  /// Returns how many work items `budget_bytes` would hold if no record was kept.
  std::uint64_t items_unless_kept(std::uint64_t budget_bytes) const;
};

/// The model, how it is divided, and where its state is placed: all that a new store's chunk size
/// depends on.
struct HostRequest {
  const ModelSpec& model;
  const StateKind& state;
  const Sharding& sharding;
  const Placement& placement;
  const ReductionSettings& reduction;
  bool saves = false;  ///< saves checkpoints in the background
};

/// Returns how many bytes of the pool a lease of `size_bytes` takes.
std::uint64_t lease_bytes(std::uint64_t size_bytes);

/// Whether a unit's parameters stay where the CPU reaches them: in memory that a trainer lends, or
/// at their home.
bool params_in_memory(const ChunkTable& table, UnitId unit, const Placement& placement,
                      bool device_out_of_reach);

/// Divides `budget` for an existing chunk table. If `reduction.staged` is set, the CPU cannot reach
/// device memory and works on copies in host memory.
HostPlan plan_host(const ChunkTable& table, const Placement& placement,
                   const ReductionSettings& reduction, const HostBudget& budget);

/// Chooses the chunk size of a new store: the largest (at most 32 tiles, 6 MiB of fp32 AdamW's
/// record) that leaves room for 12 work items. Errors: MemoryExhausted if not even one-tile chunks
/// fit; the message says the smallest budget and lists what it consists of.
std::uint64_t choose_chunk_tiles(const HostRequest& request, std::uint64_t budget_bytes);

/// Divides the smallest budget that works, with the chunk size that makes it smallest. That is one
/// tile, unless whole records stay on the host: then rounding can make small chunks take more
/// memory together than larger ones.
HostPlan smallest_host_plan(const HostRequest& request);

/// Throws MemoryExhausted if the budget is too small; the message says the smallest budget and
/// lists what it consists of.
void require_host_budget(const HostPlan& plan, std::uint64_t budget_bytes);

}  // namespace ziggurat
