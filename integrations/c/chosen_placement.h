// SPDX-License-Identifier: Apache-2.0
// integrations/c/chosen_placement.h: what `placement=auto` would choose for an embedder's
// parameters, before an engine is opened.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "integrations/c/embedded_engine.h"

namespace ziggurat {

/// Returns the choice on this machine as a JSON object with "placement", "why", "state_bytes" and
/// "beside_nvme_bytes" (LentPlacementChoice). `config.placement` is not looked at. Errors: those
/// of choose_lent_placement(), and kInvalidArgument for parameters that make no model.
std::string chosen_placement_json(const std::vector<EmbeddedParam>& params,
                                  const EmbeddedConfig& config, std::uint64_t free_bytes);

}  // namespace ziggurat
