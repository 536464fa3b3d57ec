// SPDX-License-Identifier: Apache-2.0
// core/plan/auto_ways.cc: asks the engine's own plans what each way takes.
#include "core/plan/auto_ways.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "core/sharding/packing.h"

namespace ziggurat {
namespace {

/// Sizes that are chosen are whole MiB, which read well.
constexpr std::uint64_t kGrainBytes = kMiB;
constexpr std::uint64_t kPlenty = std::numeric_limits<std::uint64_t>::max() / 2;

constexpr std::array kPlacements{Placement{.params = Tier::kDevice, .grads = Tier::kHost},
                                 Placement{.params = Tier::kHost, .grads = Tier::kHost},
                                 Placement{.params = Tier::kDevice, .grads = Tier::kNvme},
                                 Placement{.params = Tier::kHost, .grads = Tier::kNvme},
                                 Placement{.params = Tier::kNvme, .grads = Tier::kHost},
                                 Placement{.params = Tier::kNvme, .grads = Tier::kNvme}};

/// What a rank has of each class of state.
struct ClassBytes {
  std::uint64_t params = 0;   ///< that the engine keeps
  std::uint64_t trained = 0;  ///< of these, what a step changes
  std::uint64_t grads = 0;
  std::uint64_t records = 0;
};

ClassBytes class_bytes(const ChunkTable& table) {
  ClassBytes its;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    if (!table.has_home(u)) continue;
    const std::uint64_t home_bytes = table.home_count(u) * table.element_bytes(u);
    its.params += home_bytes;
    if (table.unit(u).updated_count > 0) its.trained += home_bytes;
  }
  for (const Chunk& chunk : table.chunks()) {
    if (chunk.constant) continue;
    its.grads += chunk.param_bytes();
    its.records += chunk.record_bytes();
  }
  return its;
}

/// Divides the host memory that is given, for a table of largest or of small chunks.
using HostPlanner = std::function<HostPlan(const ChunkTable& table, std::uint64_t budget_bytes)>;

/// What the choice asks of a model: its chunks as large as they may be, and small ones.
struct Tables {
  ChunkTable largest;
  ChunkTable small;

  Tables(const ModelSpec& model, const StateKind& state, const Sharding& sharding,
         std::uint64_t tiles)
      : largest(model, tiles, state, sharding),
        small(model, std::min(tiles, kComfortableTiles), state, sharding) {}
};

/// Returns the host part of a way: what the engine takes at least, and with which no step reads a
/// record.
AutoPart host_part(const Tables& tables, const HostPlanner& plan, const ClassBytes& its,
                   const Placement& placement, AutoLeast least) {
  const HostPlan largest = plan(tables.largest, 0);
  if (placement.optimizer != Tier::kNvme) return {.least_bytes = largest.comfortable_bytes()};
  return {.least_bytes = least == AutoLeast::kBare ? largest.smallest_bytes()
                                                   : plan(tables.small, 0).comfortable_bytes(),
          .most_bytes = largest.comfortable_bytes() + plan(tables.largest, kPlenty).kept_bytes,
          .drive_saved_bytes = its.records};
}

/// Returns what a step moves over the drive if nothing stays in memory between two uses.
std::uint64_t drive_bytes(const ClassBytes& its, const Placement& placement,
                          std::uint64_t gradient_bytes) {
  std::uint64_t total = placement.optimizer == Tier::kNvme ? 2 * its.records : 0;
  if (placement.params == Tier::kNvme) total += 2 * its.params + its.trained;
  if (placement.grads == Tier::kNvme) total += 2 * gradient_bytes;
  return total;
}

AutoWay run_way(const RunRequest& request, AutoLeast least) {
  const Placement& placement = request.placement;
  const std::uint64_t tiles = request.chunk_tiles > 0 ? request.chunk_tiles : kChunkTilesMax;
  const Tables tables(request.model, request.state, request.sharding, tiles);
  const ClassBytes its = class_bytes(tables.largest);
  const HostPlanner host = [&](const ChunkTable& table, std::uint64_t budget_bytes) {
    return plan_host(table, placement, request.reduction, {budget_bytes, request.saves});
  };
  AutoWay way{.placement = placement,
              .host = host_part(tables, host, its, placement, least),
              .drive_bytes = drive_bytes(its, placement, its.grads)};
  way.copied_bytes = placement.params == Tier::kDevice ? its.params : 2 * its.params;
  if (least == AutoLeast::kBare) {
    const Budgets smallest = smallest_budgets(request);
    if (request.chunk_tiles == 0) way.host.least_bytes = smallest.host_bytes;
    way.units.least_bytes = smallest.device_bytes;
  } else {
    way.units.least_bytes = comfortable_device_bytes(tables.largest, placement, request.device);
  }
  if (placement.params == Tier::kNvme) {
    way.units.most_bytes = way.units.least_bytes + its.params;
    way.units.drive_saved_bytes = its.params;  // backward finds what forward has brought
  }
  return way;
}

/// Returns where the parameters may be, best first.
std::vector<Tier> params_tiers(const UnitsRequest& request) {
  std::vector<Tier> tiers;
  if (request.params.value_or(Tier::kHost) == Tier::kHost) {
    if (request.live_there) tiers.push_back(Tier::kDevice);
    tiers.push_back(Tier::kHost);
  }
  if (request.params.value_or(Tier::kNvme) == Tier::kNvme) tiers.push_back(Tier::kNvme);
  return tiers;
}
std::vector<Tier> tiers_of(const std::optional<Tier>& given) {
  return given ? std::vector{*given} : std::vector{Tier::kHost, Tier::kNvme};
}

/// Whether the run has what the placement needs. Parameters and gradients on NVMe share the
/// directory of a state that is there, or have one of their own.
bool may_be(const UnitsRequest& request, const Placement& placement) {
  if (placement.optimizer == Tier::kNvme) return request.has_store;
  const bool some_there = placement.params == Tier::kNvme || placement.grads == Tier::kNvme;
  return !request.needs_store && (request.has_folder || !some_there);
}

AutoWay unit_way(const UnitsRequest& request, const Tables& tables, const Placement& placement,
                 AutoLeast least) {
  const ClassBytes its = class_bytes(tables.largest);
  const HostPlanner host = [&](const ChunkTable& table, std::uint64_t budget_bytes) {
    return plan_host(table, placement, {}, {budget_bytes});
  };
  AutoWay way{.placement = placement,
              .units = {.least_bytes = request.units_least_bytes, .most_bytes = 0},
              .host = host_part(tables, host, its, placement, least),
              .fixed_bytes = request.beside_bytes,
              .drive_bytes = drive_bytes(its, placement, request.gradient_bytes)};
  if (placement.grads == Tier::kHost) way.fixed_bytes += request.gradient_bytes;
  if (placement.params != Tier::kNvme) {
    way.fixed_bytes += request.in_place_bytes;
  } else {
    way.drive_bytes += request.in_place_moved_bytes;
    if (placement.grads == Tier::kHost) {
      way.fixed_bytes -= std::min(request.gradient_bytes, request.in_place_gradient_bytes);
      way.drive_bytes += 2 * request.in_place_gradient_bytes;
    }
  }
  if (placement.params == Tier::kDevice) {  // nothing is brought
    way.units.least_bytes = std::max(request.units_least_bytes, request.units_all_bytes);
  } else {
    way.copied_bytes = 2 * request.brought_bytes;
  }
  if (placement.params == Tier::kNvme) {
    way.units.most_bytes = request.units_all_bytes;
    way.units.drive_saved_bytes = its.params;
    way.units.copies_saved_bytes = request.brought_bytes;
  } else if (placement.params == Tier::kHost && !request.live_there) {
    way.units.most_bytes = request.units_all_bytes;
    way.units.copies_saved_bytes = request.brought_bytes;
  }
  return way;
}

/// Returns the choice among ways that work well or, if none of them fits, that work at all.
template <class Ways>
AutoChoice chosen(const Ways& ways_with, const AutoRoom& room, const MovingSpeeds& speeds) {
  const std::vector<AutoWay> comfortable = ways_with(AutoLeast::kComfortable);
  if (const auto choice = choose_auto(comfortable, room, speeds)) return *choice;
  const std::vector<AutoWay> bare = ways_with(AutoLeast::kBare);
  if (const auto choice = choose_auto(bare, room, speeds)) return *choice;
  refuse_auto(bare, room);
}

}  // namespace

std::span<const Placement> automatic_placements() { return kPlacements; }

std::vector<AutoWay> run_ways(RunRequest request, AutoLeast least) {
  if (!request.placement.automatic) return {run_way(request, least)};
  std::vector<AutoWay> ways;
  for (const Placement& placement : automatic_placements()) {
    request.placement = placement;
    ways.push_back(run_way(request, least));
  }
  return ways;
}

RunChoice choose_run(RunRequest request, AutoRoom room, const MovingSpeeds& speeds) {
  if (request.budgets.device_bytes > 0) room.units_bytes = request.budgets.device_bytes;
  if (request.budgets.host_bytes > 0) room.host_bytes = request.budgets.host_bytes;
  room.grain_bytes = kGrainBytes;
  const AutoChoice choice =
      chosen([&](AutoLeast least) { return run_ways(request, least); }, room, speeds);
  request.placement = choice.placement;
  request.budgets = {.device_bytes = choice.units_bytes, .host_bytes = choice.host_bytes};
  std::string why = fmt::format("auto: {}, `device_memory` {} and `host_memory` {}: {}",
                                to_string(choice.placement), format_bytes(choice.units_bytes),
                                format_bytes(choice.host_bytes), reason(choice, room, speeds));
  return {.choice = choice, .plan = plan_run(request), .why = std::move(why)};
}

std::vector<AutoWay> unit_ways(const UnitsRequest& request, AutoLeast least) {
  const ModelSpec model = packed_model(numbered_model(request.model), request.state.format);
  const Tables tables(model, request.state, {}, kChunkTilesMax);
  std::vector<AutoWay> ways;
  for (const Tier params : params_tiers(request))
    for (const Tier grads : tiers_of(request.grads))
      for (const Tier optimizer : tiers_of(request.optimizer)) {
        const Placement placement{.params = params, .grads = grads, .optimizer = optimizer};
        if (may_be(request, placement)) ways.push_back(unit_way(request, tables, placement, least));
      }
  return ways;
}

UnitsChoice choose_units(const UnitsRequest& request, AutoRoom room, const MovingSpeeds& speeds) {
  room.grain_bytes = kGrainBytes;
  const auto ways_with = [&](AutoLeast least) {
    std::vector<AutoWay> ways = unit_ways(request, least);
    if (ways.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "`store` is missing: give a directory on a drive for what is placed on NVMe");
    }
    return ways;
  };
  const AutoChoice choice = chosen(ways_with, room, speeds);
  return {.choice = choice, .why = reason(choice, room, speeds)};
}

}  // namespace ziggurat
