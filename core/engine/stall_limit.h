// SPDX-License-Identifier: Apache-2.0
// core/engine/stall_limit.h: how long training has waited for something in all, and a call once
// that is as long as is allowed.
//
// Waits at a time count once. The timer of a limit that is gone does nothing. Reactor's thread.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "base/runtime/clock.h"

namespace ziggurat {

class StallLimit {
 public:
  /// `reached` is called once at most, inside a wait, and may end it.
  StallLimit(Clock& clock, Nanoseconds most, std::function<void()> reached)
      : its_(std::make_shared<Its>(Its{.clock = clock, .most = most})) {
    its_->reached = std::move(reached);
  }

  void begin() {
    if (its_->waits++ > 0) return;
    its_->since = its_->clock.now();
    look_later(its_);
  }
  /// True: nothing waits any more, and something did from since() on.
  bool end() {
    const Nanoseconds all = stalled();
    if (--its_->waits > 0) return false;
    its_->stalled = all;
    return true;
  }
  Nanoseconds since() const noexcept { return its_->since; }
  /// Waits that last still count as far as they have come.
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
    Nanoseconds since{0};    ///< some wait lasts
    Nanoseconds stalled{0};  ///< in what has ended
    bool timed = false;
  };

  /// When the limit would be reached if the wait that has begun went on.
  static void look_later(const std::shared_ptr<Its>& its) {
    if (!its->reached || std::exchange(its->timed, true)) return;
    const Nanoseconds left = std::max(its->most - its->all(), Nanoseconds(0));
    its->clock.after(left, [weak = std::weak_ptr(its)] {
      if (const auto then = weak.lock()) look(then);
    });
  }
  static void look(const std::shared_ptr<Its>& its) {
    its->timed = false;
    if (its->waits == 0) return;  // the next wait looks again
    if (its->all() < its->most) return look_later(its);
    std::exchange(its->reached, {})();
  }

  std::shared_ptr<Its> its_;
};

}  // namespace ziggurat
