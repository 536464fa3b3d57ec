// SPDX-License-Identifier: Apache-2.0
// base/runtime/reactor.h: one thread per rank, on which the engine makes all its decisions.
//
// Coroutines (Task) run on the reactor's thread and nowhere else, so engine code holds no locks.
// Work that takes time is started elsewhere (a ring, a worker, a stream) between external_begin()
// and external_end(). If no handler is ready, no work is under way elsewhere and somebody is
// blocked on the engine, that is a lock-up: stall handlers turn it into an error. A blocking call
// never runs on the reactor's thread.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/runtime/clock.h"

namespace ziggurat {

template <class T = void>
using Task = boost::asio::awaitable<T>;

class Reactor {
 public:
  explicit Reactor(Clock::Kind clock_kind = Clock::Kind::kReal);
  ~Reactor();
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  /// Starts the engine thread. Without it, block_on() drives the loop on the caller's thread
  /// (tests, virtual time).
  void start();
  /// Stops the engine thread after the handler that it is running. Called by the destructor.
  void stop();

  boost::asio::io_context& context() noexcept { return context_; }
  Clock& clock() noexcept { return clock_; }
  bool on_reactor_thread() const noexcept;

  /// Runs `action` on the reactor's thread, later; it must not throw. Thread-safe. A thread that
  /// posts must be joined before the reactor is destroyed: it may still be inside post() when
  /// `action` has already run.
  void post(std::function<void()> action);
  /// Does the same for a function that can only be moved.
  template <class Action>
  void make_ready(Action action) {
    if (shuffle_seed_ == 0) {
      boost::asio::post(context_, std::move(action));
    } else {
      shuffled_.push_back(std::make_unique<ReadyAction<Action>>(std::move(action)));
    }
  }
  /// For tests in virtual time: whatever is ready at one instant runs in an order that `seed`
  /// draws, in place of the order in which it became ready, and no decision may depend on it.
  /// Called before anything is ready; from then on only the reactor's thread may make anything
  /// ready. 0 keeps the order.
  void shuffle_ready(std::uint64_t seed);

  /// Starts `task` on the reactor. If the task throws, the exception goes to `on_error` (on the
  /// reactor's thread).
  void spawn(Task<> task, std::function<void(std::exception_ptr)> on_error);

  /// Runs `task` on the reactor, blocks the calling thread until the task ends, and returns its
  /// result or rethrows its exception.
  template <class T>
  T block_on(Task<T> task) {
    std::promise<T> promise;
    std::future<T> future = promise.get_future();
    start_blocking(fulfil(std::move(task), promise), [&future] {
      return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    });
    return future.get();
  }

  /// Destroys an object that may be destroyed only on the reactor's thread, and waits for that.
  template <class T>
  void destroy(std::unique_ptr<T>& object) {
    if (!object) return;
    block_on([](std::unique_ptr<T>& its) -> Task<> {
      its.reset();
      co_return;
    }(object));
  }

  /// Runs everything that can run now, including timers of virtual time, on the caller's thread.
  /// Not for use after start().
  void run_until_idle();

  /// Marks the begin and end of work under way elsewhere whose completion will be posted to this
  /// reactor. Reactor's thread only.
  void external_begin() noexcept { ++external_; }
  void external_end() noexcept { --external_; }
  /// Whether such work is under way. Reactor's thread only.
  bool external_work() const noexcept { return external_ > 0; }

  /// Adds a handler that is called on the reactor's thread at a lock-up (see above). It must fail
  /// everything that waits.
  void on_stall(std::function<void()> handler) { stall_handlers_.push_back(std::move(handler)); }

 private:
  template <class T>
  static Task<> fulfil(Task<T> task, std::promise<T>& promise) {
    try {
      if constexpr (std::is_void_v<T>) {
        co_await std::move(task);
        promise.set_value();
      } else {
        promise.set_value(co_await std::move(task));
      }
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  }

  struct Ready {
    virtual ~Ready() = default;
    virtual void run() = 0;
  };
  template <class Action>
  struct ReadyAction final : Ready {
    explicit ReadyAction(Action its) : action(std::move(its)) {}
    void run() override { std::move(action)(); }
    Action action;
  };

  void start_blocking(Task<> task, const std::function<bool()>& done);
  void loop(const std::function<bool()>& done);
  bool run_handler();
  bool run_ready();
  void wait_one();

  boost::asio::io_context context_;
  std::uint64_t shuffle_seed_ = 0;
  std::uint64_t shuffled_count_ = 0;  // that have run
  std::vector<std::unique_ptr<Ready>> shuffled_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  Clock clock_;
  std::size_t external_ = 0;  // reactor's thread only
  std::size_t blocked_ = 0;   // callers inside block_on(); reactor's thread only
  std::vector<std::function<void()>> stall_handlers_;
  std::thread thread_;
  std::atomic<std::thread::id> loop_thread_{};
  bool stopping_ = false;
};

}  // namespace ziggurat
