// SPDX-License-Identifier: Apache-2.0
// core/plan/models/named_models.h: published models by name. Each row has the sizes of the model's
// own config.json, or of its paper where it has none.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/plan/models/model_shape.h"

namespace ziggurat {

std::span<const ModelShape> named_models();

/// Returns the model with that name; case does not matter, and neither does an owner before the
/// last slash, nor a suffix such as "-Instruct-2507". nullopt if there is none.
std::optional<ModelShape> named_model(std::string_view name);

/// Returns all names, separated by commas.
std::string model_names();

}  // namespace ziggurat
