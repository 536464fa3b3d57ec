// SPDX-License-Identifier: Apache-2.0
// core/engine/state/store_rounding.h: how the state of a store is rounded. This is decided when the
// store is made and never changes.
//
// A store records its rounding in its layout (ChunkTable::rounding()) if the rounding may use
// noise; the noise then depends on the parameters' names. A store without a record is either of an
// earlier version, whose rounding each run decides, with noise that depends on tiles; or it is a
// store in which nothing is rounded with noise.
#pragma once

#include <optional>

#include "core/checkpoint/state_content.h"
#include "core/engine/engine_config.h"

namespace ziggurat {

/// Returns how parameters are made from fp32 masters if no store records it.
inline Rounding param_rounding(const OptimizerConfig& config) {
  return config.param_rounding.value_or(Rounding::kNearest);
}

/// Returns the roundings that a new store records.
std::optional<Roundings> rounding_of_new_store(const OptimizerConfig& config);

/// Returns the roundings that a new store records if its state is a copy. They are the source's,
/// unless the config says otherwise. Arrays that become bf16, and roundings that the source did not
/// record, are treated as in a new store. But `in_place`, in the store's own directories, what was
/// not recorded stays unrecorded.
std::optional<Roundings> rounding_of_copy(const OptimizerConfig& config, const StateContent& of,
                                          bool in_place);

/// Returns the roundings that steps use with a store that records `named`. Errors: kInvalidArgument
/// if the config asks for another rounding than the recorded one, for values that the format
/// rounds.
Roundings rounding_of_store(const OptimizerConfig& config, const std::optional<Roundings>& named);

}  // namespace ziggurat
