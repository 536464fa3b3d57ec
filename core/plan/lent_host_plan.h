// SPDX-License-Identifier: Apache-2.0
// core/plan/lent_host_plan.h: how a LentEngine that makes a new store will divide its host memory.
// It asks the functions that the engine asks when it opens (host_plan.h), but nothing has to run.
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "core/plan/host_plan.h"
#include "core/plan/run_plan.h"
#include "core/sharding/model_spec.h"
#include "core/sharding/placement.h"
#include "core/sharding/reduction.h"
#include "optimizer/state_kind.h"

namespace ziggurat {

struct LentHostRequest {
  ModelSpec model;  ///< a unit for each parameter, as LentEngine::open() is given it
  StateKind state{};
  Placement placement{};
  ReductionSettings reduction{};        ///< what is on its way to a GPU
  std::uint64_t host_budget_bytes = 0;  ///< 0: as much as the engine takes by itself
  int slots = 2;
  std::uint64_t blob_room_bytes = kBlobRoomBytes;  ///< of the store
};

struct LentHostPlan {
  /// The least budget that works with records of such a size. They are the smaller the smaller the
  /// budget is, so under the least of all budgets this is that.
  std::uint64_t smallest_bytes = 0;
  std::uint64_t budget_bytes = 0;  ///< as the request gives it, or what the engine takes
  std::uint64_t all_bytes = 0;     ///< the budget with which all records stay in host memory
  std::uint64_t records = 0;
  /// The largest work item, how many there is room for at a time, and what a step reads of the
  /// records that do not stay. All 0 for a budget that is too small, and so is what follows.
  std::uint64_t item_bytes = 0;
  std::uint64_t items = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t store_bytes = 0;        ///< the store's file, with all that is not records
  std::uint64_t params_file_bytes = 0;  ///< of streamed parameters, if they are on NVMe
  std::uint64_t sums_file_bytes = 0;    ///< of sums of gradients, if they are on NVMe
};

/// Plans the host memory of a new engine. A budget that is too small is no error: the plan says the
/// least that works.
LentHostPlan plan_lent_host(const LentHostRequest& request);

}  // namespace ziggurat
