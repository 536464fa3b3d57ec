// SPDX-License-Identifier: Apache-2.0
// tiers/device/event.cc: keeps the state of an event, and posts continuations to the reactor when
// it happens.
#include "tiers/device/event.h"

#include <atomic>
#include <utility>

#include "base/check.h"
#include "base/runtime/async.h"
#include "base/runtime/work_ended.h"

namespace ziggurat {

std::uint64_t EventState::next_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

std::exception_ptr EventState::fate() const {
  const std::lock_guard lock(mutex_);
  return fate_;
}

bool EventState::happened() const {
  const std::lock_guard lock(mutex_);
  return happened_;
}

void EventState::block() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return happened_; });
}

void EventState::then(AfterEvent action) {
  if (place_ == Place::kElsewhere) reactor_.external_begin();
  const std::lock_guard lock(mutex_);
  if (happened_) return post(std::move(action));
  actions_.push_back(std::move(action));
}

void EventState::happen(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  ZIGGURAT_CHECK(!happened_, "an event happened twice");
  if (error) fate_ = std::move(error);
  happened_ = true;
  happened_at_ = reactor_.clock().now();
  for (AfterEvent& action : std::exchange(actions_, {})) post(std::move(action));
  changed_.notify_all();  // under the lock, because the waiter may own the event
}

void EventState::post(AfterEvent action) {
  const EventOutcome outcome{
      .error = fate_, .at = happened_at_, .from_elsewhere = place_ == Place::kElsewhere};
  // Only the handler owns the action: what it owns must not stay on this thread.
  reactor_.post([&reactor = reactor_, outcome, action = std::move(action)] {
    if (outcome.from_elsewhere) work_ended(reactor);
    action(outcome);
  });
}

namespace {

/// Goes on in the event's own action, and not in a later one as behind a Signal: a thread that is
/// blocked by the event may ask for more once it has happened, and would come first.
Task<> wait_for(std::shared_ptr<EventState> state) {
  using Awaitable = boost::asio::use_awaitable_t<>;
  return boost::asio::async_initiate<const Awaitable, void(std::exception_ptr)>(
      [state = std::move(state)](auto waiter) {
        state->then([its = std::make_shared<decltype(waiter)>(std::move(waiter))](
                        const EventOutcome& outcome) { std::move (*its)(outcome.error); });
      },
      boost::asio::use_awaitable);
}

Task<> nothing() { co_return; }

}  // namespace

// Not itself a coroutine, because the event may be a temporary, and a coroutine starts later.
Task<> Event::wait() const { return state_ == nullptr ? nothing() : wait_for(state_); }

}  // namespace ziggurat
