// SPDX-License-Identifier: Apache-2.0
// core/plan/device_plan.h: how the device budget is divided, decided before anything is allocated.
//
//   budget = what the trainer takes (activations, workspace)
//          + state placed there: parameters, records, all gradients (with clipping none can go
//            before the last has come)
//          + staging of gradients and parameters that live elsewhere, for records that the device
//            updates
//          + one fp32 accumulator of the largest unit that is set aside, or two where they fit
//          + accumulators of units that no set-aside one serves (GradientFlow), as many as are out
//            at once
//          + parameters in use, where they are not at home there whole: at least those that the
//            trainer uses at once, at most all
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"

namespace ziggurat {

/// What a trainer takes of the device beside the engine, and which units it uses at once.
struct TrainerNeed {
  std::uint64_t device_bytes = 0;
  /// Units whose parameters stay acquired or whose gradients stay open while others are in use (an
  /// embedding that is the head's matrix too). Beside them the trainer uses one unit at a time.
  std::vector<UnitId> held{};
};

struct DeviceRequest {
  TrainerNeed trainer{};
  /// Stage 3: every unit stays from forward to backward (strategy grad-op).
  bool keep_gathered = false;
  /// The CPU cannot touch the device's memory (Device::host_accessible).
  bool out_of_reach = false;
};

/// Records that the device holds: the first ones of the table, as many as Placement says.
std::size_t device_chunks(const ChunkTable& table, const Placement& placement);
/// What the first `count` records take of the device.
std::uint64_t device_record_bytes(const ChunkTable& table, std::size_t count);

struct DevicePlan {
  std::uint64_t trainer_bytes = 0;
  std::uint64_t home_bytes = 0;               ///< parameters placed on the device
  std::uint64_t record_bytes = 0;             ///< optimizer state placed there
  std::uint64_t gradient_bytes = 0;           ///< gradients placed there
  std::uint64_t staging_bytes = 0;            ///< for updates that the device makes
  std::uint64_t accumulator_bytes = 0;        ///< one that is set aside
  std::size_t accumulators = 1;               ///< set aside
  std::uint64_t other_accumulator_bytes = 0;  ///< beside those
  std::uint64_t in_use_bytes = 0;             ///< parameters that the trainer uses at once
  /// Parameters in use, kept and fetched ahead, at the peak: in stage 3 the region that units are
  /// gathered into.
  std::uint64_t live_bytes = 0;
  std::uint64_t slack_bytes = 0;  ///< lost between buffers that come and go in any order

  /// With one accumulator set aside.
  std::uint64_t smallest_bytes = 0;
  /// What is allocated at the peak.
  std::uint64_t peak_bytes() const noexcept {
    return trainer_bytes + home_bytes + record_bytes + gradient_bytes + staging_bytes +
           accumulators * accumulator_bytes + other_accumulator_bytes + live_bytes;
  }
  /// "activations 60.2 MiB, parameters in use 15.3 MiB, ...": what the smallest budget is for.
  std::string text() const;
};

/// The division of `budget_bytes`. Below smallest_bytes nothing beyond that is planned. Errors:
/// kInvalidArgument for a held unit that the model does not have.
DevicePlan plan_device(const ChunkTable& table, const Placement& placement,
                       const DeviceRequest& request, std::uint64_t budget_bytes);

/// A budget with two accumulators and room for what prefetch brings: more helps little.
std::uint64_t comfortable_device_bytes(const ChunkTable& table, const Placement& placement,
                                       const DeviceRequest& request);

/// Errors: MemoryExhausted, with the smallest budget and what it is made of.
void require_device_budget(const DevicePlan& plan, std::uint64_t budget_bytes);

}  // namespace ziggurat
