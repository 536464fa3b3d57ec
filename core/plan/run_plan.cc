// SPDX-License-Identifier: Apache-2.0
// core/plan/run_plan.cc: makes the engine's decisions at open, in the same order, on its own chunk
// table.
#include "core/plan/run_plan.h"

#include "base/bytes.h"
#include "core/plan/host_leases.h"
#include "tiers/store/state_store.h"

namespace ziggurat {
namespace {

ChunkTable table_of(const RunRequest& request, std::uint64_t tiles) {
  return ChunkTable(request.model, tiles, request.state, request.sharding);
}

HostRequest host_request(const RunRequest& request) {
  return {.model = request.model,
          .state = request.state,
          .sharding = request.sharding,
          .placement = request.placement,
          .reduction = request.reduction,
          .saves = request.saves};
}

}  // namespace

std::uint64_t store_bytes(const ChunkTable& table, int slots, std::uint64_t blob_room_bytes) {
  return StateStore::file_bytes({.layout = table.layout(),
                                 .run_identity = {},
                                 .numerics_fingerprint = {},
                                 .record_bytes = table.record_bytes(),
                                 .constant = table.constant_chunks(),
                                 .record_format = table.record_format(),
                                 .slots = static_cast<std::uint32_t>(slots),
                                 .blob_capacity_bytes = blob_room_bytes});
}

Budgets smallest_budgets(const RunRequest& request) {
  const HostRequest host = host_request(request);
  const std::uint64_t host_bytes = smallest_host_plan(host).smallest_bytes();
  const ChunkTable table = table_of(request, choose_chunk_tiles(host, host_bytes));
  return {.device_bytes = plan_device(table, request.placement, request.device, 0).smallest_bytes,
          .host_bytes = host_bytes};
}

RunPlan plan_run(const RunRequest& request) {
  const HostRequest host = host_request(request);
  RunPlan plan;
  plan.budgets = request.budgets;
  plan.smallest.host_bytes = smallest_host_plan(host).smallest_bytes();
  if (plan.budgets.host_bytes == 0) {
    plan.budgets.host_bytes = plan_host(table_of(request, kChunkTilesMax), request.placement,
                                        request.reduction, {0, request.saves})
                                  .comfortable_bytes();
  }
  plan.chunk_tiles = request.chunk_tiles > 0 ? request.chunk_tiles
                                             : choose_chunk_tiles(host, plan.budgets.host_bytes);
  const ChunkTable table = table_of(request, plan.chunk_tiles);
  if (plan.budgets.device_bytes == 0) {
    plan.budgets.device_bytes = comfortable_device_bytes(table, request.placement, request.device);
  }
  plan.chunk_count = table.chunks().size();
  plan.host = plan_host(table, request.placement, request.reduction,
                        {plan.budgets.host_bytes, request.saves});
  plan.device = plan_device(table, request.placement, request.device, plan.budgets.device_bytes);
  require_host_budget(plan.host, plan.budgets.host_bytes);
  require_device_budget(plan.device, plan.budgets.device_bytes);
  plan.lease_bytes = lease_peak_bytes(
      {.table = table,
       .placement = request.placement,
       .reduction = request.reduction,
       .host = plan.host,
       .device = plan.device,
       .budget_bytes = plan.budgets.host_bytes,
       .units_ahead = units_ahead(table, request.placement, request.outstanding_bytes)});
  plan.smallest.device_bytes = plan.device.smallest_bytes;
  plan.store_bytes = store_bytes(table, request.slots, kBlobRoomBytes);
  plan.table_bytes =
      plan.store_bytes - static_cast<std::uint64_t>(request.slots) * table.total_record_bytes();
  return plan;
}

std::uint64_t RunPlan::host_peak_bytes() const {
  return host.permanent_bytes + host.gradient_bytes + host.kept_bytes + lease_bytes +
         host.save_bytes;
}

namespace {

/// Adds what a tier holds at its peak beyond the sum of its lines: every tensor has an odd number
/// of pages (tiers/pool/arena.h), which its line does not count.
void add_gaps(RankMemory& memory, Tier tier, std::uint64_t peak_bytes) {
  const std::uint64_t listed_bytes = memory.bytes(tier);
  if (peak_bytes > listed_bytes) memory.add(StateClass::kGaps, tier, peak_bytes - listed_bytes);
}

}  // namespace

void add_in_use(RankMemory& memory, const RunPlan& plan) {
  const DevicePlan& device = plan.device;
  const HostPlan& host = plan.host;
  memory.add(StateClass::kStoreTables, Tier::kNvme, plan.table_bytes);
  memory.add(StateClass::kActivations, Tier::kDevice, device.trainer_bytes);
  memory.add(StateClass::kLiveParams, Tier::kDevice, device.live_bytes);
  memory.add(StateClass::kAccumulator, Tier::kDevice,
             device.accumulators * device.accumulator_bytes + device.other_accumulator_bytes);
  memory.add(StateClass::kNormSums, Tier::kHost, host.norm_bytes);
  memory.add(StateClass::kBucket, Tier::kHost, host.bucket_bytes);
  memory.add(StateClass::kQuantizedParams, Tier::kHost, host.quantized_bytes);
  memory.add(StateClass::kLiveParams, Tier::kHost, host.staged_bytes);
  memory.add(StateClass::kKeptRecords, Tier::kHost, host.kept_bytes);
  memory.add(StateClass::kWorkItems, Tier::kHost, plan.lease_bytes);
  memory.add(StateClass::kSaveBuffers, Tier::kHost, host.save_bytes);
  add_gaps(memory, Tier::kDevice, device.peak_bytes());
  add_gaps(memory, Tier::kHost, plan.host_peak_bytes());
}

}  // namespace ziggurat
