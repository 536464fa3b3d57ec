// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/speculation.h: decides whether a step's update may start before the norm
// is known, guessing that no clipping will be needed.
//
// The decision depends on how often the guess would have been right: an exponentially decayed rate
// over all norms so far, including those of steps that did not guess. A wrong guess moves the
// records of a sweep twice, and a right one hides them in backward. So guessing pays only if it is
// right most of the time. The rate depends only on the sequence of norms, so every rank decides the
// same and a run can be repeated.
#pragma once

namespace ziggurat {

class SpeculationWatch {
 public:
  /// The lowest rate at which a guess is worth its cost.
  static constexpr double kWorth = 0.75;
  /// The weight of the newest norm. After a long time without clipping, three norms in a row that
  /// need it stop the guessing. After a long time with clipping, eleven norms in a row that need
  /// none are required to start it again.
  static constexpr double kDecay = 0.125;

  bool worth_it() const noexcept { return rate_ >= kWorth; }
  /// Takes the norm of a step into account; `right` if a guess would have been right.
  void observe(bool right) noexcept { rate_ += kDecay * ((right ? 1.0 : 0.0) - rate_); }
  double rate() const noexcept { return rate_; }

 private:
  // Allows one guess at the start of a run: if it is wrong, the next needs evidence.
  double rate_ = kWorth;
};

}  // namespace ziggurat
