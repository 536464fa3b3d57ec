// SPDX-License-Identifier: Apache-2.0
// base/runtime/seconds.h: converts seconds, as settings give them, to nanoseconds, as the clock
// counts them.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/runtime/clock.h"

namespace ziggurat {

/// A century, which timers use for "for ever". A deadline that far away still fits into a clock
/// that counts from the start of the machine.
inline constexpr Nanoseconds kLongestWait = std::chrono::hours(24 * 365 * 100);

/// Converts seconds, limited to 0 and kLongestWait. NaN gives 0. The tables of settings check each
/// setting's own limits.
inline Nanoseconds nanoseconds_of(double seconds) noexcept {
  constexpr double kMost = 1e-9 * static_cast<double>(kLongestWait.count());
  if (!(seconds > 0)) return Nanoseconds(0);
  if (seconds >= kMost) return kLongestWait;
  return Nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

}  // namespace ziggurat
