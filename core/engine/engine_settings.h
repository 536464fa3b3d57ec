// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_settings.h: the table of the engine's settings. It says which flag, key of a
// file or keyword argument sets each member of an EngineConfig, and which settings all ranks must
// share.
//
// A new setting needs a member of EngineConfig, an entry in the table, and code that uses it. A
// member without an entry is one that the trainer computes (tests/core/engine_settings_test.cc
// counts these).
#pragma once

#include <span>

#include "base/setting.h"
#include "core/engine/engine_config.h"

namespace ziggurat {

std::span<const SettingOf<EngineConfig>> engine_settings();

/// Returns the strategy that `config` asks for with this number of ranks. Errors: resolve()'s;
/// kInvalidArgument if tensor_parallel does not divide `ranks`.
Strategy strategy_of(const EngineConfig& config, int ranks);

}  // namespace ziggurat
