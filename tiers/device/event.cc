// SPDX-License-Identifier: Apache-2.0
// tiers/device/event.cc: keeps the state of an event, and posts continuations to the reactor when
// it happens.
#include "tiers/device/event.h"

#include <atomic>

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
  Due due;
  {
    const std::lock_guard lock(mutex_);
    if (!happened_) {
      actions_.push_back(std::move(action));
      return;
    }
    due.emplace_back(
        std::move(action),
        EventOutcome{
            .error = fate_, .at = happened_at_, .from_elsewhere = place_ == Place::kElsewhere});
  }
  post(reactor_, std::move(due));
}

void EventState::happen(std::exception_ptr error, Due& due) {
  const std::lock_guard lock(mutex_);
  ZIGGURAT_CHECK(!happened_, "an event happened twice");
  if (error) fate_ = std::move(error);
  happened_ = true;
  happened_at_ = reactor_.clock().now();
  for (AfterEvent& action : actions_) {
    due.emplace_back(
        std::move(action),
        EventOutcome{
            .error = fate_, .at = happened_at_, .from_elsewhere = place_ == Place::kElsewhere});
  }
  actions_.clear();
  changed_.notify_all();  // under the lock, because the waiter may own the event
}

void EventState::post(Reactor& reactor, Due due) {
  if (due.empty()) return;
  // Only the handler owns the continuations: what they own must not stay on this thread.
  reactor.post([&reactor, due = std::make_shared<Due>(std::move(due))] {
    for (auto& [action, outcome] : *due) {
      if (outcome.from_elsewhere) work_ended(reactor);
      action(outcome);
      action = nullptr;
    }
  });
}

namespace {

Task<> wait_for(std::shared_ptr<EventState> state, Reactor& reactor) {
  Signal happened(reactor);
  AfterEvent action = [&happened](const EventOutcome& outcome) {
    if (outcome.error) {
      happened.fail(outcome.error);
    } else {
      happened.set();
    }
  };
  state->then(std::move(action));
  co_await happened.wait();
}

Task<> nothing() { co_return; }

}  // namespace

// Not itself a coroutine, because the event may be a temporary, and a coroutine starts later.
Task<> Event::wait() const {
  return state_ == nullptr ? nothing() : wait_for(state_, state_->reactor());
}

}  // namespace ziggurat
