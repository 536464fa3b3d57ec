// SPDX-License-Identifier: Apache-2.0
// core/plan/host_leases.h: the host memory that a step takes in leases at its peak, beside what a
// rank holds for the whole run (host_plan.h).
//
// A lease may take memory that nobody else needs at that instant, not only its reserve. Two
// instants can be the worst:
//
//   in forward, beside the last step's update: work items, and parameters that come from NVMe
//   in backward: work items that are read ahead, gradients on their way to NVMe, and parameters
//                that come a second time, unless the device has kept all
//
// Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/plan/device_plan.h"
#include "core/plan/host_plan.h"
#include "core/plan/prefetch_depth.h"

namespace ziggurat {

/// What the leases of a step depend on.
struct LeasedStep {
  const ChunkTable& table;
  const Placement& placement;
  const ReductionSettings& reduction;
  const HostPlan& host;
  const DevicePlan& device;
  std::uint64_t budget_bytes = 0;  ///< of host memory
  std::size_t units_ahead = kUnitsAheadLeast;
};

/// Returns the most bytes that leases take at once.
std::uint64_t lease_peak_bytes(const LeasedStep& step);

}  // namespace ziggurat
