// SPDX-License-Identifier: Apache-2.0
// integrations/c/settings_json.h: settings of an embedder, read from its JSON.
//
// An engine's settings have the names of the table of settings (core/engine/engine_settings.h), as
// in a file of `ziggurat train --config`; "store", "run", "first_elements", "pieces", "wholes",
// "device" and "progress" are beside them. A runtime has settings of its own. What an embedder does
// not give has the engine's default, except that clipping is off, because trainers clip by
// themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "collectives/rank_options.h"
#include "core/engine/engine_config.h"
#include "core/sharding/whole_place.h"

namespace ziggurat {

struct RuntimeSettings {
  std::size_t threads = 0;
  RankOptions ranks;  ///< one rank if none is given, whatever the environment says
};

/// The settings of an engine, and what is not the engine's.
struct EmbeddedConfig : EngineConfig {
  EmbeddedConfig() = default;
  EmbeddedConfig(EngineConfig engine) : EngineConfig(std::move(engine)) {}
  /// Host memory for streamed parameters while they are acquired; 0 if there are none.
  std::uint64_t device_bytes = 0;
  std::uint64_t device = 0;  ///< handle of an EmbeddedDevice in place of that memory; 0 if none
  /// What each parameter is of a whole one (WholePlace); empty if that is not said.
  std::vector<WholePlace> pieces;
};

struct StashSettings {
  std::vector<StoreDirectory> store;
  std::uint64_t memory_bytes = 0;
};

/// Read the settings of an engine, of a runtime and of a stash. Errors: kInvalidArgument naming the
/// key, its value and what would be right.
EmbeddedConfig engine_config_of(std::string_view json);
RuntimeSettings runtime_settings_of(std::string_view json);
StashSettings stash_settings_of(std::string_view json);

}  // namespace ziggurat
