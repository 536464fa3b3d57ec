// SPDX-License-Identifier: Apache-2.0
// integrations/c/chosen_memory.cc: reads a trainer's facts, and asks core/plan/auto_ways.h.
#include "integrations/c/chosen_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/topology/core_budget.h"
#include "core/plan/auto_ways.h"
#include "integrations/c/measured_drives.h"
#include "integrations/c/wrong.h"

namespace ziggurat {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMost = std::uint64_t{1} << 56;  ///< so that sums have no overflow

/// Reads the facts key by key; a key that nobody reads is an error.
class Facts {
 public:
  explicit Facts(std::string_view text) : its_(json::parse(text, nullptr, false)) {
    if (!its_.is_object()) throw wrong("facts: the text must be a JSON object");
  }

  std::optional<std::uint64_t> size(const char* key) {
    const std::optional<json> found = take(key);
    if (!found) return std::nullopt;
    if (!found->is_number_unsigned() || found->get<std::uint64_t>() >= kMost)
      throw wrong(fmt::format("facts: \"{}\" must be a whole number below 2^56", key));
    return found->get<std::uint64_t>();
  }
  bool truth(const char* key) {
    const std::optional<json> found = take(key);
    if (found && !found->is_boolean())
      throw wrong(fmt::format("facts: \"{}\" must be true or false", key));
    return found && found->get<bool>();
  }
  std::optional<Tier> tier(const char* key) {
    const std::optional<json> found = take(key);
    if (!found) return std::nullopt;
    if (*found == "host") return Tier::kHost;
    if (*found == "nvme") return Tier::kNvme;
    throw wrong(fmt::format("facts: \"{}\" must be \"host\" or \"nvme\"", key));
  }
  void require_all_read() const {
    if (!its_.empty()) throw wrong(fmt::format("facts: unknown key \"{}\"", its_.begin().key()));
  }

 private:
  std::optional<json> take(const char* key) {
    const auto found = its_.find(key);
    if (found == its_.end()) return std::nullopt;
    json value = *found;
    its_.erase(found);
    return value;
  }

  json its_;
};

}  // namespace

std::string chosen_memory_json(const std::vector<EmbeddedParam>& params,
                               const EmbeddedConfig& config, std::string_view facts) {
  Facts its(facts);
  const UnitsRequest request{
      .model = embedded_model(params, config),
      .state = config.optimizer.state,
      .units_least_bytes = its.size("units_least_bytes").value_or(0),
      .units_all_bytes = its.size("units_all_bytes").value_or(0),
      .brought_bytes = its.size("brought_bytes").value_or(0),
      .live_there = its.truth("live_there"),
      .gradient_bytes = its.size("gradient_bytes").value_or(0),
      .beside_bytes = its.size("beside_bytes").value_or(0),
      .in_place_bytes = its.size("in_place_bytes").value_or(0),
      .in_place_moved_bytes = its.size("in_place_moved_bytes").value_or(0),
      .in_place_gradient_bytes = its.size("in_place_gradient_bytes").value_or(0),
      .has_store = !config.store.empty(),
      .needs_store = config.durable_every_steps > 1,
      .has_folder = its.truth("has_folder"),
      .params = its.tier("params"),
      .grads = its.tier("grads"),
      .optimizer = its.tier("optimizer")};
  const LocalRank local = local_rank();
  const std::uint64_t all_ranks = std::max<std::uint64_t>(1, its.size("node_ranks").value_or(1));
  AutoRoom room{.free_bytes = its.size("free_bytes").value_or(0),
                .node_ranks = local.source.empty() ? all_ranks : local.count,
                .share = kUncountedShare,
                .units_bytes = its.size("memory")};
  const std::uint64_t most_here = kMost / room.node_ranks;  // of each of these ranks
  room.free_bytes += room.node_ranks * std::min(most_here, its.size("here_bytes").value_or(0));
  if (config.host_budget_bytes > 0) room.host_bytes = config.host_budget_bytes;
  its.require_all_read();
  const MovingSpeeds speeds = measured_speeds(config.store);
  const UnitsChoice chosen = choose_units(request, room, speeds);
  const AutoChoice& choice = chosen.choice;
  const bool in_memory = choice.placement.optimizer == Tier::kHost;
  return json{{"placement", to_string(choice.placement)},
              {"memory", choice.units_bytes},
              {"host_memory", in_memory ? 0 : choice.host_bytes},
              {"takes_bytes", choice.memory_bytes},
              {"drive_bytes", choice.drive_bytes},
              {"drive_s", speeds.drive_measured ? choice.drive_s : 0.0},
              {"why", chosen.why}}
      .dump();
}

}  // namespace ziggurat
