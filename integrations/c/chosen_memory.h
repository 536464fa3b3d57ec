// SPDX-License-Identifier: Apache-2.0
// integrations/c/chosen_memory.h: what `auto` would give a trainer whose units the engine brings:
// where its state is, and how much memory units and records have.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "integrations/c/embedded_engine.h"

namespace ziggurat {

/// Answers ziggurat_choose_memory() on this machine. Errors: choose_units()'s, and kInvalidArgument
/// for facts that are not what ziggurat.h says.
std::string chosen_memory_json(const std::vector<EmbeddedParam>& params,
                               const EmbeddedConfig& config, std::string_view facts);

}  // namespace ziggurat
