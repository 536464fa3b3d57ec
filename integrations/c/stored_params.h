// SPDX-License-Identifier: Apache-2.0
// integrations/c/stored_params.h: what a store has of an embedder's parameters, before it is
// opened.
#pragma once

#include <optional>
#include <string>

#include "core/engine/engine_config.h"
#include "core/engine/runtime.h"
#include "core/sharding/model_spec.h"

namespace ziggurat {

/// Returns the parameters in this rank's file of the store `config.store`, in the store's order;
/// nothing if there is no such file. Writes and locks nothing, and asks no other rank. Errors:
/// kDataLoss for a file that is too damaged to say what it has.
std::optional<ModelSpec> stored_params(Runtime& runtime, const EngineConfig& config);
/// Returns a JSON array of {"name", "shape", "dtype", "whole"}, the last one {"name", "shape"} or
/// null.
std::string stored_params_json(const std::optional<ModelSpec>& model);

}  // namespace ziggurat
