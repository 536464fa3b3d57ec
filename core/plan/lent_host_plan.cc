// SPDX-License-Identifier: Apache-2.0
// core/plan/lent_host_plan.cc: divides the budget for the chunks that a new store would have.
#include "core/plan/lent_host_plan.h"

#include <limits>

#include "base/memory_exhausted.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/sharding/packing.h"
#include "tiers/store/swap_items.h"

namespace ziggurat {
namespace {

/// Returns what a step reads of the records that `plan` does not keep.
std::uint64_t read_bytes(const ChunkTable& table, const LentHostRequest& request,
                         const HostPlan& plan) {
  if (request.placement.optimizer != Tier::kNvme) return 0;
  std::uint64_t total = 0;
  for (std::size_t id = plan.kept_item_bytes.size(); id < table.chunks().size(); ++id) {
    const Chunk& chunk = table.chunks()[id];
    if (chunk.constant) continue;
    const bool here =
        params_in_memory(table, chunk.unit, request.placement, request.reduction.staged);
    total += chunk.record_bytes() - OptimizerSweep::not_read_bytes(table, chunk, here);
  }
  return total;
}

}  // namespace

LentHostPlan plan_lent_host(const LentHostRequest& request) {
  const ModelSpec model = packed_model(numbered_model(request.model), request.state.format);
  const HostRequest its{.model = model,
                        .state = request.state,
                        .sharding = {},
                        .placement = request.placement,
                        .reduction = request.reduction};
  const ChunkTable largest(model, kChunkTilesMax, request.state);
  const auto with_largest = [&](std::uint64_t budget_bytes) {
    return plan_host(largest, request.placement, request.reduction, {budget_bytes});
  };
  const std::uint64_t comfortable_bytes = with_largest(0).comfortable_bytes();
  constexpr std::uint64_t kUnbounded = std::numeric_limits<std::uint64_t>::max() / 2;
  LentHostPlan plan{
      .budget_bytes = request.host_budget_bytes > 0 ? request.host_budget_bytes : comfortable_bytes,
      .all_bytes = comfortable_bytes + with_largest(kUnbounded).kept_bytes,
      .records = largest.stored_chunks().size()};
  std::uint64_t tiles = 0;
  try {
    tiles = choose_chunk_tiles(its, plan.budget_bytes);
  } catch (const MemoryExhausted& error) {
    plan.smallest_bytes = error.shortage().smallest_bytes;
    return plan;
  }
  const ChunkTable table(model, tiles, request.state);
  const HostPlan host = plan_host(table, request.placement, request.reduction, {plan.budget_bytes});
  plan.smallest_bytes = host.smallest_bytes();
  plan.records = table.stored_chunks().size();
  plan.item_bytes = host.item_bytes;
  plan.items = host.items;
  plan.read_bytes = read_bytes(table, request, host);
  plan.store_bytes = store_bytes(table, request.slots, request.blob_room_bytes);
  for (const Chunk& chunk : table.chunks()) {
    if (request.placement.params == Tier::kNvme && table.has_home(chunk.unit))
      plan.params_file_bytes += swap_item_bytes(chunk.param_bytes());
    if (request.placement.grads == Tier::kNvme && !chunk.constant)
      plan.sums_file_bytes += swap_item_bytes(chunk.count * sizeof(float));
  }
  return plan;
}

}  // namespace ziggurat
