// SPDX-License-Identifier: Apache-2.0
// base/runtime/metrics.h: the counters behind the end-of-run table and --json. Thread-safe, with
// relaxed memory order.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace ziggurat {

/// Names the counters: bytes over a link, nanoseconds that a link was busy or somebody waited, and
/// numbers of events.
enum class Counter : std::uint8_t {
  kNvmeReadBytes,
  kNvmeWriteBytes,
  kHostToDeviceBytes,
  kDeviceToHostBytes,
  kOptimizerBytes,   ///< host memory traffic of the optimizer's kernels
  kNvmeReadBusyNs,   ///< at least one read in flight
  kNvmeWriteBusyNs,  ///< at least one write in flight
  kNvmeBusyNs,       ///< at least one transfer in flight
  kOptimizerCpuNs,   ///< CPU time inside optimizer jobs, summed over workers
  kWaitParamsNs,     ///< trainer blocked in acquire() for a copy or read under way
  kWaitSweepNs,      ///< trainer blocked in acquire() for the optimizer sweep
  kWaitGradsNs,    ///< trainer blocked handing over a gradient, or in step() for the last gradients
  kWaitDurableNs,  ///< trainer blocked for a generation to become durable
  kWaitRanksNs,    ///< trainer blocked for other ranks: a unit's slices, a step's norm
  kPrefetchHits,
  kPrefetchMisses,
  kSpeculations,           ///< steps whose update began before the norm was known
  kSpeculationsRedone,     ///< speculations whose norm demanded another update
  kSpeculationWasteBytes,  ///< records written over NVMe in vain, and read again
  kRecordCacheHits,        ///< records found in host memory
  kRecordCacheHitBytes,    ///< bytes of these records, which were not read over NVMe
  kStateReadBytes,         ///< records read for an update; part of kNvmeReadBytes
  kStateReadAgainBytes,    ///< of these, records read again because others needed their memory
                           ///< sooner
  kStateWriteBytes,        ///< records written after their update
  kSaveReadBytes,          ///< records read from their slots only for a save
  kCheckpoints,            ///< checkpoints of state in memory, written while training went on
  kCheckpointNs,           ///< time of these, each from its begin to its end
  kLeasesOnNode,           ///< leases of host memory on the NUMA node that was asked for
  kLeasesElsewhere,        ///< leases on other nodes too, because that node had no room
  kJobsOnNode,             ///< jobs of workers on the NUMA node of their bytes
  kJobsElsewhere,          ///< jobs on another node, because workers there were idle
  kCount,
};

std::string_view to_string(Counter counter) noexcept;

class Metrics {
 public:
  void add(Counter counter, std::uint64_t amount) noexcept {
    counters_[static_cast<std::size_t>(counter)].fetch_add(amount, std::memory_order_relaxed);
  }
  std::uint64_t value(Counter counter) const noexcept {
    return counters_[static_cast<std::size_t>(counter)].load(std::memory_order_relaxed);
  }

 private:
  std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Counter::kCount)> counters_{};
};

}  // namespace ziggurat
