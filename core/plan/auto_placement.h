// SPDX-License-Identifier: Apache-2.0
// core/plan/auto_placement.h: `placement=auto`: which tier each class of state lives on, chosen
// from the budgets. Pure functions; any thread.
#pragma once

#include <string>

#include "core/plan/run_plan.h"

namespace ziggurat {

struct PlacementChoice {
  Placement placement;
  std::string why;  ///< one line: what is where, and what decided it
};

/// The highest tiers that the request's budgets hold. Parameters first, which a step moves to the
/// device twice, then gradients; then as many optimizer records on the device as it holds beside
/// what makes it comfortable. Of the other records host memory keeps those that it has room for,
/// and the rest are read in each step. All records are on NVMe in any case, so that every step
/// stays durable. `request.placement` is not looked at, and both budgets are given.
///
/// Measured bandwidths do not enter. What the drive reads in a step are the records that neither
/// memory holds, and those are as many whichever class takes which memory: parameters on the device
/// leave host memory to records. What is left to choose is what crosses the link, and an element's
/// parameters cross it twice a step where they live in host memory, a record that is updated on the
/// device once, to be written.
/// Errors: MemoryExhausted, if not even everything on NVMe fits.
PlacementChoice choose_placement(RunRequest request);

}  // namespace ziggurat
