// SPDX-License-Identifier: Apache-2.0
// core/plan/run_plan.h: what one rank of a run holds on each tier under its budgets, and the
// smallest budgets that work: the answer of Engine::open(), before anything runs.
//
// The engine divides its budgets with the same functions (device_plan.h, host_plan.h), and its
// chunk table cuts the records; tests/core/plan_run_test.cc compares the sums with the engine's
// accounts. Pure functions; any thread.
#pragma once

#include <cstdint>

#include "core/plan/device_plan.h"
#include "core/plan/host_plan.h"
#include "core/plan/memory.h"
#include "core/sharding/reduction.h"

namespace ziggurat {

/// Room that a store has for a step's blob: the engine's header, and the trainer's 64 KiB.
inline constexpr std::uint64_t kBlobRoomBytes = 64 + 64 * 1024;

/// For one rank. 0: not given; then as much is planned as a run uses well.
struct Budgets {
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
};

struct RunRequest {
  ModelSpec model;  ///< the part of it that this rank has
  StateKind state{};
  Sharding sharding{};
  Placement placement{};
  ReductionSettings reduction{};
  DeviceRequest device{};
  int slots = 2;
  bool saves = false;  ///< checkpoints, in the background
  Budgets budgets{};
  std::uint64_t chunk_tiles = 0;  ///< of a store that is there; 0: those that suit the budget
};

struct RunPlan {
  Budgets budgets;   ///< as asked for, or as chosen
  Budgets smallest;  ///< of a new store; the device's with the chunks of this plan
  std::uint64_t chunk_tiles = 0;
  std::uint64_t chunk_count = 0;
  HostPlan host;
  DevicePlan device;
  std::uint64_t table_bytes = 0;  ///< of the store's file, what is not records
};

/// Errors: MemoryExhausted in the words of Engine::open(), for a budget that is too small.
RunPlan plan_run(const RunRequest& request);

/// The smallest budgets, whatever the request's are, that work together.
Budgets smallest_budgets(const RunRequest& request);

/// Adds what `plan` holds only while a step runs, and the store's tables, to what is held at rest.
void add_in_use(RankMemory& memory, const RunPlan& plan);

}  // namespace ziggurat
