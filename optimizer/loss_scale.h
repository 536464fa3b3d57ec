// SPDX-License-Identifier: Apache-2.0
// optimizer/loss_scale.h: the factor by which a loss is multiplied so that its gradients fit fp16.
//
// A plain value: the trainer multiplies its loss by scale(), gives the same number to the engine
// (StepOptions::loss_scale), and tells the scaler whether the step was skipped. state(), which is
// saved with the step, is all that a resumed run needs. Names and behaviour are those of DeepSpeed
// 0.19.8 (runtime/fp16/loss_scaler.py, the scaler of its ZeRO stages). The method is from
// Micikevicius et al. 2018, section 3.2.
#pragma once

#include <cstdint>

namespace ziggurat {

/// The settings; the names are keys of DeepSpeed's "fp16" block.
struct LossScaleConfig {
  double loss_scale = 0;  ///< a static scale; 0 makes it dynamic, by the other settings
  int initial_scale_power = 16;
  /// The scale doubles in a step before which a multiple of this many steps had no overflow.
  std::uint64_t loss_scale_window = 1000;
  std::uint64_t hysteresis = 2;  ///< which overflow halves the scale; the ones before are ignored
  /// If true, every step without overflow restores `hysteresis`; if false, only a doubling of the
  /// scale does.
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
  /// Where it stops to grow: gradients are divided by it in fp32.
  double max_loss_scale = 0x1p126;
  /// Whether an overflow at min_loss_scale is an error; else the scale stays there. DeepSpeed's
  /// `raise_error_at_min_scale`, which it leaves unset without ZeRO.
  bool ends_at_minimum = true;
};

class LossScaler {
 public:
  struct State {
    double scale;
    std::uint64_t hysteresis_left;
    std::uint64_t steps_since_overflow;  ///< since the start if there was no overflow
    bool operator==(const State&) const = default;
  };

  /// Errors: kInvalidArgument, naming the setting.
  explicit LossScaler(const LossScaleConfig& config);
  /// Continues from `state`, which may be from other settings: a static scale replaces the saved
  /// one, and a higher minimum raises it.
  LossScaler(const LossScaleConfig& config, const State& state);

  double scale() const noexcept { return state_.scale; }
  const State& state() const noexcept { return state_; }
  bool dynamic() const noexcept { return config_.loss_scale == 0; }

  /// Ends a step. `overflow` says that its gradients were not finite, so that it was skipped.
  /// Errors: kNotFinite if the scale would have to fall below its minimum, unless it may stay
  /// there; the state does not change then.
  void update(bool overflow);

 private:
  LossScaleConfig config_;
  State state_;
};

}  // namespace ziggurat
