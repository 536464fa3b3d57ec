// SPDX-License-Identifier: Apache-2.0
// base/runtime/clock.cc: the timer heap.
#include "base/runtime/clock.h"

#include <utility>

#include "base/checksum.h"

namespace ziggurat {

Nanoseconds monotonic_now() noexcept { return std::chrono::steady_clock::now().time_since_epoch(); }

Nanoseconds Clock::now() const noexcept {
  return kind_ == Kind::kReal ? monotonic_now() : virtual_now_.load(std::memory_order_relaxed);
}

void Clock::after(Nanoseconds delay, std::function<void()> action) {
  const std::uint64_t order = next_order_++;
  timers_.push({now() + delay, ties_ == 0 ? order : mix_seed(ties_, order), std::move(action)});
}

std::optional<Nanoseconds> Clock::next_deadline() const {
  if (timers_.empty()) return std::nullopt;
  return timers_.top().deadline;
}

bool Clock::run_next_due() {
  if (timers_.empty()) return false;
  if (kind_ == Kind::kVirtual) {
    virtual_now_.store(std::max(now(), timers_.top().deadline), std::memory_order_relaxed);
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
