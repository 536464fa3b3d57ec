// SPDX-License-Identifier: Apache-2.0
// optimizer/loss_scale.h: how much a loss is multiplied by so that its gradients fit fp16.
//
// A value: the trainer multiplies its loss by scale(), gives the same number to the engine
// (StepOptions::loss_scale), and tells the scaler whether the step was skipped. What a resumed run
// needs is state(), saved with the step. Names and behaviour are DeepSpeed 0.19.8's
// (runtime/fp16/loss_scaler.py, the scaler of its ZeRO stages). Source of the method: Micikevicius
// et al. 2018, section 3.2.
#pragma once

#include <cstdint>

namespace ziggurat {

/// The keys of DeepSpeed's "fp16" block.
struct LossScaleConfig {
  double loss_scale = 0;  ///< this scale always; 0: dynamic, by the rest
  int initial_scale_power = 16;
  /// The scale doubles in a step before which a multiple of so many had no overflow.
  std::uint64_t loss_scale_window = 1000;
  std::uint64_t hysteresis = 2;  ///< the overflow that halves the scale; those before are forgiven
  /// Forgiveness is whole again after any step without overflow, not only when the scale doubles.
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
};

class LossScaler {
 public:
  struct State {
    double scale;
    std::uint64_t hysteresis_left;
    std::uint64_t steps_since_overflow;  ///< or since the start
    bool operator==(const State&) const = default;
  };

  /// Errors: kInvalidArgument naming the parameter.
  explicit LossScaler(const LossScaleConfig& config);
  /// Goes on from `state`, which may be from other settings: a static scale wins over it, a new
  /// minimum raises it.
  LossScaler(const LossScaleConfig& config, const State& state);

  double scale() const noexcept { return state_.scale; }
  const State& state() const noexcept { return state_; }
  bool dynamic() const noexcept { return config_.loss_scale == 0; }

  /// A step ended: `overflow` if its gradients were not finite, and it was skipped.
  /// Errors: kUnavailable if the scale would have to fall below its minimum; the state stands.
  void update(bool overflow);

 private:
  LossScaleConfig config_;
  State state_;
};

}  // namespace ziggurat
