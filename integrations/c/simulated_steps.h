// SPDX-License-Identifier: Apache-2.0
// integrations/c/simulated_steps.h: how long steps take that a trainer has recorded one of, over an
// engine in virtual time on this machine as it was measured.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "integrations/c/embedded_engine.h"

namespace ziggurat {

/// Answers ziggurat_simulate(). Errors: rehearse_lent()'s, and kInvalidArgument for a recording
/// that is not what ziggurat.h says, or on a machine that has not been measured.
std::string simulated_steps_json(const std::vector<EmbeddedParam>& params, EmbeddedConfig config,
                                 std::string_view recording);

}  // namespace ziggurat
