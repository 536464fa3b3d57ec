// SPDX-License-Identifier: Apache-2.0
// base/runtime/metrics.cc: the names of the counters, as --json prints them.
#include "base/runtime/metrics.h"

namespace ziggurat {

std::string_view to_string(Counter counter) noexcept {
  switch (counter) {
    case Counter::kNvmeReadBytes: return "nvme_read_bytes";
    case Counter::kNvmeWriteBytes: return "nvme_write_bytes";
    case Counter::kHostToDeviceBytes: return "host_to_device_bytes";
    case Counter::kDeviceToHostBytes: return "device_to_host_bytes";
    case Counter::kOptimizerBytes: return "optimizer_bytes";
    case Counter::kNvmeReadBusyNs: return "nvme_read_busy_ns";
    case Counter::kNvmeWriteBusyNs: return "nvme_write_busy_ns";
    case Counter::kNvmeBusyNs: return "nvme_busy_ns";
    case Counter::kOptimizerCpuNs: return "optimizer_cpu_ns";
    case Counter::kWaitParamsNs: return "wait_params_ns";
    case Counter::kWaitSweepNs: return "wait_sweep_ns";
    case Counter::kWaitGradsNs: return "wait_grads_ns";
    case Counter::kWaitDurableNs: return "wait_durable_ns";
    case Counter::kWaitRanksNs: return "wait_ranks_ns";
    case Counter::kPrefetchHits: return "prefetch_hits";
    case Counter::kPrefetchMisses: return "prefetch_misses";
    case Counter::kSpeculations: return "speculations";
    case Counter::kSpeculationsRedone: return "speculations_redone";
    case Counter::kSpeculationWasteBytes: return "speculation_waste_bytes";
    case Counter::kRecordCacheHits: return "record_cache_hits";
    case Counter::kRecordCacheHitBytes: return "record_cache_hit_bytes";
    case Counter::kStateReadBytes: return "state_read_bytes";
    case Counter::kStateReadAgainBytes: return "state_read_again_bytes";
    case Counter::kStateWriteBytes: return "state_write_bytes";
    case Counter::kSaveReadBytes: return "save_read_bytes";
    case Counter::kCheckpoints: return "checkpoints";
    case Counter::kCheckpointNs: return "checkpoint_ns";
    case Counter::kLeasesOnNode: return "leases_on_node";
    case Counter::kLeasesElsewhere: return "leases_elsewhere";
    case Counter::kJobsOnNode: return "jobs_on_node";
    case Counter::kJobsElsewhere: return "jobs_elsewhere";
    case Counter::kCount: break;
  }
  return "unknown";
}

}  // namespace ziggurat
