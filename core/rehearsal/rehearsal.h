// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsal.h: plays a training run in virtual time: the engine that ships, with a
// trainer's script, on a machine of which only speeds and sizes are given.
//
// The engine's own code makes every decision: what is prefetched, who waits for whom, what is where
// at its peak. Its workers, device, drives, memory and other ranks are twins, in which bytes take
// time and do not exist. What decides something exists and is exchanged for real: the store's own
// pages, the ranks' agreements, the sums of squares. Three results are told, because their bytes do
// not exist: records and items that are read are undamaged, and all gradients are zero, so that no
// step is clipped or overflows.
//
// Not played: a GPU's allocator and kernels, of which the script gives the time; and the memory
// bandwidth that copies and drives take from the workers. Everything runs on the thread that calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aio/io_engine.h"
#include "base/runtime/costed_workers.h"
#include "base/runtime/metrics.h"
#include "collectives/communicator.h"
#include "collectives/simulated/simulated_network.h"
#include "core/engine/engine_config.h"
#include "core/sharding/model_spec.h"
#include "tiers/device/costed_device.h"
#include "tiers/pool/account.h"

namespace ziggurat {

/// A drive. The ranks of a node share the drives behind its directories.
struct RehearsedDrive {
  /// Room on all drives of a node together; 0 for no limit.
  std::uint64_t node_bytes = 0;
  double read_bytes_per_second = 3e9;
  double write_bytes_per_second = 3e9;
  Nanoseconds latency{0};
  std::uint32_t queue_depth = 32;
  /// Each transfer's latency is drawn from [1, 1 + jitter] times `latency`, by `seed`.
  double jitter = 0;
  std::uint64_t seed = 1;
};

/// The speeds and sizes of one rank's part of a machine, and of the network.
struct RehearsedMachine {
  CostedWorkersOptions workers;
  CostedDeviceOptions device;
  /// The workers' cores compute for the trainer too, between the engine's jobs, as in a trainer on
  /// the CPU. The device is then accessible to the host. Without it compute takes its time beside
  /// the jobs.
  bool workers_compute = false;
  RehearsedDrive drive;  ///< behind each directory of EngineConfig::store
  NetworkShape network;  ///< with the number of ranks
};

/// How long a trainer computes with a unit.
struct UnitCost {
  double forward_s = 0;
  double backward_s = 0;
  /// Between the two, with a unit that the trainer holds (EngineConfig::trainer_held_units): a head
  /// whose matrix is the embedding. It is acquired for this once more, and its gradient is open
  /// from here to the end of backward, which needs no parameters of it.
  double between_s = 0;
};

struct RehearsalRequest {
  ModelSpec model;
  /// As a run would have it. Its directories are only names: nothing is made there.
  EngineConfig config;
  RehearsedMachine machine;
  std::vector<UnitCost> costs;  ///< one for each unit
  int steps = 1;
  int micro_batches = 1;  ///< each runs through the whole model
  /// Plays rank 0 alone. The other ranks of the network do the same at the same time, which is for
  /// the caller to know: their slices are as large, and their nodes as full. What they send is
  /// counted by closed forms (collectives/simulated/mirrored_communicator.h), and rank 0 has its
  /// share of the drives that a node's ranks use together.
  bool mirrored = false;
  /// Shuffles what ends and what is ready at one instant (Clock::shuffle_ties,
  /// Reactor::shuffle_ready), for tests; 0 for the order of calls.
  std::uint64_t order_seed = 0;
  /// For tests: return what a rank's engine gets in place of the twin of a drive, and of the other
  /// ranks. May be empty.
  std::function<std::unique_ptr<IoEngine>(int rank, std::unique_ptr<IoEngine>)> around_drive{};
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> around_ranks{};
  /// Where the trace of rank 0 is written, in virtual time; empty for none.
  std::string trace_path;
  /// Called when rank 0 has computed with another unit: `done` of `of` in all steps. May be empty.
  std::function<void(std::uint64_t done, std::uint64_t of)> progress;
};

/// What a step of one rank took, in seconds of virtual time.
struct RehearsedStep {
  double began_s = 0;     ///< since the engine was opened
  double seconds = 0;     ///< from its first call to the return of step()
  double compute_s = 0;   ///< of the trainer
  double acquire_s = 0;   ///< the trainer waited for parameters
  double gradient_s = 0;  ///< it waited for an accumulator, or to hand a gradient over
  double step_s = 0;      ///< inside step()
  std::uint64_t generation = 0;
  /// Counters by Counter, from the step's first call to the next one's. The last step's go on until
  /// all is durable.
  std::vector<std::uint64_t> counters{};
  double workers_busy_s = 0;  ///< summed over workers, in the same time
  std::uint64_t sent_in_node = 0;
  std::uint64_t sent_to_nodes = 0;
  std::uint64_t host_peak_bytes = 0;  ///< up to its end
  std::uint64_t device_peak_bytes = 0;

  std::uint64_t counted(Counter counter) const {
    return counters[static_cast<std::size_t>(counter)];
  }
};

/// What a rank did.
struct RehearsedRank {
  std::vector<RehearsedStep> steps{};
  double durable_s = 0;  ///< from the end of the last step until all steps were durable
  Account host{0};
  Account device{0};
  /// Counters by Counter, at the beginning of the first step and at the end, when all is durable.
  std::vector<std::uint64_t> before{};
  std::vector<std::uint64_t> after{};
  double workers_busy_s = 0;  ///< summed over workers, from the beginning

  /// Returns how much was counted in all steps.
  std::uint64_t counted(Counter counter) const {
    return after[static_cast<std::size_t>(counter)] - before[static_cast<std::size_t>(counter)];
  }
};

/// Plays the run and returns what each rank did. Errors: those of the engine, as a run would get
/// them; kInvalidArgument if `costs` do not fit the model.
std::vector<RehearsedRank> rehearse(const RehearsalRequest& request);

}  // namespace ziggurat
