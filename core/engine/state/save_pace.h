// SPDX-License-Identifier: Apache-2.0
// core/engine/state/save_pace.h: when the next piece of a save may begin, so that the save keeps to
// a bandwidth.
//
// A piece may begin when the time for the pieces before it is over. A save that fell behind,
// because training had the processors or the drive, may catch up for a moment, as with a bucket of
// tokens: otherwise it would end late although the target had time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/runtime/seconds.h"

namespace ziggurat {

class SavePace {
 public:
  /// How far a save may fall behind and still catch up: about as long as a sweep keeps the
  /// processors, and too short to keep a drive from a step.
  static constexpr Nanoseconds kCaughtUpMax = std::chrono::milliseconds(250);

  explicit SavePace(std::uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  /// Returns when a piece of `size_bytes`, which is ready at `now`, may begin. Always `now` or
  /// later.
  Nanoseconds begin(Nanoseconds now, std::uint64_t size_bytes) {
    const Nanoseconds due = std::max(next_.value_or(now), now - kCaughtUpMax);
    const Nanoseconds share =
        nanoseconds_of(static_cast<double>(size_bytes) / static_cast<double>(bytes_per_s_));
    next_ = std::min(due + share, now + kLongestWait);
    return std::max(due, now);
  }

 private:
  std::uint64_t bytes_per_s_;
  std::optional<Nanoseconds> next_;  // when the time for the pieces so far is over
};

}  // namespace ziggurat
