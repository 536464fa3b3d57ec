// SPDX-License-Identifier: Apache-2.0
// integrations/cli/loss_scale_options.h: the settings of the loss scale, which only fp16 has.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/setting.h"
#include "optimizer/loss_scale.h"

namespace ziggurat::cli {

class Settings;

/// Returns the settings of the loss scale, named as in DeepSpeed's "fp16" block.
std::span<const SettingOf<LossScaleConfig>> loss_scale_settings();

struct LossScaleOptions {
  LossScaleConfig given;
  std::optional<LossScaleConfig> config;          ///< none if gradients are not scaled
  std::map<std::string, std::string> parameters;  ///< text by flag; empty if there is no loss scale
};

/// Checks options.given and makes it the loss scale of a run in `dtype`. Errors: UsageError, also
/// for a setting given without fp16.
void make_loss_scale(LossScaleOptions& options, const Settings& settings, DType dtype);

}  // namespace ziggurat::cli
