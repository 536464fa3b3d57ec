// SPDX-License-Identifier: Apache-2.0
// base/runtime/clock.cc: the timer heap.
#include "base/runtime/clock.h"

#include <utility>

namespace ziggurat {

Nanoseconds monotonic_now() noexcept { return std::chrono::steady_clock::now().time_since_epoch(); }

Nanoseconds Clock::now() const noexcept {
  return kind_ == Kind::kReal ? monotonic_now() : virtual_now_;
}

void Clock::after(Nanoseconds delay, std::function<void()> action) {
  timers_.push({now() + delay, next_order_++, std::move(action)});
}

std::optional<Nanoseconds> Clock::next_deadline() const {
  if (timers_.empty()) return std::nullopt;
  return timers_.top().deadline;
}

bool Clock::run_next_due() {
  if (timers_.empty()) return false;
  if (kind_ == Kind::kVirtual) {
    virtual_now_ = std::max(virtual_now_, timers_.top().deadline);
  } else if (timers_.top().deadline > now()) {
    return false;
  }
  auto action =
      std::move(const_cast<Timer&>(timers_.top()).action);  // priority_queue has no move-out
  timers_.pop();
  action();
  return true;
}

}  // namespace ziggurat
