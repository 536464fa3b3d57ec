// SPDX-License-Identifier: Apache-2.0
// base/runtime/clock.h: time as the engine sees it: the machine's time, or virtual time that jumps
// when nothing is ready.
//
// Owned by the Reactor. Timers fire on the reactor's thread, in order of (deadline, order of
// scheduling), unless a test shuffles those of one instant.
#pragma once

#include <atomic>
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
  /// Thread-safe.
  Nanoseconds now() const noexcept;

  /// Runs `action` on the reactor once `delay` has passed.
  void after(Nanoseconds delay, std::function<void()> action);

  /// Runs timers of one instant in an order that `seed` draws, in place of that of scheduling: what
  /// they end may end in any order then, and no decision may depend on it.
  void shuffle_ties(std::uint64_t seed) noexcept { ties_ = seed; }

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
  std::atomic<Nanoseconds> virtual_now_{Nanoseconds(0)};  // changed on the reactor's thread
  std::uint64_t next_order_ = 0;
  std::uint64_t ties_ = 0;  // the seed of their order; 0 if they are in order
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
};

}  // namespace ziggurat
