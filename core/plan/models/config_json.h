// SPDX-License-Identifier: Apache-2.0
// core/plan/models/config_json.h: reads a model's sizes from the config.json that transformers
// writes beside weights, and holds them to the index of safetensors if there is one.
//
// A model_type that is not known here is refused, because a family that computes something else
// would give wrong counts without any message. Reads files, blocking.
#pragma once

#include <string>
#include <string_view>

#include "core/plan/models/model_shape.h"

namespace ziggurat {

/// Reads the text of a config.json. Errors: kInvalidArgument naming `place`, the key and what is
/// wrong with it.
ModelShape parse_model_config(std::string_view text, const std::string& place);

/// Reads a config.json, or the one in a directory. With model.safetensors.index.json beside it, its
/// bytes must be those of the parameters in a type of 1, 2 or 4 bytes. Errors: errno's, and
/// parse_model_config()'s; kInvalidArgument if the index has other bytes.
ModelShape read_model_config(const std::string& path);

/// Returns the model that `text` names: the path of a config.json or of its directory, a name of
/// named_models(), or sizes such as 32x4096x32 (layers, hidden, heads) with GPT-2's vocabulary.
/// Errors: kInvalidArgument listing what works, and read_model_config()'s.
ModelShape find_model(const std::string& text);

}  // namespace ziggurat
