// SPDX-License-Identifier: Apache-2.0
// core/plan/host_plan.cc: computes the parts of the host budget.
#include "core/plan/host_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/memory_exhausted.h"
#include "core/plan/device_plan.h"
#include "core/schedule/gradients/gradient_flow.h"
#include "core/schedule/gradients/gradient_norm.h"
#include "core/schedule/gradients/gradient_reducer.h"
#include "core/schedule/params/quantized_gather.h"
#include "core/schedule/params/unit_gather.h"
#include "tiers/pool/arena.h"

namespace ziggurat {
namespace {

/// Whether the CPU gets a copy of what is on `tier`.
bool comes(Tier tier, bool device_out_of_reach) {
  return tier == Tier::kNvme || (tier == Tier::kDevice && device_out_of_reach);
}

/// Computes the sizes of the chunks' work items.
class Items {
 public:
  Items(const ChunkTable& table, const Placement& placement, bool device_out_of_reach)
      : table_(table),
        placement_(placement),
        out_of_reach_(device_out_of_reach),
        device_chunks_(ziggurat::device_chunks(table, placement)) {}

  std::size_t device_chunks() const { return device_chunks_; }
  /// Whether the chunk's record lies in device memory that the CPU cannot reach, so that a copy
  /// must be brought to the host where the CPU works on it.
  bool updated_on_device(std::size_t id) const { return id < device_chunks_ && out_of_reach_; }

  /// Returns the size of a chunk's work item. It has the record unless the CPU can reach that where
  /// it stays, and the parameters and the gradient if the CPU cannot reach those. Lent parameters
  /// of a packed unit are brought together in it, and their gradients in fp32.
  std::uint64_t bytes(std::size_t id) const {
    const Chunk& chunk = table_.chunks()[id];
    const bool from_nvme = placement_.optimizer == Tier::kNvme && id >= device_chunks_;
    const bool record = from_nvme || chunk.constant || updated_on_device(id);
    std::uint64_t size_bytes = record ? chunk.record_bytes() : 0;
    const bool lent = !table_.has_home(chunk.unit);
    if (!params_in_memory(table_, chunk.unit, placement_, out_of_reach_))
      size_bytes += chunk.param_bytes();
    if (!table_.is_lent() && comes(placement_.grads, out_of_reach_) && !chunk.constant)
      size_bytes += chunk.param_bytes();
    const bool packed = table_.is_packed(chunk.unit);
    const bool summed = table_.is_lent() && placement_.grads == Tier::kNvme;
    if (packed && lent) size_bytes += chunk.param_bytes();
    if ((packed || summed) && !chunk.constant) size_bytes += chunk.count * sizeof(float);
    return size_bytes;
  }

 private:
  const ChunkTable& table_;
  const Placement& placement_;
  bool out_of_reach_;
  std::size_t device_chunks_;
};

/// Keeps as many records as fit in `spare_bytes` beside the work items of the chunks whose records
/// are not kept. The sweep has one item in its reserve, so it gets 11 more, or one for each chunk
/// if fewer chunks are left. If the placement names a size, that much is kept even if only the
/// reserve's item is left.
void keep_records(HostPlan& plan, const ChunkTable& table, const Placement& placement,
                  const Items& items, std::uint64_t spare_bytes) {
  const std::size_t count = table.chunks().size();
  const auto kept_bytes = [&](std::size_t id) {  // no sweep reads a constant record
    return table.chunks()[id].constant ? 0 : items.bytes(id);
  };
  const std::uint64_t most_bytes = placement.host_record_bytes.value_or(spare_bytes);
  const std::size_t brought = items.updated_on_device(0) ? items.device_chunks() : 0;
  std::uint64_t so_far_bytes = 0;
  for (std::size_t k = items.device_chunks() + 1; k <= count; ++k) {
    so_far_bytes += lease_bytes(kept_bytes(k - 1));
    const std::uint64_t others =
        placement.host_record_bytes
            ? 0
            : std::min<std::uint64_t>(kWorkItemsWanted - 1, count - k + brought);
    if (so_far_bytes > most_bytes) break;
    if (so_far_bytes + others * lease_bytes(plan.item_bytes) > spare_bytes) continue;
    plan.kept_bytes = so_far_bytes;
    plan.kept_item_bytes.resize(k);
  }
  for (std::size_t id = items.device_chunks(); id < plan.kept_item_bytes.size(); ++id)
    plan.kept_item_bytes[id] = kept_bytes(id);
}

HostPlan plan_with(const HostRequest& request, std::uint64_t tiles, std::uint64_t budget_bytes) {
  const ChunkTable table(request.model, tiles, request.state, request.sharding);
  return plan_host(table, request.placement, request.reduction, {budget_bytes, request.saves});
}

/// Returns how many tiles a chunk has with which the smallest budget works.
std::uint64_t smallest_tiles(const HostRequest& request) {
  std::uint64_t smallest = 1;
  if (request.placement.optimizer != Tier::kHost) return smallest;
  std::uint64_t smallest_bytes = plan_with(request, 1, 0).smallest_bytes();
  for (std::uint64_t tiles = 2; tiles <= kChunkTilesMax; ++tiles) {
    const std::uint64_t needed_bytes = plan_with(request, tiles, 0).smallest_bytes();
    if (needed_bytes >= smallest_bytes) continue;
    smallest_bytes = needed_bytes;
    smallest = tiles;
  }
  return smallest;
}

}  // namespace

std::uint64_t HostPlan::items_unless_kept(std::uint64_t budget_bytes) const {
  const std::uint64_t needed = smallest_bytes();
  if (item_bytes == 0 || budget_bytes < needed) return 0;
  return 1 + (budget_bytes - needed) / lease_bytes(item_bytes);
}

std::uint64_t HostPlan::smallest_bytes() const {
  std::uint64_t total = permanent_bytes + gradient_bytes;
  for (const auto& reserve : reserves) total += lease_bytes(reserve.largest_item_bytes);
  return std::max(total, PinnedPoolOptions{}.alignment_bytes) + save_bytes;
}

std::uint64_t HostPlan::comfortable_bytes() const {
  return smallest_bytes() + (items_wanted - 1) * lease_bytes(item_bytes);
}

std::uint64_t HostPlan::reserve_bytes(Purpose purpose) const {
  const auto its = std::ranges::find(reserves, purpose, &PinnedPoolOptions::Reserve::purpose);
  return its == reserves.end() ? 0 : its->largest_item_bytes;
}

std::uint64_t lease_bytes(std::uint64_t size_bytes) {
  return staggered_bytes(size_bytes, PinnedPoolOptions{}.alignment_bytes);
}

bool params_in_memory(const ChunkTable& table, UnitId unit, const Placement& placement,
                      bool device_out_of_reach) {
  return !table.has_home(unit) || !comes(placement.params, device_out_of_reach);
}

HostPlan plan_host(const ChunkTable& table, const Placement& placement,
                   const ReductionSettings& reduction, const HostBudget& budget) {
  HostPlan plan;
  if (budget.saves) plan.save_bytes = kSaveRecords * table.largest_record_bytes();
  const Items items(table, placement, reduction.staged);
  plan.device_chunks = items.device_chunks();
  // A trainer that lends its gradients computes the norm itself.
  if (!table.is_lent())
    plan.norm_bytes = lease_bytes(GradientNorm::memory_bytes(table)) +
                      lease_bytes(GradientFlow::copies_bytes(table, reduction));
  if (!table.sharding().one_rank()) {
    plan.bucket_bytes =
        lease_bytes(kReduceBuckets * GradientReducer::bucket_bytes(table, reduction));
  }
  if (table.sharding().quantization.weights)
    plan.quantized_bytes = lease_bytes(kQuantizedGathers * QuantizedGather::buffer_bytes(table));
  if (reduction.staged && table.sharding().params_sharded())
    plan.staged_bytes = lease_bytes(kStagedGathers * UnitGather::piece_bytes(table, reduction));
  if (reduction.whole_unit_bytes > 0)
    plan.staged_bytes += lease_bytes(kStagedGathers * reduction.whole_unit_bytes);
  plan.permanent_bytes =
      plan.norm_bytes + plan.bucket_bytes + plan.quantized_bytes + plan.staged_bytes;
  // What is lent lives on none of the tiers.
  std::optional<Tier> params, grads;
  if (!table.is_lent()) grads = placement.grads;
  std::uint64_t largest_home_bytes = 0;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    if (!table.has_home(u)) continue;
    params = placement.params;
    const std::uint64_t home_bytes = table.home_count(u) * table.element_bytes(u);
    largest_home_bytes = std::max(largest_home_bytes, home_bytes);
    if (params == Tier::kHost) plan.permanent_bytes += lease_bytes(home_bytes);
    if (const std::uint64_t part_bytes = table.node_part_bytes(u); part_bytes > 0)
      plan.permanent_bytes += lease_bytes(part_bytes);
  }
  std::uint64_t with_items = 0;
  for (std::size_t id = 0; id < table.chunks().size(); ++id) {
    const Chunk& chunk = table.chunks()[id];
    const std::uint64_t its_bytes = items.bytes(id);
    if (its_bytes > 0) ++with_items;
    plan.item_bytes = std::max(plan.item_bytes, its_bytes);
    if (chunk.constant) continue;
    if (placement.optimizer == Tier::kHost && id >= plan.device_chunks)
      plan.permanent_bytes += lease_bytes(chunk.record_bytes());
    if (grads == Tier::kHost) plan.gradient_bytes += lease_bytes(chunk.param_bytes());
  }

  // With records in memory only some units of such a trainer need items: packed ones, and those
  // whose parameters or sums of gradients are on NVMe.
  if (table.is_lent() && placement.optimizer == Tier::kHost)
    plan.items_wanted = std::clamp<std::uint64_t>(with_items, 1, kWorkItemsWanted);
  if (plan.item_bytes > 0) plan.reserves.push_back({Purpose::kOptimizer, plan.item_bytes});
  // Ranks exchange data only from host memory.
  const bool exchanged =
      params == Tier::kDevice && reduction.staged && !table.sharding().one_rank();
  if (params == Tier::kNvme || exchanged) {
    plan.reserves.push_back({Purpose::kParams, largest_home_bytes});
  }
  if (table.is_lent() && placement.grads == Tier::kNvme)
    plan.reserves.push_back({Purpose::kGradients, table.largest_chunk_count() * sizeof(float)});
  if (grads == Tier::kNvme) {
    plan.reserves.push_back({Purpose::kGradients, table.largest_param_bytes()});
  }

  const std::uint64_t needed = plan.smallest_bytes();
  if (plan.item_bytes == 0 || budget.size_bytes < needed) return plan;
  if (placement.optimizer == Tier::kNvme)
    keep_records(plan, table, placement, items, budget.size_bytes - needed);
  plan.items = plan.items_unless_kept(budget.size_bytes - plan.kept_bytes);
  for (std::size_t id = plan.kept_item_bytes.size(); id < table.chunks().size(); ++id)
    plan.swept_bytes += lease_bytes(items.bytes(id));
  return plan;
}

std::uint64_t choose_chunk_tiles(const HostRequest& request, std::uint64_t budget_bytes) {
  for (std::uint64_t tiles = kChunkTilesMax; tiles >= 1; --tiles) {
    const HostPlan plan = plan_with(request, tiles, budget_bytes);
    const bool fits = plan.smallest_bytes() <= budget_bytes;
    if (fits && (plan.item_bytes == 0 || plan.items_unless_kept(budget_bytes) >= plan.items_wanted))
      return tiles;
  }
  const std::uint64_t tiles = smallest_tiles(request);
  require_host_budget(plan_with(request, tiles, 0), budget_bytes);
  return tiles;
}

HostPlan smallest_host_plan(const HostRequest& request) {
  return plan_with(request, smallest_tiles(request), 0);
}

void require_host_budget(const HostPlan& plan, std::uint64_t budget_bytes) {
  if (plan.smallest_bytes() <= budget_bytes) return;
  std::string reserves;
  for (const auto& reserve : plan.reserves) {
    reserves += fmt::format(", one {} item of {}", to_string(reserve.purpose),
                            format_bytes(reserve.largest_item_bytes));
  }
  if (plan.save_bytes > 0)
    reserves += fmt::format(", {} for checkpoints", format_bytes(plan.save_bytes));
  const std::uint64_t smallest = plan.smallest_bytes();
  throw MemoryExhausted(
      {.budget = MemoryBudget::kHost,
       .had_bytes = budget_bytes,
       .needed_bytes = smallest,
       .smallest_bytes = smallest},
      fmt::format(
          "`host_memory` {} is too small; the smallest that works with these settings is {} "
          "MiB: {} for what stays on the host, {} for gradients{}",
          format_bytes(budget_bytes), round_up(smallest, kMiB) / kMiB,
          format_bytes(plan.permanent_bytes), format_bytes(plan.gradient_bytes), reserves));
}

}  // namespace ziggurat
