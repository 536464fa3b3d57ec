// SPDX-License-Identifier: Apache-2.0
// integrations/cli/loss_scale_options.h: the settings of the loss scale, which fp16 has and no
// other type.
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

/// The parameters of DeepSpeed's "fp16" block, by its names.
std::span<const SettingOf<LossScaleConfig>> loss_scale_settings();

struct LossScaleOptions {
  LossScaleConfig given;
  std::optional<LossScaleConfig> config;          ///< none: gradients are not scaled
  std::map<std::string, std::string> parameters;  ///< by flag, as text; empty where there is none
};

/// What is `given` is the scale of a run in `dtype`. Errors: UsageError, also for a parameter given
/// without fp16.
void make_loss_scale(LossScaleOptions& options, const Settings& settings, DType dtype);

}  // namespace ziggurat::cli
