// SPDX-License-Identifier: Apache-2.0
// core/plan/auto_placement.h: chooses from the budgets on which tier each class of state lives
// (`placement=auto`). Pure functions; any thread.
#pragma once

#include <string>

#include "core/plan/run_plan.h"

namespace ziggurat {

struct PlacementChoice {
  Placement placement;
  std::string why;  ///< one line that says what is where, and which budget decided it
};

/// Chooses the highest tiers that fit the request's budgets. Parameters are placed first, because a
/// step moves them to the device twice; gradients come second. Then the device gets as many
/// optimizer records as fit beside what makes it comfortable, host memory keeps as many of the rest
/// as it has room for, and each step reads the remaining records from NVMe. All records are on NVMe
/// in any case, so that every step stays durable. `request.placement` is ignored, and both budgets
/// must be given.
///
/// Measured bandwidths do not matter for the choice. A step reads from the drive the records that
/// neither memory holds. Their number is the same whichever class takes which memory, because
/// parameters on the device leave host memory to records. Only the traffic over the link is left to
/// choose: the parameters of an element in host memory cross the link twice in a step, but a record
/// that is updated on the device crosses it once, when it is written.
///
/// Errors: MemoryExhausted if the budgets are too small even with everything on NVMe.
PlacementChoice choose_placement(RunRequest request);

}  // namespace ziggurat
