// SPDX-License-Identifier: Apache-2.0
// core/engine/runtime.h: the spine of one rank, made before its device and its engine, and
// outliving both.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aio/io_engine.h"
#include "base/runtime/metrics.h"
#include "base/runtime/reactor.h"
#include "base/runtime/trace.h"
#include "base/runtime/worker_pool.h"
#include "base/topology/topology.h"
#include "collectives/communicator.h"
#include "tiers/memory_policy.h"

namespace ziggurat {

/// Makes what moves the bytes of the files in `directory`. On the reactor's thread. Errors: its
/// own.
using IoEngineFactory =
    std::function<std::unique_ptr<IoEngine>(Reactor& reactor, const std::string& directory)>;

/// NUMA node of the drive under a directory, which may not exist yet; -1: unknown.
using DriveNode = std::function<int(const std::string& directory)>;

struct RuntimeOptions {
  std::size_t threads = 0;         ///< workers; 0: this rank's share of the host (core_budget.h)
  bool pin = true;                 ///< each to a core of its own, where there is one
  std::string trace_path;          ///< empty: no trace
  IoEngineFactory io_engine = {};  ///< empty: the best that works there (aio/probe.h)
  /// For tests: virtual time passes while drives, and no worker, have something to do.
  Clock::Kind clock = Clock::Kind::kReal;
  /// The machine; these three are for tests. Empty: this one, what it says of its drives, its
  /// kernel.
  std::optional<Topology> topology = {};
  DriveNode drive_node = {};
  std::shared_ptr<MemoryPolicy> memory_policy = {};
};

/// Everything here lives as long as the rank: reactor (its thread runs), workers, counters, trace,
/// topology, the other ranks.
struct Runtime {
  /// Errors: kInvalidArgument for more threads than the machine has logical CPUs, and for a
  /// launcher's rank that makes no sense; errno's for the trace file.
  static std::unique_ptr<Runtime> create(const RuntimeOptions& options);
  explicit Runtime(Clock::Kind clock) : reactor(clock) {}
  ~Runtime();

  Topology topology;
  std::vector<int> worker_nodes;  ///< NUMA node of each worker; empty: one node, or not pinned
  DriveNode drive_node;           ///< never empty
  std::shared_ptr<MemoryPolicy> memory_policy;  ///< null: the kernel's
  Metrics metrics;
  std::unique_ptr<Trace> trace;  ///< may be null
  Reactor reactor;
  std::unique_ptr<WorkerPool> workers;
  /// All ranks of the run, this one among them; never null. One rank unless it is put in its place
  /// before an engine is opened. Reactor's thread.
  std::unique_ptr<Communicator> ranks;
  IoEngineFactory io_engine;  ///< never empty
};

}  // namespace ziggurat
