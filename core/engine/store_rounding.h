// SPDX-License-Identifier: Apache-2.0
// core/engine/store_rounding.h: how the state of a store is rounded: what it was made with, for its
// life.
//
// A store names its rounding in its layout (ChunkTable::rounding()) if it may draw noise: noise is
// then of parameters, by name. Stores that name none are those of earlier versions, whose rounding
// is what each run says, by noise of tiles; and those where nothing is rounded with noise.
#pragma once

#include <optional>

#include "core/checkpoint/state_content.h"
#include "core/engine/engine_config.h"

namespace ziggurat {

/// How parameters are made of fp32 masters, where no store says otherwise.
inline Rounding param_rounding(const OptimizerConfig& config) {
  return config.param_rounding.value_or(Rounding::kNearest);
}

/// The roundings that a new store records.
std::optional<Roundings> rounding_of_new_store(const OptimizerConfig& config);

/// The roundings that a new store records whose state is a copy: the source's, unless the config
/// says otherwise. Arrays that come to bf16, and what the source did not record, begin as in a new
/// store; but `in_place`, in the store's own directories, what was not recorded stays so.
std::optional<Roundings> rounding_of_copy(const OptimizerConfig& config, const StateContent& of,
                                          bool in_place);

/// The roundings that steps use on a store that records `named`. Errors: kInvalidArgument if the
/// config asks for another rounding than is named, of what the format rounds.
Roundings rounding_of_store(const OptimizerConfig& config, const std::optional<Roundings>& named);

}  // namespace ziggurat
