// SPDX-License-Identifier: Apache-2.0
// base/runtime/async.h: what coroutines wait on: a Signal (a state, many waiters) and a WorkGroup
// (work under way).
//
// Reactor's thread only. Waiters resume through the reactor's queue, never inside set().
//
// GCC 12 destroys twice a temporary that owns something when it is built inside a co_await
// expression: name it first, then move it in (tests/base/coroutine_test.cc holds the pattern).
#pragma once

#include <boost/asio/async_result.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <exception>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/runtime/reactor.h"

namespace ziggurat {

/// A state that becomes true (or failed) once; any number of coroutines wait for it. reset() makes
/// it false again. Every waiter gets the outcome it was woken with: a reset, or the end of the
/// signal, between set() and its resumption does not touch it.
class Signal {
 public:
  explicit Signal(Reactor& reactor) : reactor_(&reactor) {}
  Signal(Signal&&) = default;
  Signal& operator=(Signal&&) = default;

  bool is_set() const noexcept { return set_; }
  void set() { finish({}); }
  /// Waiters, now and later, get `error` until reset().
  void fail(std::exception_ptr error) { finish(std::move(error)); }
  void reset() {
    set_ = false;
    error_ = {};
  }

  /// Returns once set; rethrows what fail() gave.
  Task<> wait() { return set_ ? outcome(error_) : suspend(); }

 private:
  struct Waiter {
    virtual ~Waiter() = default;
    virtual void resume(std::exception_ptr outcome) = 0;
  };
  template <class Handler>
  struct Suspended final : Waiter {
    explicit Suspended(Handler its_handler) : handler(std::move(its_handler)) {}
    void resume(std::exception_ptr outcome) override { std::move(handler)(std::move(outcome)); }
    Handler handler;
  };

  static Task<> outcome(std::exception_ptr error) {
    if (error) std::rethrow_exception(error);
    co_return;
  }

  // No coroutine of ours: every transfer goes through here, and frames are cold memory by then.
  Task<> suspend() {
    return boost::asio::async_initiate<const boost::asio::use_awaitable_t<>,
                                       void(std::exception_ptr)>(
        [this](auto handler) {
          using Handler = std::decay_t<decltype(handler)>;
          auto waiter = std::make_unique<Suspended<Handler>>(std::move(handler));
          if (set_) {  // since wait() was called
            resume(std::move(waiter));
          } else {
            waiters_.push_back(std::move(waiter));
          }
        },
        boost::asio::use_awaitable);
  }

  void finish(std::exception_ptr error) {
    set_ = true;
    error_ = std::move(error);
    for (auto& waiter : std::exchange(waiters_, {})) resume(std::move(waiter));
  }

  void resume(std::unique_ptr<Waiter> waiter) {
    boost::asio::post(reactor_->context(),
                      [waiter = std::move(waiter), outcome = error_]() mutable {
                        waiter->resume(std::move(outcome));  // may end this signal
                      });
  }

  Reactor* reactor_;
  bool set_ = false;
  std::exception_ptr error_;
  std::vector<std::unique_ptr<Waiter>> waiters_;
};

/// Counts work under way; wait_idle() returns when the count is back at zero and rethrows the first
/// failure.
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
    while (count_ > 0) co_await idle_.wait();  // more may have been started before we resumed
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
