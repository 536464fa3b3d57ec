// SPDX-License-Identifier: Apache-2.0
// integrations/cli/loss_scale_options.cc: the table, and what each parameter may be.
#include "integrations/cli/loss_scale_options.h"

#include <fmt/format.h>

#include <vector>

namespace ziggurat::cli {

std::span<const Setting> loss_scale_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table{
      {"loss-scale", kNumber, "0", "X", "fp16: the loss times X for backward; 0: dynamic"},
      {"initial-scale-power", kInteger, "16", "N", "fp16: a dynamic loss scale begins at 2^N"},
      {"loss-scale-window", kInteger, "1000", "N", "fp16: steps without overflow until it doubles"},
      {"hysteresis", kInteger, "2", "N", "fp16: which overflow halves it; those before do not"},
      {"consecutive-hysteresis", kSwitch, "false", "",
       "fp16: count overflows anew after each step without one"},
      {"min-loss-scale", kNumber, "1", "X", "fp16: the dynamic loss scale's minimum"},
  };
  return table;
}

LossScaleOptions read_loss_scale(const Settings& settings, DType dtype) {
  LossScaleOptions options;
  if (dtype != DType::kFloat16) {
    for (const Setting& setting : loss_scale_settings()) {
      if (!settings.given(setting.key)) continue;
      throw UsageError(
          fmt::format("{}: gradients in {} are not scaled; a loss scale is for --dtype "
                      "fp16",
                      settings.described(setting.key), to_string(dtype)));
    }
    return options;
  }
  LossScaleConfig config;
  config.loss_scale = settings.number("loss-scale", {});
  config.initial_scale_power =
      static_cast<int>(settings.integer("initial-scale-power", {.min = 0, .max = 126}));
  config.loss_scale_window =
      static_cast<std::uint64_t>(settings.integer("loss-scale-window", {.min = 1}));
  config.hysteresis = static_cast<std::uint64_t>(settings.integer("hysteresis", {.min = 1}));
  config.consecutive_hysteresis = settings.on("consecutive-hysteresis");
  config.min_loss_scale = settings.number("min-loss-scale", {});
  try {
    static_cast<void>(LossScaler(config));
  } catch (const Error& error) {
    throw UsageError(fmt::format("--dtype fp16: {}", error.what()));
  }
  options.config = config;
  for (const Setting& setting : loss_scale_settings())
    options.parameters[setting.key] = settings.text(setting.key);
  return options;
}

}  // namespace ziggurat::cli
