// SPDX-License-Identifier: Apache-2.0
// core/plan/run_plan.h: predicts what one rank holds on each tier under its budgets, and the
// smallest budgets that work. Engine::open() gives the same answers, but here nothing has to run.
//
// The engine divides its budgets with the same functions (device_plan.h, host_plan.h), and its
// chunk table cuts the records in the same way. tests/core/plan_run_test.cc compares the sums with
// the engine's accounts. Pure functions; any thread.
#pragma once

#include <cstdint>

#include "core/plan/device_plan.h"
#include "core/plan/host_plan.h"
#include "core/plan/memory.h"
#include "core/sharding/reduction.h"

namespace ziggurat {

/// The store's room for a step's blob: the engine's header and 64 KiB for the trainer.
inline constexpr std::uint64_t kBlobRoomBytes = 64 + 64 * 1024;

/// Returns the bytes of a rank's file of the store, whose blobs have room for `blob_room_bytes`.
std::uint64_t store_bytes(const ChunkTable& table, int slots, std::uint64_t blob_room_bytes);

/// The budgets of one rank. 0 if not given: then as much is planned as a run can use well.
struct Budgets {
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
};

struct RunRequest {
  ModelSpec model;  ///< this rank's part of the model
  StateKind state{};
  Sharding sharding{};
  Placement placement{};
  ReductionSettings reduction{};
  DeviceRequest device{};
  int slots = 2;
  bool saves = false;  ///< saves checkpoints in the background
  Budgets budgets{};
  std::uint64_t chunk_tiles = 0;  ///< of an existing store; 0 to choose those that suit the budget
  std::uint64_t outstanding_bytes = 0;  ///< of its drives (StoreDirectory), as they were measured
};

struct RunPlan {
  Budgets budgets;   ///< as the request gives them, or as chosen
  Budgets smallest;  ///< the host's for a new store, the device's with this plan's chunks
  std::uint64_t chunk_tiles = 0;
  std::uint64_t chunk_count = 0;
  HostPlan host;
  DevicePlan device;
  std::uint64_t lease_bytes = 0;  ///< what leases of host memory take at their peak
  std::uint64_t table_bytes = 0;  ///< the bytes of the store's file that are not records
  std::uint64_t store_bytes = 0;  ///< the store's file

  /// Returns the most host memory that is in use at once.
  std::uint64_t host_peak_bytes() const;
};

/// Plans a run. Errors: MemoryExhausted for a budget that is too small, with the same words as
/// Engine::open().
RunPlan plan_run(const RunRequest& request);

/// Returns the smallest pair of budgets that works. The budgets of the request are ignored.
Budgets smallest_budgets(const RunRequest& request);

/// Adds to `memory` what `plan` holds only while a step runs, and the store's tables.
void add_in_use(RankMemory& memory, const RunPlan& plan);

}  // namespace ziggurat
