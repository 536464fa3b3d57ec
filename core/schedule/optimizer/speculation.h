// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/speculation.h: whether a step's update may start before the norm is
// known, on the guess that it demands no clipping.
//
// Watches how often the guess would have been right: an exponentially decayed rate of the norms so
// far, also of those of steps that did not guess. A wrong guess moves a sweep's records twice, a
// right one hides them in backward, so it pays only where it is right most of the time. A function
// of the sequence of norms and nothing else: every rank decides the same, and a run can be
// repeated.
#pragma once

namespace ziggurat {

class SpeculationWatch {
 public:
  /// A rate of at least this is worth a guess.
  static constexpr double kWorth = 0.75;
  /// Weight of the newest norm: after a long quiet time, three norms in a row that demand clipping
  /// end the guessing; after a long time of clipping, eleven that do not begin it again.
  static constexpr double kDecay = 0.125;

  bool worth_it() const noexcept { return rate_ >= kWorth; }
  /// The norm of a step is known: `right` if it would have left the guess standing.
  void observe(bool right) noexcept { rate_ += kDecay * ((right ? 1.0 : 0.0) - rate_); }
  double rate() const noexcept { return rate_; }

 private:
  double rate_ = kWorth;  // one guess at the start of a run: if it is wrong, wait for evidence
};

}  // namespace ziggurat
