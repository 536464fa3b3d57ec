// SPDX-License-Identifier: Apache-2.0
// core/engine/state/stall_limit.h: measures how long training has waited for something in all, and
// makes a call when a limit is reached.
//
// Waits that overlap count once. The timer of a limit that was destroyed does nothing. Reactor's
// thread.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "base/runtime/clock.h"

namespace ziggurat {

class StallLimit {
 public:
  /// Calls `reached` at most once, during a wait; the call may end that wait.
  StallLimit(Clock& clock, Nanoseconds most, std::function<void()> reached)
      : its_(std::make_shared<Its>(Its{.clock = clock, .most = most})) {
    its_->reached = std::move(reached);
  }

  void begin() {
    if (its_->waits++ > 0) return;
    its_->since = its_->clock.now();
    look_later(its_);
  }
  /// Ends a wait. Returns true if no other wait is under way: then there were waits without a gap
  /// since since().
  bool end() {
    const Nanoseconds all = stalled();
    if (--its_->waits > 0) return false;
    its_->stalled = all;
    return true;
  }
  Nanoseconds since() const noexcept { return its_->since; }
  /// Returns the total time of waits, including the time so far of waits that are under way.
  Nanoseconds stalled() const noexcept { return its_->all(); }

 private:
  struct Its {
    Nanoseconds all() const noexcept {
      return waits == 0 ? stalled : stalled + clock.now() - since;
    }
    Clock& clock;
    Nanoseconds most;
    std::function<void()> reached{};
    std::size_t waits = 0;
    Nanoseconds since{0};    ///< when the waits that are under way began
    Nanoseconds stalled{0};  ///< total time of waits that have ended
    bool timed = false;
  };

  /// Starts a timer for the time when the limit would be reached if the present wait went on.
  static void look_later(const std::shared_ptr<Its>& its) {
    if (!its->reached || std::exchange(its->timed, true)) return;
    const Nanoseconds left = std::max(its->most - its->all(), Nanoseconds(0));
    its->clock.after(left, [weak = std::weak_ptr(its)] {
      if (const auto then = weak.lock()) look(then);
    });
  }
  static void look(const std::shared_ptr<Its>& its) {
    its->timed = false;
    if (its->waits == 0) return;  // the next wait starts the timer again
    if (its->all() < its->most) return look_later(its);
    std::exchange(its->reached, {})();
  }

  std::shared_ptr<Its> its_;
};

}  // namespace ziggurat
