// SPDX-License-Identifier: Apache-2.0
// base/runtime/metrics.h: the counters behind the end-of-run table and --json. Thread-safe,
// relaxed.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace ziggurat {

/// Bytes over a link, and nanoseconds it was busy or somebody waited for it.
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
  kSpeculationsRedone,     ///< of these, whose norm demanded another one
  kSpeculationWasteBytes,  ///< records written in vain over NVMe, and read again
  kRecordCacheHits,        ///< records found in host memory
  kRecordCacheHitBytes,    ///< and so not read over NVMe
  kStateReadBytes,         ///< of records, for an update; part of kNvmeReadBytes
  kStateReadAgainBytes,    ///< of these, of records whose memory was needed sooner by others
  kStateWriteBytes,        ///< of records, after their update
  kSaveReadBytes,          ///< records read from their slots for a save alone
  kCheckpoints,            ///< of state in memory, written while training went on
  kCheckpointNs,           ///< from the first one's begin to its end, and so on
  kLeasesOnNode,           ///< of host memory, on the NUMA node that was asked for
  kLeasesElsewhere,        ///< or, as that had no room, on others too
  kJobsOnNode,             ///< of workers, on the NUMA node of what they work on
  kJobsElsewhere,          ///< or, as others were idle, there
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
