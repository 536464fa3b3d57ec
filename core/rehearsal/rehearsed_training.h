// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsed_training.h: a training on a machine that is planned for
// (core/plan/machines, core/plan/strategies) as a rehearsal: the machine's figures become the
// speeds of its twins, and a layer's time that of a unit. Pure functions; any thread.
//
// Compute and kernels take the times that plans predict. What a plan does not know is assumed here,
// once: latencies, and how many workers share the host's memory.
#pragma once

#include <vector>

#include "core/plan/machines/machine.h"
#include "core/plan/strategies/training.h"
#include "core/rehearsal/rehearsal.h"

namespace ziggurat {

// Assumed. Latencies as usual: of an NVMe drive that is busy, a copy over PCIe, a message between
// processes, and a job that is handed to a worker.
inline constexpr Nanoseconds kDriveLatency{100'000};
inline constexpr Nanoseconds kCopyLatency{10'000};
inline constexpr Nanoseconds kMessageLatency{5'000};
inline constexpr Nanoseconds kJobLatency{5'000};
inline constexpr int kWorkersOfARank = 8;

/// The part of a machine that one rank has.
struct RankOfMachine {
  int ranks = 1;      ///< of all nodes, each with a GPU
  int threads = 0;    ///< workers of a rank; 0 for the machine's, or kWorkersOfARank
  bool nccl = false;  ///< ranks exchange over the links between GPUs, in rings; else through host
                      ///< memory and sockets, each with each
  std::uint64_t device_bytes = 0;
};

/// Errors: kInvalidArgument for a machine without drives, or for more ranks than GPUs on a machine
/// without a network.
RehearsedMachine rehearsed_machine(const Machine& machine, const RankOfMachine& rank);

/// Returns the costs of the units of model_units(), with the micro-batches of a unit one after the
/// other.
std::vector<UnitCost> unit_costs(const Training& training, const Machine& machine);

/// Returns the device memory that the trainer takes for activations at the worst instant, where all
/// micro-batches of a unit are computed before the next unit.
std::uint64_t trainer_bytes(const Training& training);

/// Returns the units that a trainer of `model` holds: the embedding, if the head is tied to it.
std::vector<UnitId> held_units(const ModelShape& model);

}  // namespace ziggurat
