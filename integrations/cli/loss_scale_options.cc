// SPDX-License-Identifier: Apache-2.0
// integrations/cli/loss_scale_options.cc: the table of the loss-scale settings, and the check of
// their values.
#include "integrations/cli/loss_scale_options.h"

#include <fmt/format.h>

#include <vector>

#include "integrations/cli/settings.h"

namespace ziggurat::cli {

std::span<const SettingOf<LossScaleConfig>> loss_scale_settings() {
  using In = SettingsIn<LossScaleConfig>;
  using C = LossScaleConfig;
  static const std::vector<SettingOf<LossScaleConfig>> table{
      In::number("loss_scale", &C::loss_scale, {},
                 {.values = "X",
                  .help = "fp16: multiply the loss by X before the backward pass; 0 makes the loss "
                          "scale dynamic"}),
      In::integer("initial_scale_power", &C::initial_scale_power, {.min = 0, .max = 126},
                  {.values = "N", .help = "fp16: the dynamic loss scale begins at 2^N"}),
      In::integer("loss_scale_window", &C::loss_scale_window, {.min = 1},
                  {.values = "N",
                   .help = "fp16: number of steps without overflow after which the scale doubles"}),
      In::integer(
          "hysteresis", &C::hysteresis, {.min = 1},
          {.values = "N", .help = "fp16: the N-th overflow halves the scale; earlier ones do not"}),
      In::truth(
          "consecutive_hysteresis", SettingKind::kSwitch, &C::consecutive_hysteresis,
          {.help = "fp16: start to count overflows from 0 again after each step without one"}),
      In::number("min_loss_scale", &C::min_loss_scale, {},
                 {.values = "X", .help = "fp16: smallest value of the dynamic loss scale"}),
  };
  return table;
}

void make_loss_scale(LossScaleOptions& options, const Settings& settings, DType dtype) {
  if (dtype != DType::kFloat16) {
    for (const Setting& setting : loss_scale_settings()) {
      if (!settings.given(setting.name)) continue;
      throw UsageError(fmt::format(
          "{}: gradients in {} are not scaled; leave this setting out, or give --dtype fp16",
          settings.described(setting.name), to_string(dtype)));
    }
    return;
  }
  try {
    static_cast<void>(LossScaler(options.given));
  } catch (const Error& error) {
    throw UsageError(fmt::format("--dtype fp16: {}", error.what()));
  }
  options.config = options.given;
  for (const SettingOf<LossScaleConfig>& setting : loss_scale_settings())
    options.parameters[dashed(setting.name)] = setting.text(options.given);
}

}  // namespace ziggurat::cli
