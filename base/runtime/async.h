// SPDX-License-Identifier: Apache-2.0
// base/runtime/async.h: what coroutines wait on: a Signal (a state, many waiters), a WorkGroup
// (work under way), and a CancelScope, which ends many waits at once.
//
// Reactor's thread only. Waiters resume through the reactor's queue, never inside set().
//
// GCC 12 destroys a temporary that owns something twice if it is built inside a co_await
// expression: name it first, then move it in (tests/base/coroutine_test.cc holds the pattern).
#pragma once

#include <boost/asio/async_result.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/intrusive/list.hpp>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/runtime/reactor.h"

namespace ziggurat {

/// A coroutine that waits for a Signal. It is woken once, by the signal or by its scope.
class SignalWaiter : public boost::intrusive::list_base_hook<
                         boost::intrusive::link_mode<boost::intrusive::auto_unlink>> {
 public:
  virtual ~SignalWaiter() = default;
  /// Resumes the coroutine through the reactor's queue. Does nothing if it was woken before.
  virtual void wake(Reactor& reactor, const std::exception_ptr& outcome) = 0;
};

/// Ends all waits that belong together, such as those of an engine that has failed or is closed.
/// Outlives the signals of the scope.
class CancelScope {
 public:
  explicit CancelScope(Reactor& reactor) : reactor_(&reactor) {}
  CancelScope(const CancelScope&) = delete;
  CancelScope& operator=(const CancelScope&) = delete;

  /// Gives `error` to everything that waits for a signal of this scope, now or later, set or not. A
  /// second call gives later waiters a fuller reason.
  void cancel(const std::exception_ptr& error) {
    error_ = error;
    while (!waiters_.empty()) {
      SignalWaiter& waiter = waiters_.front();
      waiters_.pop_front();
      waiter.wake(*reactor_, error_);
    }
  }
  bool cancelled() const noexcept { return error_ != nullptr; }
  std::exception_ptr error() const noexcept { return error_; }
  /// Rethrows the error of the last cancel().
  void check() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  friend class Signal;
  Reactor* reactor_;
  std::exception_ptr error_;
  boost::intrusive::list<SignalWaiter, boost::intrusive::constant_time_size<false>> waiters_;
};

/// A state that becomes true (or failed) once; any number of coroutines wait for it. reset() makes
/// it false again. Every waiter gets the outcome with which it was woken, even if the signal is
/// reset or destroyed before the waiter resumes.
class Signal {
 public:
  explicit Signal(Reactor& reactor) : reactor_(&reactor) {}
  /// Makes a signal whose waits end when `scope` is cancelled.
  explicit Signal(CancelScope& scope) : reactor_(scope.reactor_), scope_(&scope) {}
  Signal(Signal&&) = default;
  Signal& operator=(Signal&&) = default;

  bool is_set() const noexcept { return set_; }
  void set() { finish({}); }
  /// Gives `error` to waiters, now and later, until reset().
  void fail(std::exception_ptr error) { finish(std::move(error)); }
  void reset() {
    set_ = false;
    error_ = {};
  }

  /// Returns once the signal is set. Rethrows the error of fail(), or of the scope's cancel().
  Task<> wait() { return ended() ? outcome(final_error()) : suspend(); }

 private:
  template <class Handler>
  class Suspended final : public SignalWaiter {
   public:
    explicit Suspended(Handler handler) : handler_(std::move(handler)) {}
    void wake(Reactor& reactor, const std::exception_ptr& outcome) override {
      if (!handler_) return;
      unlink();
      reactor.make_ready([handler = std::move(*handler_), outcome]() mutable {
        std::move(handler)(std::move(outcome));  // may destroy the signal
      });
      handler_.reset();
    }

   private:
    std::optional<Handler> handler_;
  };

  bool ended() const noexcept { return set_ || (scope_ != nullptr && scope_->cancelled()); }
  std::exception_ptr final_error() const noexcept {
    return scope_ != nullptr && scope_->cancelled() ? scope_->error() : error_;
  }

  static Task<> outcome(std::exception_ptr error) {
    if (error) std::rethrow_exception(error);
    co_return;
  }

  // Is not a coroutine itself: every transfer waits through this function, and another frame would
  // be cold memory when it resumes.
  Task<> suspend() {
    return boost::asio::async_initiate<const boost::asio::use_awaitable_t<>,
                                       void(std::exception_ptr)>(
        [this](auto handler) {
          using Handler = std::decay_t<decltype(handler)>;
          auto waiter = std::make_unique<Suspended<Handler>>(std::move(handler));
          if (ended()) {  // it may have ended since wait() was called
            waiter->wake(*reactor_, final_error());
            return;
          }
          if (scope_ != nullptr) scope_->waiters_.push_back(*waiter);
          waiters_.push_back(std::move(waiter));
        },
        boost::asio::use_awaitable);
  }

  void finish(std::exception_ptr error) {
    set_ = true;
    error_ = std::move(error);
    for (const auto& waiter : std::exchange(waiters_, {})) waiter->wake(*reactor_, error_);
  }

  Reactor* reactor_;
  CancelScope* scope_ = nullptr;
  bool set_ = false;
  std::exception_ptr error_;
  std::vector<std::unique_ptr<SignalWaiter>> waiters_;
};

/// Counts work under way. wait_idle() returns when the count is back at zero, and rethrows the
/// first failure.
class WorkGroup {
 public:
  explicit WorkGroup(Reactor& reactor) : reactor_(&reactor), idle_(reactor) { idle_.set(); }

  /// Starts `task` on the reactor as part of the group.
  void spawn(Task<> task) {
    if (count_++ == 0) idle_.reset();
    reactor_->spawn(run(std::move(task)), [](std::exception_ptr) {});
  }
  std::size_t count() const noexcept { return count_; }
  bool failed() const noexcept { return first_error_ != nullptr; }
  std::exception_ptr error() const noexcept { return first_error_; }

  Task<> wait_idle() {
    while (count_ > 0)
      co_await idle_.wait();  // more may have been started before this coroutine
                              // resumed
    if (first_error_) std::rethrow_exception(first_error_);
  }

 private:
  Task<> run(Task<> task) {
    try {
      co_await std::move(task);
    } catch (...) {
      if (!first_error_) first_error_ = std::current_exception();
    }
    if (--count_ == 0) idle_.set();
  }

  Reactor* reactor_;
  Signal idle_;
  std::size_t count_ = 0;
  std::exception_ptr first_error_;
};

}  // namespace ziggurat
