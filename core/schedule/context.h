// SPDX-License-Identifier: Apache-2.0
// core/schedule/context.h: what all pipelines of one engine share. The engine owns it; it is used
// on the reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <vector>

#include "base/device_span.h"
#include "base/runtime/async.h"
#include "base/runtime/metrics.h"
#include "base/runtime/trace.h"
#include "base/runtime/workers.h"
#include "core/compute/compute.h"
#include "core/schedule/lent_memory.h"
#include "core/schedule/rank_channels.h"
#include "core/schedule/unit_gates.h"
#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"
#include "optimizer/state_format.h"
#include "tiers/device/device.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat {

struct Context {
  Reactor& reactor;
  Workers& workers;
  Metrics& metrics;
  Trace* trace;  ///< may be null
  // Null if the hand brings nothing to a device.
  Device* device = nullptr;
  Stream* to_device = nullptr;
  Stream* to_host = nullptr;
  /// Computes on bytes in the device's memory; null where only the CPU computes.
  Compute* compute = nullptr;
  PinnedPool& pool;
  RankChannels& ranks;
  const ChunkTable& table;
  Placement placement;
  /// How parameters are rounded in every step of the run. Its `step` is set for each record when
  /// that is rounded.
  ParamRounding rounding{};

  /// The scope of all that pipelines wait for; it is cancelled when the engine has failed or is
  /// closed.
  CancelScope& cancel;
  /// The engine's background pipelines. The first one that fails ends the run through `fail`. Other
  /// ranks may wait for what is in `tasks`, and know nothing of what is in `local_tasks`.
  WorkGroup& tasks;
  WorkGroup& local_tasks;
  UnitGates& gates;  ///< which units are at home at the generation that the trainer uses
  /// The parameters and gradients that a trainer lends.
  LentMemory& lent;
  /// The NUMA node of each chunk, where its bytes lie and are worked on. Empty if nothing is placed
  /// on nodes.
  std::vector<int> chunk_nodes = {};
  std::function<void(std::exception_ptr)> fail;

  /// Returns the node of `chunk`, or -1 if it may be on any.
  int node_of(ChunkId chunk) const noexcept {
    return chunk < chunk_nodes.size() ? chunk_nodes[chunk] : -1;
  }
  /// Returns the node of the unit's first chunk. Memory that the unit's chunks share is placed
  /// there.
  int node_of_unit(UnitId unit) const noexcept { return node_of(table.unit(unit).first_chunk); }

  /// Copy between spans of equal sizes; return when the bytes have arrived.
  Task<> copy_to_device(DeviceSpan<std::byte> to, std::span<const std::byte> from);
  Task<> copy_to_host(std::span<std::byte> to, DeviceSpan<const std::byte> from);
  /// The same part of each of several slices in the device's memory.
  struct DeviceRows {
    DeviceSpan<std::byte> first;
    std::uint64_t count;
    std::uint64_t stride_bytes;  ///< from where one row begins to where the next one does
  };
  /// The same for rows that lie one after the other in host memory.
  Task<> copy_rows_to_device(const DeviceRows& to, std::span<const std::byte> from);
  Task<> copy_rows_to_host(std::span<std::byte> to, const DeviceRows& from);
  /// Starts `task` as a background pipeline.
  void spawn(Task<> task);
  /// Starts a background pipeline in which no other rank has a part, so that this rank's engine can
  /// be closed in peace while it is under way.
  void spawn_local(Task<> task);
  /// Runs `job`, which must outlive the await, on a worker near `chunk`'s bytes.
  Task<> run_near(ChunkId chunk, Work work, const std::function<void()>& job,
                  Workers::Turn turn = Workers::Turn::kInOrder) {
    return workers.run(reactor, work, job, node_of(chunk), turn);
  }
  /// Runs `jobs` on the workers; they must outlive the await. `all` is their work together, of
  /// which each does an equal part. Returns when all have ended, and rethrows the error of the
  /// first that failed.
  Task<> run_all(Work all, const std::vector<std::function<void()>>& jobs);
  /// Takes host memory for the whole run; `decides` is LeaseRequest's. Errors: kResourceExhausted
  /// with the pool's account.
  Lease permanent_lease(Purpose purpose, std::uint64_t size_bytes, const char* holder,
                        int numa_node = -1, bool decides = false);

 private:
  Task<> guarded(Task<> task);
};

/// Adds the time from construction to destruction to `counter`. Any thread.
class CountedTime {
 public:
  CountedTime(const Clock& clock, Metrics& metrics, Counter counter)
      : clock_(clock), metrics_(metrics), counter_(counter), begin_(clock.now()) {}
  ~CountedTime() {
    metrics_.add(counter_, static_cast<std::uint64_t>((clock_.now() - begin_).count()));
  }
  CountedTime(const CountedTime&) = delete;
  CountedTime& operator=(const CountedTime&) = delete;

 private:
  const Clock& clock_;
  Metrics& metrics_;
  Counter counter_;
  Nanoseconds begin_;
};

}  // namespace ziggurat
