// SPDX-License-Identifier: Apache-2.0
// integrations/c/settings_json.h: settings of an embedder, from its JSON.
//
// By the names of the table of settings (core/engine/engine_settings.h), as in a file of
// `ziggurat train --config`; "store", "run" and "progress" beside them. A runtime's are its own.
// What an embedder does not say is the engine's default, but for clipping: trainers clip by
// themselves, so it is off.
#pragma once

#include <cstddef>
#include <string_view>

#include "collectives/rank_options.h"
#include "core/engine/engine_config.h"

namespace ziggurat {

struct RuntimeSettings {
  std::size_t threads = 0;
  RankOptions ranks;  ///< one rank where nothing is said, whatever the environment says
};

/// Errors of both: kInvalidArgument naming the key, its value and what would do.
EngineConfig engine_config_of(std::string_view json);
RuntimeSettings runtime_settings_of(std::string_view json);

}  // namespace ziggurat
