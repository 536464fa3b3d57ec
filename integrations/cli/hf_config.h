// SPDX-License-Identifier: Apache-2.0
// integrations/cli/hf_config.h: writes config.json, which tells transformers what a model is, and
// compares the config.json of other weights with our model.
#pragma once

#include <string>

#include "base/dtype.h"
#include "integrations/gpt/model.h"

namespace ziggurat::cli {

/// Returns the text of a config.json for `model` with weights in `dtype`.
std::string hf_config(const gpt::ModelConfig& model, DType dtype);
/// Checks that `text`, the config.json of some weights, describes `model`, including what shapes do
/// not show, such as heads and activations. Errors: kInvalidArgument naming `place` and the key;
/// kDataLoss if `text` is not a JSON object.
void require_hf_config(const std::string& text, const gpt::ModelConfig& model,
                       const std::string& place);

}  // namespace ziggurat::cli
