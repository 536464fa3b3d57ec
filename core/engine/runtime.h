// SPDX-License-Identifier: Apache-2.0
// core/engine/runtime.h: what one rank needs before its device and its engine: a reactor, workers,
// drives and the other ranks. It outlives both.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aio/io_engine.h"
#include "base/absent_memory.h"
#include "base/runtime/metrics.h"
#include "base/runtime/reactor.h"
#include "base/runtime/trace.h"
#include "base/runtime/worker_pool.h"
#include "base/topology/topology.h"
#include "collectives/communicator.h"
#include "tiers/pool/memory_policy.h"

namespace ziggurat {

/// Makes the IoEngine that moves the bytes of the files in `directory`. Called on the reactor's
/// thread. Errors: those of the IoEngine.
using IoEngineFactory =
    std::function<std::unique_ptr<IoEngine>(Reactor& reactor, const std::string& directory)>;

/// Returns the NUMA node of the drive that holds a directory, which need not exist yet; -1 if
/// unknown.
using DriveNode = std::function<int(const std::string& directory)>;

/// Returns a number that is the same for all directories on one drive. A directory that does not
/// exist yet is made first. Errors: errno's.
using DriveNumber = std::function<std::uint64_t(const std::string& directory)>;

struct RuntimeOptions {
  /// Number of workers; 0 for this rank's share of the host (core_budget.h).
  std::size_t threads = 0;
  bool pin = true;         ///< pins each worker to a core of its own, if there are enough cores
  std::string trace_path;  ///< empty for no trace
  /// Empty for the best engine that works in a directory (aio/probe.h).
  IoEngineFactory io_engine = {};
  /// For tests: with virtual time, the clock advances only while drives work and no worker does.
  Clock::Kind clock = Clock::Kind::kReal;
  /// The machine; these three members are for tests. If they are empty, the real machine, its
  /// drives and its kernel are used.
  std::optional<Topology> topology = {};
  DriveNode drive_node = {};
  std::shared_ptr<MemoryPolicy> memory_policy = {};
};

/// The parts that live as long as the rank: reactor (with its thread), workers, counters, trace,
/// topology and the other ranks.
struct Runtime {
  /// Makes the parts and starts the reactor. Errors: kInvalidArgument for more threads than the
  /// machine has logical CPUs, or for an invalid rank from the launcher; errno's for the trace
  /// file.
  static std::unique_ptr<Runtime> create(const RuntimeOptions& options);
  explicit Runtime(Clock::Kind clock)
      : own_reactor(std::make_unique<Reactor>(clock)), reactor(*own_reactor) {}
  /// Begins a runtime on a reactor that others share, and that outlives it: one of many ranks in
  /// virtual time. Whoever calls sets the members below.
  explicit Runtime(Reactor& shared) : reactor(shared) {}
  ~Runtime();

  /// Returns whoever does the engine's jobs.
  Workers& jobs() const noexcept { return twin ? *twin : static_cast<Workers&>(*workers); }

  Topology topology;
  /// NUMA node of each worker; empty on a machine with one node, or if workers are not pinned.
  std::vector<int> worker_nodes;
  DriveNode drive_node;                         ///< never empty
  std::shared_ptr<MemoryPolicy> memory_policy;  ///< null to leave memory to the kernel
  Metrics metrics;
  std::unique_ptr<Trace> trace;          ///< may be null
  std::unique_ptr<Reactor> own_reactor;  ///< null if the reactor is shared
  Reactor& reactor;
  std::unique_ptr<WorkerPool> workers;  ///< null where a twin does the jobs
  std::unique_ptr<Workers> twin;        ///< null unless nothing is computed, but only costed
  AbsentMemory* absent = nullptr;       ///< where host memory is if it does not exist; else null
  /// All ranks of the run, including this one; never null. There is one rank unless another
  /// communicator is set before an engine is opened. Used on the reactor's thread.
  std::unique_ptr<Communicator> ranks;
  IoEngineFactory io_engine;  ///< never empty
  DriveNumber drive_number;   ///< empty for the block device's, of the real file system
};

}  // namespace ziggurat
