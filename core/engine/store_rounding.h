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

/// What a new store names.
std::optional<Roundings> rounding_of_new_store(const OptimizerConfig& config);

/// What a new store names whose state is a copy: as it was, unless the config says otherwise; but
/// arrays that were not in bf16 and now are begin as in a new store, and so does what was not
/// named, except `in_place`, in the store's own directories.
std::optional<Roundings> rounding_of_copy(const OptimizerConfig& config, const StateContent& of,
                                          bool in_place);

/// What steps on a store do that names `named`. Errors: kInvalidArgument if the config asks for
/// another rounding than is named, of what the format rounds.
Roundings rounding_of_store(const OptimizerConfig& config, const std::optional<Roundings>& named);

}  // namespace ziggurat
