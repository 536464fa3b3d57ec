// SPDX-License-Identifier: Apache-2.0
// core/plan/device_plan.h: divides the device budget before anything is allocated.
//
//    budget = the trainer's memory (activations, workspace)
//           + state placed on the device: parameters, records, gradients (all of them, because with
//             clipping none is used before the last has arrived)
//           + staging for records that the device updates while their gradients or parameters live
//             elsewhere
//           + one fp32 accumulator of the largest unit's size that is set aside, or two if they fit
//           + accumulators of units that do not use these (GradientFlow), as many as are in use at
//             once
//           + parameters in use, unless all parameters live on the device: at least those that the
//             trainer uses at once, at most all
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"

namespace ziggurat {

/// The trainer's own use of the device, and the units that it uses at once.
struct TrainerNeed {
  std::uint64_t device_bytes = 0;
  /// Units whose parameters stay acquired, or whose gradients stay open, while other units are in
  /// use (for example an embedding that is also the head's matrix). Apart from these the trainer
  /// uses one unit at a time.
  std::vector<UnitId> held{};
};

struct DeviceRequest {
  TrainerNeed trainer{};
  /// In stage 3: every unit stays on the device from forward to backward (strategy grad-op).
  bool keep_gathered = false;
  /// The CPU cannot touch the device's memory (Device::host_accessible).
  bool out_of_reach = false;
};

/// Returns how many records the device holds under `placement`: always the first ones of the table.
std::size_t device_chunks(const ChunkTable& table, const Placement& placement);
/// Returns how many bytes of the device the first `count` records take.
std::uint64_t device_record_bytes(const ChunkTable& table, std::size_t count);

struct DevicePlan {
  std::uint64_t trainer_bytes = 0;
  std::uint64_t home_bytes = 0;               ///< parameters placed on the device
  std::uint64_t record_bytes = 0;             ///< optimizer state placed on the device
  std::uint64_t gradient_bytes = 0;           ///< gradients placed on the device
  std::uint64_t staging_bytes = 0;            ///< for records that the device updates
  std::uint64_t accumulator_bytes = 0;        ///< the size of one accumulator that is set aside
  std::size_t accumulators = 1;               ///< how many are set aside
  std::uint64_t other_accumulator_bytes = 0;  ///< accumulators beyond those
  std::size_t own_accumulators = 1;  ///< of these, how many of small units are there at once
  std::uint64_t in_use_bytes = 0;    ///< parameters that the trainer uses at once
  /// Parameters at the peak: those in use, kept and fetched ahead. In stage 3 this is the size of
  /// the region that units are gathered into.
  std::uint64_t live_bytes = 0;
  bool keeps_all = false;  ///< all units have room at once, so that backward brings none again
  std::uint64_t slack_bytes = 0;  ///< lost between buffers that are freed in any order

  /// The smallest budget that works: with one accumulator set aside.
  std::uint64_t smallest_bytes = 0;
  /// Returns how many bytes are allocated at the peak.
  std::uint64_t peak_bytes() const noexcept {
    return trainer_bytes + home_bytes + record_bytes + gradient_bytes + staging_bytes +
           accumulators * accumulator_bytes + other_accumulator_bytes + live_bytes;
  }
  /// Lists what the smallest budget consists of: "activations 60.2 MiB, parameters in use 15.3 MiB,
  /// ...".
  std::string text() const;
};

/// Divides `budget_bytes`. A budget below smallest_bytes is planned as if it were smallest_bytes.
/// Errors: kInvalidArgument for a held unit that the model does not have.
DevicePlan plan_device(const ChunkTable& table, const Placement& placement,
                       const DeviceRequest& request, std::uint64_t budget_bytes);

/// Returns a budget with room for two accumulators and for the units that prefetch brings. A larger
/// budget helps little.
std::uint64_t comfortable_device_bytes(const ChunkTable& table, const Placement& placement,
                                       const DeviceRequest& request);

/// Throws MemoryExhausted if the budget is too small; the message says the smallest budget and
/// lists what it consists of.
void require_device_budget(const DevicePlan& plan, std::uint64_t budget_bytes);

}  // namespace ziggurat
