// SPDX-License-Identifier: Apache-2.0
// integrations/cli/loss_scale_options.h: the settings of the loss scale, which --dtype fp16 has and
// no other.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>

#include "base/dtype.h"
#include "integrations/cli/settings.h"
#include "optimizer/loss_scale.h"

namespace ziggurat::cli {

/// The parameters of DeepSpeed's "fp16" block: its names, with dashes.
std::span<const Setting> loss_scale_settings();

struct LossScaleOptions {
  std::optional<LossScaleConfig> config;          ///< none: gradients are not scaled
  std::map<std::string, std::string> parameters;  ///< by key, as text; empty where there is none
};

/// The scale of a run in `dtype`. Errors: UsageError, also for a parameter given without fp16.
LossScaleOptions read_loss_scale(const Settings& settings, DType dtype);

}  // namespace ziggurat::cli
