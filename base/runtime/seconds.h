// SPDX-License-Identifier: Apache-2.0
// base/runtime/seconds.h: seconds, as settings give them, on the clock that counts nanoseconds.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/runtime/clock.h"

namespace ziggurat {

/// A century: what "for ever" is to a timer. A deadline that far away still fits into a clock that
/// counts from the start of the machine.
inline constexpr Nanoseconds kLongestWait = std::chrono::hours(24 * 365 * 100);

/// Never more than kLongestWait, never less than 0; what is no number is 0. A setting's own limits
/// are its table's to say.
inline Nanoseconds nanoseconds_of(double seconds) noexcept {
  constexpr double kMost = 1e-9 * static_cast<double>(kLongestWait.count());
  if (!(seconds > 0)) return Nanoseconds(0);
  if (seconds >= kMost) return kLongestWait;
  return Nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

}  // namespace ziggurat
