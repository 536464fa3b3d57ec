// SPDX-License-Identifier: Apache-2.0
// base/runtime/clock.h: time as the engine sees it: the machine's time, or virtual time that jumps
// when nothing is ready.
//
// Owned by the Reactor. Timers fire on the reactor's thread, in order of (deadline, order of
// scheduling).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <vector>

namespace ziggurat {

using Nanoseconds = std::chrono::nanoseconds;

/// Returns the nanoseconds of CLOCK_MONOTONIC. For traces and reports; schedules use Clock.
Nanoseconds monotonic_now() noexcept;

class Clock {
 public:
  enum class Kind { kReal, kVirtual };
  explicit Clock(Kind kind) : kind_(kind) {}

  Kind kind() const noexcept { return kind_; }
  Nanoseconds now() const noexcept;

  /// Runs `action` on the reactor once `delay` has passed.
  void after(Nanoseconds delay, std::function<void()> action);

  /// Returns the deadline of the earliest timer, if there is one.
  std::optional<Nanoseconds> next_deadline() const;
  /// Runs the earliest timer if it is due. In virtual time it is always due, and the clock jumps to
  /// its deadline.
  bool run_next_due();

 private:
  struct Timer {
    Nanoseconds deadline;
    std::uint64_t order;
    std::function<void()> action;
    bool operator>(const Timer& other) const noexcept {
      return deadline != other.deadline ? deadline > other.deadline : order > other.order;
    }
  };

  Kind kind_;
  Nanoseconds virtual_now_{0};
  std::uint64_t next_order_ = 0;
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
};

}  // namespace ziggurat
