// SPDX-License-Identifier: Apache-2.0
// optimizer/loss_scale.cc: halves the scale on overflow, and doubles it after a while without.
#include "optimizer/loss_scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace ziggurat {
namespace {

constexpr double kFactor = 2.0;

/// The largest power of a scale that fits a float, because gradients are divided by it in fp32.
constexpr int kScalePowerMax = 126;

void require(bool good, const std::string& message) {
  if (!good) throw Error(ErrorCode::kInvalidArgument, message);
}

const LossScaleConfig& checked(const LossScaleConfig& config) {
  const double max = std::ldexp(1.0, kScalePowerMax);
  require(config.loss_scale >= 0 && config.loss_scale <= max,
          fmt::format("loss_scale {:g} must be 0 (dynamic), or more than 0 and at most 2^{}",
                      config.loss_scale, kScalePowerMax));
  require(config.initial_scale_power >= 0 && config.initial_scale_power <= kScalePowerMax,
          fmt::format("initial_scale_power {} must be from 0 to {}", config.initial_scale_power,
                      kScalePowerMax));
  require(config.loss_scale_window > 0, "loss_scale_window is 0, but must be 1 or more");
  require(config.hysteresis > 0, "hysteresis is 0, but must be 1 or more");
  require(config.min_loss_scale > 0 && config.min_loss_scale <= max,
          fmt::format("min_loss_scale {:g} must be more than 0 and at most 2^{}",
                      config.min_loss_scale, kScalePowerMax));
  return config;
}

}  // namespace

LossScaler::LossScaler(const LossScaleConfig& config)
    : LossScaler(config, {.scale = std::ldexp(1.0, checked(config).initial_scale_power),
                          .hysteresis_left = config.hysteresis,
                          .steps_since_overflow = 0}) {}

LossScaler::LossScaler(const LossScaleConfig& config, const State& state)
    : config_(checked(config)), state_(state) {
  state_.scale = dynamic() ? std::max(state.scale, config.min_loss_scale) : config.loss_scale;
  state_.hysteresis_left = std::clamp<std::uint64_t>(state.hysteresis_left, 1, config.hysteresis);
}

void LossScaler::update(bool overflow) {
  if (!dynamic()) return;
  if (overflow) {
    if (state_.hysteresis_left > 1) {
      --state_.hysteresis_left;
    } else if (state_.scale > config_.min_loss_scale || !config_.ends_at_minimum) {
      state_.scale = std::max(state_.scale / kFactor, config_.min_loss_scale);
    } else {
      throw Error(ErrorCode::kNotFinite,
                  fmt::format("the gradients overflow at the smallest loss scale, {:g}; lower the "
                              "learning rate, lengthen its warm-up, or lower `min_loss_scale`",
                              state_.scale));
    }
    state_.steps_since_overflow = 0;
    return;
  }
  const std::uint64_t steps = state_.steps_since_overflow++;
  const bool grow = steps > 0 && steps % config_.loss_scale_window == 0;
  if (grow || config_.consecutive_hysteresis) state_.hysteresis_left = config_.hysteresis;
  if (grow) state_.scale = std::min(state_.scale * kFactor, config_.max_loss_scale);
}

}  // namespace ziggurat
