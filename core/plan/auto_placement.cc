// SPDX-License-Identifier: Apache-2.0
// core/plan/auto_placement.cc: tries the candidates in order and takes the first that fits.
#include "core/plan/auto_placement.h"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/memory_exhausted.h"
#include "core/plan/auto_ways.h"

namespace ziggurat {
namespace {

std::optional<RunPlan> planned(const RunRequest& request) {
  try {
    return plan_run(request);
  } catch (const MemoryExhausted&) {
    return std::nullopt;
  }
}

ChunkTable table_of(const RunRequest& request, const RunPlan& plan) {
  return ChunkTable(request.model, plan.chunk_tiles, request.state, request.sharding);
}

std::uint64_t comfortable_bytes(const RunRequest& request, const ChunkTable& table,
                                std::uint64_t device_record_bytes) {
  Placement placement = request.placement;
  placement.device_record_bytes = device_record_bytes;
  return comfortable_device_bytes(table, placement, request.device);
}

/// Returns the bytes of as many records as the device holds comfortably. Their number is found by
/// halving, because more records always need more memory.
std::uint64_t device_records(const RunRequest& request, const ChunkTable& table) {
  const std::uint64_t budget_bytes = request.budgets.device_bytes;
  std::size_t fit = 0;
  std::size_t too_many = table.chunks().size() + 1;
  while (fit + 1 < too_many) {
    const std::size_t half = fit + (too_many - fit) / 2;
    const bool fits =
        comfortable_bytes(request, table, device_record_bytes(table, half)) <= budget_bytes;
    (fits ? fit : too_many) = half;
  }
  return device_record_bytes(table, fit);
}

std::string reason(const RunRequest& request, const RunPlan& plan) {
  const Placement& placement = request.placement;
  const auto count = static_cast<std::size_t>(plan.chunk_count);
  const std::size_t on_device = plan.host.device_chunks;
  const std::size_t known = plan.host.kept_item_bytes.size();
  const std::size_t kept = known > on_device ? known - on_device : 0;
  std::string text = fmt::format(
      "placement auto: the engine chose {}; `device_memory` {} holds {}{} of {} optimizer records",
      to_string(placement), format_bytes(request.budgets.device_bytes),
      placement.params == Tier::kDevice ? "all parameters and " : "", on_device, count);
  text += fmt::format(", and `host_memory` {} keeps {}", format_bytes(request.budgets.host_bytes),
                      kept);
  return text + (on_device + kept < count ? fmt::format("; each step reads the other {} from NVMe",
                                                        count - on_device - kept)
                                          : "; no step reads a record from NVMe");
}

}  // namespace

PlacementChoice choose_placement(RunRequest request) {
  ZIGGURAT_CHECK(request.budgets.device_bytes > 0 && request.budgets.host_bytes > 0,
                 "placement auto was asked for without budgets");
  for (const bool comfortably : {true, false}) {
    for (const Placement& candidate : automatic_placements()) {
      request.placement = candidate;
      std::optional<RunPlan> plan = planned(request);
      if (!plan) continue;
      const ChunkTable table = table_of(request, *plan);
      if (comfortably) {
        if (comfortable_bytes(request, table, 0) > request.budgets.device_bytes) continue;
        request.placement.device_record_bytes = device_records(request, table);
        plan = plan_run(request);
      }
      return {request.placement, reason(request, *plan)};
    }
  }
  static_cast<void>(plan_run(request));  // throws an error that says what is missing
  ZIGGURAT_CHECK(false, "placement auto: {} fits after all", to_string(request.placement));
  return {};
}

}  // namespace ziggurat
