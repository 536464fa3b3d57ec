// SPDX-License-Identifier: Apache-2.0
// tiers/event.h: a point in the order of a stream: it happens when everything that was queued
// before it has finished.
//
// An Event is a handle, cheap to copy, and may outlive its stream and its device. It fails if what
// it stands for failed, and everybody who waits for it gets that error. Waiting in a coroutine
// resumes on the reactor; a stream waits for it by Stream::wait (tiers/stream.h).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/runtime/clock.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

/// How an event happened.
struct EventOutcome {
  std::exception_ptr error;  ///< null: well
  Nanoseconds at{0};         ///< when that was seen
};
/// What runs on the reactor's thread once an event has happened.
using AfterEvent = std::function<void(const EventOutcome&)>;

/// What stands behind an Event. Each kind of stream has its own.
class EventState {
 public:
  /// Continuations that have become due, of one event or of several in the order of their stream.
  using Due = std::vector<std::pair<AfterEvent, EventOutcome>>;

  /// `queue` says which events come one after another: those of one queue. Null: of no queue.
  /// `fate` is the error it will have, where that is known from the start. The reactor must outlive
  /// the last wait.
  EventState(Reactor& reactor, const void* queue, std::exception_ptr fate)
      : reactor_(reactor), queue_(queue), number_(next_number()), fate_(std::move(fate)) {}
  virtual ~EventState() = default;
  EventState(const EventState&) = delete;
  EventState& operator=(const EventState&) = delete;

  Reactor& reactor() const noexcept { return reactor_; }
  const void* queue() const noexcept { return queue_; }
  /// Grows from event to event of a queue.
  std::uint64_t number() const noexcept { return number_; }
  /// The error it has or is known to get; null where none is known.
  std::exception_ptr fate() const;
  bool happened() const;
  /// Blocks the calling thread, which must not be one that has to make it happen.
  void block() const;

  /// Reactor's thread, where `action` will run: later, also if it has happened.
  void then(AfterEvent action);
  /// Once, by who saw it happen, on any thread; adds to `due` what is to be posted.
  void happen(std::exception_ptr error, Due& due);
  /// One handler for all of them. Any thread.
  static void post(Reactor& reactor, Due due);

 private:
  static std::uint64_t next_number() noexcept;

  Reactor& reactor_;
  const void* const queue_;
  const std::uint64_t number_;
  mutable std::mutex mutex_;  // all below
  mutable std::condition_variable changed_;
  bool happened_ = false;
  Nanoseconds happened_at_{0};
  std::exception_ptr fate_;
  std::vector<AfterEvent> actions_;
};

class Event {
 public:
  Event() = default;  ///< one that has happened
  explicit Event(std::shared_ptr<EventState> state) : state_(std::move(state)) {}

  /// Whether it is known to have happened, well or not. For waiting less, never for deciding: what
  /// an engine does must not depend on how fast a device is.
  bool happened() const { return state_ == nullptr || state_->happened(); }
  /// co_await event.wait(): returns once it has happened; rethrows its error. Reactor's thread.
  Task<> wait() const;

  const std::shared_ptr<EventState>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<EventState> state_;
};

}  // namespace ziggurat
