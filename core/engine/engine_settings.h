// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_settings.h: the table of the engine's settings: what a flag, a file's key or a
// keyword argument sets in an EngineConfig, and what ranks must have alike.
//
// A new setting is a field of EngineConfig, an entry here, and its user. A field that has no entry
// is one that a trainer works out (tests/core/engine_settings_test.cc counts them).
#pragma once

#include <span>

#include "base/setting.h"
#include "core/engine/engine_config.h"

namespace ziggurat {

std::span<const SettingOf<EngineConfig>> engine_settings();

/// What `config` asks for on so many ranks. Errors: resolve()'s, and kInvalidArgument where
/// tensor_parallel does not divide them.
Strategy strategy_of(const EngineConfig& config, int ranks);

}  // namespace ziggurat
