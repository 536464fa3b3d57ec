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

/// The parameters in this rank's file of the store `config.store`, in the store's order; none where
/// there is no such file. Nothing is written, locked or asked of other ranks. Errors: kDataLoss for
/// a file that says nothing any more.
std::optional<ModelSpec> stored_params(Runtime& runtime, const EngineConfig& config);
/// A JSON array of {"name", "shape", "dtype"}.
std::string stored_params_json(const std::optional<ModelSpec>& model);

}  // namespace ziggurat
