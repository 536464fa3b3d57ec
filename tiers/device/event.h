// SPDX-License-Identifier: Apache-2.0
// tiers/device/event.h: a point in the order of a stream. It happens when everything that was
// queued before it has finished.
//
// An Event is a handle that is cheap to copy and may outlive its stream and its device. It fails if
// the work before it failed, and everything that waits for it gets that error. A coroutine that
// waits resumes on the reactor; a stream waits by Stream::wait (tiers/device/stream.h).
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
  std::exception_ptr error;    ///< null if it succeeded
  Nanoseconds at{0};           ///< when that was noticed
  bool from_elsewhere = true;  ///< the reactor counts it as work that was under way elsewhere
};
/// A function that runs on the reactor's thread once an event has happened.
using AfterEvent = std::function<void(const EventOutcome&)>;

/// The shared state behind an Event. Each kind of stream has its own.
class EventState {
 public:
  /// `queue` identifies a queue: events of one queue happen one after another. Null means that the
  /// event belongs to no queue. `fate` is the error that it will have, if that is known from the
  /// start. The reactor must outlive the last wait.
  EventState(Reactor& reactor, const void* queue, std::exception_ptr fate)
      : EventState(reactor, queue, std::move(fate), Place::kElsewhere) {}
  virtual ~EventState() = default;
  EventState(const EventState&) = delete;
  EventState& operator=(const EventState&) = delete;

  Reactor& reactor() const noexcept { return reactor_; }
  const void* queue() const noexcept { return queue_; }
  /// Returns a number that grows from event to event of a queue.
  std::uint64_t number() const noexcept { return number_; }
  /// Returns the error that it has or is known to get; null if none is known.
  std::exception_ptr fate() const;
  bool happened() const;
  /// Blocks the calling thread, which must not be a thread that has to make the event happen. What
  /// the thread posts to the reactor afterwards runs after the actions that then() has by now.
  void block() const;

  /// Runs `action` on the reactor's thread once the event has happened; always later, even if it
  /// has happened already. Called on the reactor's thread.
  void then(AfterEvent action);
  /// Marks the event as happened, and posts the actions of then(). Called once, on any thread, by
  /// the code that noticed it.
  void happen(std::exception_ptr error);

 protected:
  /// Who makes the event happen: a driver or a thread, or the reactor itself by its timers, so that
  /// virtual time passes until then.
  enum class Place : std::uint8_t { kElsewhere, kOnReactor };
  EventState(Reactor& reactor, const void* queue, std::exception_ptr fate, Place place)
      : reactor_(reactor),
        place_(place),
        queue_(queue),
        number_(next_number()),
        fate_(std::move(fate)) {}

 private:
  static std::uint64_t next_number() noexcept;
  void post(AfterEvent action);  ///< called with the lock

  Reactor& reactor_;
  const Place place_;
  const void* const queue_;
  const std::uint64_t number_;
  mutable std::mutex mutex_;  // guards everything below
  mutable std::condition_variable changed_;
  bool happened_ = false;
  Nanoseconds happened_at_{0};
  std::exception_ptr fate_;
  std::vector<AfterEvent> actions_;
};

class Event {
 public:
  Event() = default;  ///< an event that has happened
  explicit Event(std::shared_ptr<EventState> state) : state_(std::move(state)) {}

  /// Returns whether it is known to have happened, with or without an error. Use this only to avoid
  /// waits, never to decide anything: what an engine does must not depend on how fast a device is.
  bool happened() const { return state_ == nullptr || state_->happened(); }
  /// Waits until it has happened, by co_await event.wait(), and rethrows its error. Reactor's
  /// thread.
  Task<> wait() const;

  const std::shared_ptr<EventState>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<EventState> state_;
};

}  // namespace ziggurat
