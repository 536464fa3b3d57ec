// SPDX-License-Identifier: Apache-2.0
// integrations/c/chosen_placement.cc: asks the engine's own choice.
#include "integrations/c/chosen_placement.h"

#include <nlohmann/json.hpp>

#include "base/topology/core_budget.h"
#include "core/plan/lent_placement.h"

namespace ziggurat {

std::string chosen_placement_json(const std::vector<EmbeddedParam>& params,
                                  const EmbeddedConfig& config, std::uint64_t free_bytes) {
  const LentPlacementChoice choice =
      choose_lent_placement({.model = embedded_model(params, config),
                             .state = config.optimizer.state,
                             .has_store = !config.store.empty(),
                             .durable_every_steps = config.durable_every_steps,
                             .host_budget_bytes = config.host_budget_bytes,
                             .free_bytes = free_bytes,
                             .node_ranks = local_rank().count});
  return nlohmann::json{{"placement", to_string(choice.placement)},
                        {"why", choice.why},
                        {"state_bytes", choice.state_bytes},
                        {"beside_nvme_bytes", choice.beside_nvme_bytes}}
      .dump();
}

}  // namespace ziggurat
