// SPDX-License-Identifier: Apache-2.0
// integrations/cli/hf_config.h: config.json, by which transformers knows a model: ours written, and
// another's compared with ours.
#pragma once

#include <string>

#include "base/dtype.h"
#include "integrations/gpt/model.h"

namespace ziggurat::cli {

/// The text of config.json.
std::string hf_config(const gpt::ModelConfig& model, DType dtype);
/// Weights of such a config are `model`'s: what shapes do not show, heads and activations, too.
/// Errors: kInvalidArgument naming `place` and the key; kDataLoss for what is no JSON.
void require_hf_config(const std::string& text, const gpt::ModelConfig& model,
                       const std::string& place);

}  // namespace ziggurat::cli
